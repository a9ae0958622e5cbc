"""Turns: later segments on a compacted cache."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from conformance.own.models_integration.session.families import (
    ENDS,
    METHODS,
    at_once,
    build,
    greedy,
    prompt,
    states_of,
)
from conformance.own.models_integration.session.sessions import (
    LENGTHS,
    TURN,
    Looking,
    Observed,
    batch,
    check_states,
    live_sets,
    method_of,
    prompts,
    sets,
    turn,
)
from models_integration import CrystalCache, RetainedCache, StreamingLLM
from spec.errors import SpecError
from spec.parameters import TINY
from spec.policy import Needs
from spec.records import CrystalRetention
from spec.retention import Retention

pytestmark = pytest.mark.law("parts-equal-the-whole")


N = 64
NEW = 6


def test_a_batch_has_one_retention_for_each_prompt() -> None:
    model = build("llama")
    ids, mask = batch(prompts())
    with METHODS["streamingllm"]()(model) as run:
        greedy(model, ids, 2, attention_mask=mask)
        assert isinstance(run.retention, tuple)
        assert [one.seen for one in run.retention if isinstance(one, Retention)] == list(LENGTHS)
        with pytest.raises(SpecError, match="kept = '3 prompts': each prompt of a batch has a separate set"):
            run.kept  # noqa: B018
        greedy(model, prompt(40), 2)
        assert isinstance(run.retention, Retention)
        assert run.kept is not None


def test_beams_of_a_batch_stay_with_their_prompt() -> None:
    """Three beams of each of two prompts: two retentions, and each prompt's beams as it has them alone."""
    model, rows = build("llama"), prompts()[:2]
    ids, mask = batch(rows)
    options = {"num_beams": 3, "num_return_sequences": 3}
    with METHODS["crystalcache"]()(model) as run:
        together = greedy(model, ids, NEW, attention_mask=mask, **options)
    found = sets(run)
    for row, own in enumerate(rows):
        with METHODS["crystalcache"]()(model) as single:
            expected = greedy(model, own, NEW, **options)
        assert single.kept is not None
        assert found[row] == single.kept.tolist()
        assert together[3 * row : 3 * row + 3].tolist() == expected.tolist()


def test_rows_that_agree_are_stored_as_one() -> None:
    model = build("llama")
    cache = RetainedCache(model.config)
    with METHODS["streamingllm"]()(model):
        at_once(model, torch.cat([prompt(50, seed=1), prompt(50, seed=2)]), cache)
    assert cache.full_layers[0].rows.shared


@pytest.mark.law("decided-as-the-reference")
@pytest.mark.spec("CC-OBSERVED-LAYER")
@pytest.mark.parametrize(("budget", "which"), [(0.5, 0), (30, 0), (0.5, 1), (30, -1), (0.5, -2)])
def test_the_kept_sets_are_those_of_the_reference(budget: float | int, which: int) -> None:
    """Prompt, steps, turn, steps, turn."""
    policy = CrystalCache(budget, ENDS, replace(TINY, observed_layer=which), backend="numpy")
    check_states(policy, [[text] for text in (prompt(N), turn(1, 1), turn(2, 1), turn(3), turn(4, 1), turn(5, 7))])


def test_a_block_of_one_token_is_a_step() -> None:
    model, kept = build("llama"), []
    for block in (True, False):
        cache = RetainedCache(model.config)
        with METHODS["crystalcache"]()(model) as run:
            at_once(model, prompt(N), cache)
            if block:
                with run.prompt():
                    at_once(model, turn(1, 1), cache)
            else:
                at_once(model, turn(1, 1), cache)
            assert states_of(cache).pending_tokens == 1
            at_once(model, turn(2), cache)
        kept.append(cache.stored_positions().tolist())
    assert kept[0] == kept[1]


def hiding(columns: slice) -> dict[str, Tensor]:
    """A turn of two rows, and a mask that hides these columns of the second."""
    mask = torch.ones(2, N + TURN, dtype=torch.int64)
    mask[1, columns] = 0
    return {"input_ids": torch.cat([turn(1), turn(2)]), "attention_mask": mask}


SEEN = torch.arange(N + TURN)[None]
# Family, rows of the cache, what is given of a turn, words of the error.
WRONG: list[tuple[str, int, dict[str, Tensor], str]] = [
    ("llama", 1, {"attention_mask": (SEEN != N + TURN - 1).long()}, "right padding is not supported"),
    ("llama", 1, {"attention_mask": (SEEN > 3).long()}, "must have the padding of the earlier prompt"),
    ("llama", 1, {"attention_mask": torch.ones(1, TURN, dtype=torch.int64)}, "must have a column for each token"),
    ("llama", 1, {"position_ids": torch.arange(32, 44)[None]}, "must be 64 to 75, because the tokens follow"),
    ("llama", 1, {"input_ids": torch.cat([turn(1), turn(2)])}, "must have 1 rows, like the cache"),
    ("llama", 1, {"input_ids": torch.full((1, TURN), 999)}, "input_ids = 999"),
    ("llama", 2, hiding(slice(N, N + TURN - 1)), "1 tokens.: .* a single token is a decode step"),
    ("llama", 2, hiding(slice(N, N + TURN)), "0 tokens.: .* a single token is a decode step"),
    ("llama", 2, hiding(slice(N + TURN - 4, N + TURN)), "right padding is not supported"),
    ("llama", 2, hiding(slice(N - 4, N + 4)), r"padding of the earlier prompt, \[0, 0\]"),
    ("gemma3", 2, hiding(slice(N, N + 4)), "not supported with sliding-window or recurrent layers"),
]


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize(("family", "rows"), [("llama", 1), ("llama", 2), ("gemma3", 2)])
def test_a_turn_that_cannot_follow_is_named_and_changes_nothing(family: str, rows: int) -> None:
    model, cache = build(family), RetainedCache(build(family).config)
    right = torch.cat([turn(1), turn(2)])[:rows]
    with METHODS["crystalcache"]()(model):
        at_once(model, torch.cat([prompt(N, seed=row) for row in range(rows)]), cache)
        expected = at_once(model, right, other := copy.deepcopy(cache))
        for _, _, given, words in (wrong for wrong in WRONG if wrong[:2] == (family, rows)):
            with pytest.raises(SpecError, match=words), torch.no_grad():
                model(**{"input_ids": turn(1), "past_key_values": cache, **given})
        assert torch.equal(at_once(model, right, cache), expected)
    assert live_sets(cache) == live_sets(other)


@pytest.mark.law("decided-as-the-reference")
def test_scorers_without_states_see_all_stored_keys_and_the_segment_s_queries() -> None:
    model, cache = build("llama", dtype=torch.float64), RetainedCache(build("llama").config)
    observed, scorer = Observed(model), Looking(Needs("observed", None))
    with observed.forward(), METHODS["streamingllm"]()(model):
        at_once(model, prompt(N), cache)
    stored = cache.stored_positions()
    with observed.forward() as seen, method_of(scorer)(model):
        at_once(model, turn(1), cache)
    (observation,) = scorer.shown
    assert observation.seen == N + TURN
    assert observation.positions is not None
    assert observation.positions.tolist() == [*stored.tolist(), *range(N, N + TURN)]
    (view,) = observation.layers.values()
    np.testing.assert_allclose(view.q, seen.q, atol=1e-6)
    np.testing.assert_allclose(view.k, observed.stored(stored, seen), atol=1e-6)


@pytest.mark.spec("PO-TURN")
def test_a_larger_budget_brings_nothing_back_and_evicts_nothing() -> None:
    model = build("llama")
    for small, large in (
        (StreamingLLM(20, 2), StreamingLLM(60, 2)),
        (CrystalCache(20, ENDS, TINY, "numpy"), CrystalCache(60, ENDS, TINY, "numpy")),
    ):
        cache = RetainedCache(model.config)
        with small(model):
            at_once(model, prompt(N), cache)
        before = cache.stored_positions().tolist()
        with large(model):
            at_once(model, turn(1), cache)
        assert cache.stored_positions().tolist() == [*before, *range(N, N + TURN)]


@pytest.mark.law("figures-are-counted-right")
def test_what_a_turn_reports() -> None:
    model, cache = build("llama"), RetainedCache(build("llama").config)
    with CrystalCache(6, ENDS, replace(TINY, T_max=32), "numpy")(model) as run:
        at_once(model, prompt(N), cache)
        assert isinstance(run.retention, CrystalRetention)
        stored = cache.stored_length
        at_once(model, turn(1), cache)
    assert isinstance(run.retention, Retention)
    assert run.retention.seen == N + TURN
    assert run.over_budget == cache.stored_length - 6 > 0
    assert stored < N
    assert run.bytes_freed == (N + TURN - cache.stored_length) * 3 * 2 * 2 * 12 * 4
    numbers = f"seen={N + TURN}, stored={cache.stored_length}, bytes_freed={run.bytes_freed}"
    assert repr(run) == f"Session('crystalcache', budget=6, {numbers})"
    assert set(run.timings) == {"capture", "decision", "compaction"}
