"""Turns through generate, in pieces, in batches, under changing policies; and turns that are refused."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import DynamicCache

from conformance.own.models_integration.session.crossings import crossed
from conformance.own.models_integration.session.families import (
    ENDS,
    METHODS,
    at_once,
    build,
    greedy,
    prompt,
    relative,
    states_of,
)
from conformance.own.models_integration.session.observed import Observed
from conformance.own.models_integration.session.probe import Looking, method_of
from conformance.own.models_integration.session.test_batches import batch, prompts, sets
from conformance.own.models_integration.session.test_turns import NEW, TURN, N, same_state, turn
from models_integration import CrystalCache, RetainedCache, StreamingLLM
from spec.errors import SpecError
from spec.parameters import TINY
from spec.policy import Needs
from spec.records import CrystalRetention
from spec.retention import Retention

pytestmark = pytest.mark.law("parts-equal-the-whole")

methods = pytest.mark.parametrize("method", METHODS)

CHUNKS_AFTER_A_TURN = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 18)
"""Before, `prefill_chunk_size` reads a conversation from its start again, behind what the cache holds of it."""


@crossed("cut", [(1, 11), (5, 1, 6)])
def test_a_turn_in_pieces_is_the_turn_in_one_forward(family: str, cut: tuple[int, ...]) -> None:
    model, found = build(family, dtype=torch.float32 if family == "gemma2" else torch.float64), []
    for pieces in ([TURN], list(cut)):
        cache = RetainedCache(model.config)
        with METHODS["crystalcache"]()(model) as run:
            at_once(model, prompt(N), cache)
            at_once(model, turn(1, 1), cache)
            before = cache.stored_length
            with run.prompt():
                logits = [at_once(model, piece, cache) for piece in torch.split(turn(2), pieces, dim=1)]
                assert cache.stored_length == before + TURN
            assert run.kept is not None
            assert run.kept.tolist() == cache.stored_positions().tolist()
        found.append((torch.cat(logits, dim=1), states_of(cache).rows[0]))
    (expected, state), (logits_of_pieces, state_of_pieces) = found
    bound = 1e-5 if family == "gemma2" else 1e-10
    assert relative(logits_of_pieces, expected) < bound
    same_state(state_of_pieces, state, rtol=10 * bound)


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


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@methods
@pytest.mark.parametrize("chunk", [None, 5, 1])
def test_generate_takes_a_second_turn(family: str, method: str, chunk: int | None) -> None:
    """The whole conversation is passed again, with the cache of the first turn."""
    model, cache = build(family), DynamicCache()
    options = {} if chunk is None else {"prefill_chunk_size": chunk}
    with METHODS[method]()(model) as run:
        first = greedy(model, prompt(N), NEW, past_key_values=cache)
        asked = torch.cat([prompt(N), first, turn(1)], dim=1)
        if chunk is not None and not CHUNKS_AFTER_A_TURN:
            with pytest.raises(SpecError, match="attention_mask"):
                greedy(model, asked, NEW, past_key_values=cache, **options)
            return
        second = greedy(model, asked, NEW, past_key_values=cache, **options)
        kept = run.kept
    # The last token of the first answer had not been read: it belongs to the turn.
    by_hand = RetainedCache(model.config)
    with METHODS[method]()(model) as run:
        at_once(model, prompt(N), by_hand)
        for token in torch.split(first[:, :-1], 1, dim=1):
            at_once(model, token, by_hand)
        token = at_once(model, torch.cat([first[:, -1:], turn(1)], dim=1), by_hand)[:, -1:].argmax(-1)
        np.testing.assert_array_equal(kept, run.kept)
        chosen = [int(token)]
        while len(chosen) < NEW:
            token = at_once(model, token, by_hand)[:, -1:].argmax(-1)
            chosen.append(int(token))
    assert second[0].tolist() == chosen


@crossed("method", ["crystalcache", "streamingllm"], always=["crystalcache"])
def test_turns_of_padded_rows_equal_their_single_runs(family: str, method: str) -> None:
    """Rows whose prompts differ in length take turns of one length."""
    model = build(family, dtype=torch.float32 if family == "gemma2" else torch.float64)
    bound, rows = 1e-5 if family == "gemma2" else 1e-10, prompts()
    ids, mask = batch(rows)
    new = [torch.cat([turn(10 * number + row, n) for row in range(3)]) for number, n in enumerate((1, TURN, 1, 7))]
    cache = RetainedCache(model.config)
    with METHODS[method]()(model) as run:
        at_once(model, ids, cache, attention_mask=mask)
        found = [at_once(model, ids, cache) for ids in new]
    for row, own in enumerate(rows):
        single = RetainedCache(model.config)
        with METHODS[method]()(model) as alone:
            at_once(model, own, single)
            expected = [at_once(model, ids[row : row + 1], single) for ids in new]
        for together, other in zip(found, expected, strict=True):
            assert relative(together[row], other[0]) < bound
        assert alone.kept is not None
        assert sets(run)[row] == cache.stored_positions(row).tolist() == alone.kept.tolist()


def test_a_turn_may_pass_the_mask_of_all_columns() -> None:
    model, kept = build("llama"), []
    ids, mask = batch(prompts())
    for given in (True, False):
        cache = RetainedCache(model.config)
        with METHODS["crystalcache"]()(model) as run:
            at_once(model, ids, cache, attention_mask=mask)
            options = {"attention_mask": torch.nn.functional.pad(mask, (0, TURN), value=1)} if given else {}
            at_once(model, torch.cat([turn(row) for row in range(3)]), cache, **options)
            kept.append(sets(run))
    assert kept[0] == kept[1]


WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "padding on the right": (
        "right padding is not served", {"attention_mask": (torch.arange(N + TURN) != N + TURN - 1).long()[None]},
    ),
    "a hidden token": (
        "the prompt's padding so far was", {"attention_mask": (torch.arange(N + TURN) > 3).long()[None]},
    ),
    "a mask of the turn alone": (
        "must have a column for each token", {"attention_mask": torch.ones(1, TURN, dtype=torch.int64)},
    ),
    "positions by slot": ("must be 64 to 75: they follow what was seen", {"position_ids": torch.arange(32, 44)[None]}),
    "other rows": ("the cache has 1 rows", {"input_ids": torch.cat([turn(1), turn(2)])}),
    "an id past the vocabulary": ("input_ids = 999", {"input_ids": torch.full((1, TURN), 999)}),
}


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize("name", WRONG)
def test_a_turn_that_cannot_follow_is_named_and_changes_nothing(name: str) -> None:
    words, arguments = WRONG[name]
    model, kept = build("llama"), []
    for wrong in (True, False):
        cache = RetainedCache(model.config)
        with METHODS["crystalcache"]()(model), torch.no_grad():
            at_once(model, prompt(N), cache)
            if wrong:
                with pytest.raises(SpecError, match=words):
                    model(**{"input_ids": turn(1), "past_key_values": cache, **arguments})
            at_once(model, turn(1), cache)
        kept.append(cache.stored_positions().tolist())
    assert kept[0] == kept[1]


@pytest.mark.law("refused-before-anything-changes")
def test_a_policy_that_reads_ids_without_states_serves_one_segment() -> None:
    model, cache = build("llama"), RetainedCache(build("llama").config)
    with method_of(Looking(Needs("observed", None, token_ids=True)))(model):
        at_once(model, prompt(N), cache)
        with pytest.raises(SpecError, match=r"evicts from the first prompt only: .* `with run\.reading"):
            at_once(model, turn(1), cache)


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


@pytest.mark.law("refused-before-anything-changes")
def test_another_policy_s_cache_is_refused_by_crystalcache_alone() -> None:
    model, cache = build("llama"), RetainedCache(build("llama").config)
    with METHODS["streamingllm"]()(model):
        at_once(model, prompt(N), cache)
    with METHODS["crystalcache"]()(model), pytest.raises(SpecError, match="under a different policy"):
        at_once(model, turn(1), cache)
    with METHODS["streamingllm"]()(model):
        at_once(model, turn(1), cache)
    other = RetainedCache(model.config)
    with METHODS["crystalcache"]()(model):
        at_once(model, prompt(N), other)
    with METHODS["streamingllm"]()(model) as run:
        at_once(model, turn(1), other)
    assert run.kept is not None
    assert other.stored_positions().tolist() == run.kept.tolist()
    with METHODS["crystalcache"]()(model), pytest.raises(SpecError, match="under a different policy"):
        at_once(model, turn(1), other)


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
