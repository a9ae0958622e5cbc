"""Turns: later segments on a compacted cache, in pieces, through generate; padded rows equal their single runs."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from conformance.own.models_integration.session.families import (
    ENDS,
    FAMILIES,
    METHODS,
    SLIDING,
    at_once,
    build,
    greedy,
    prompt,
    relative,
    states_of,
)
from conformance.own.models_integration.session.sessions import (
    LENGTHS,
    TURN,
    Looking,
    Observed,
    T,
    batch,
    breathing,
    live_sets,
    method,
    method_of,
    now,
    prompts,
    same_state,
    sets,
    turn,
)
from models_integration import CrystalCache, RetainedCache, StreamingLLM
from models_integration.policies.methods import RetentionPolicy
from reference.crystalcache import empty_state, extend
from reference.crystalcache.activation import inverse_key_norms
from reference.crystalcache.tail import append
from spec.budget import parse_budget
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
        with pytest.raises(SpecError, match="kept = '3 prompts': a batch has no single kept set"):
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


FULL = [family for family in FAMILIES if family not in SLIDING]
LIVES: dict[str, Callable[[], RetentionPolicy]] = {**METHODS, "breathing": breathing}
BY_HEAD: dict[str, Callable[[], RetentionPolicy]] = {name: partial(method, name) for name in ("adakv", "h2o", "rkv")}
# What three rows read, one list each: a prompt, then forwards of their own lengths, or of one token.
FORWARDS = ((61, 1, 12, 1, 1, 5, 1, 1), (44, 1, 5, 1, 1, 9, 1, 1), (52, 1, 9, 1, 1, 2, 1, 1))
PROMPTS_ALONE_DIFFER = tuple((n, 1, 12, 1, 7) for n in LENGTHS)


def pieces(row: int, forwards: Sequence[Sequence[int]] = FORWARDS) -> list[Tensor]:
    return [prompt(n, seed=1000 * row + number) for number, n in enumerate(forwards[row])]


def together(
    model: PreTrainedModel, policy: RetentionPolicy, rows: Sequence[Sequence[Tensor]], *, masks: bool = True,
    known: Any = None,
) -> tuple[RetainedCache, list[list[Tensor]]]:
    """The cache, and each row's logits at its own tokens, forward by forward."""
    cache = RetainedCache(model.config) if known is None else known[0]
    shown = torch.empty(len(rows), 0, dtype=torch.int64) if known is None else known[1]
    found: list[list[Tensor]] = [[] for _ in rows]
    with policy(model):
        for forward in zip(*rows, strict=True):
            ids, mask = batch(forward)
            shown = torch.cat([shown, mask], dim=1)
            options = {"attention_mask": shown} if masks or not bool(mask.all()) else {}
            logits = at_once(model, ids, cache, **options)
            for row, own in enumerate(forward):
                found[row].append(logits[row, ids.shape[1] - own.shape[1] :])
    return cache, found


def alone(model: PreTrainedModel, policy: RetentionPolicy, row: Sequence[Tensor]) -> tuple[RetainedCache, list[Tensor]]:
    cache = RetainedCache(model.config)
    with policy(model):
        return cache, [at_once(model, ids, cache)[0] for ids in row]


def stored(cache: RetainedCache, row: int = 0) -> list[list[int]]:
    """The positions that each layer and head stores of a row."""
    return [layer.head_positions(row, head).tolist() for layer in cache.full_layers for head in range(layer.heads)]


def agree(
    model: PreTrainedModel, policy: Callable[[], RetentionPolicy], rows: Sequence[Sequence[Tensor]], **given: Any,
) -> None:
    """Kept positions, states and logits of each row are those of its single run; no slot holds padding for ever."""
    bound = 1e-10 if model.dtype == torch.float64 else 1e-5
    cache, found = together(model, policy(), rows, **given)
    for row, own in enumerate(rows):
        single, expected = alone(model, policy(), own)
        assert stored(cache, row) == stored(single)
        for a, b in zip(found[row], expected, strict=True):
            assert relative(a, b) < bound
        if policy is breathing:
            (state,) = now(single)
            same_state(now(cache)[row], state, rtol=1e3 * bound)
    if not cache.layers_differ:
        widest = max(len(cache.stored_positions(row)) for row in range(len(rows)))
        assert {layer.stored_length for layer in cache.full_layers} == {widest}


@pytest.mark.spec("PO-TURN")
@pytest.mark.parametrize(("family", "life"), [
    *product([*SLIDING, "llama"], ["crystalcache", "streamingllm"]), *product(["llama"], BY_HEAD),
])
def test_turns_of_padded_rows_equal_their_single_runs(family: str, life: str) -> None:
    """Rows whose prompts differ in length take turns of one length."""
    model = build(family, dtype=torch.float32 if family == "gemma2" else torch.float64)
    agree(model, (LIVES | BY_HEAD)[life], [pieces(row, PROMPTS_ALONE_DIFFER) for row in range(3)])


@pytest.mark.parametrize(("family", "life"), [
    *(("llama", life) for life in LIVES),
    *((family, [*LIVES][-1 - at % 2 * 3]) for at, family in enumerate(FULL) if family != "llama"),
])
def test_each_row_equals_its_single_run(family: str, life: str) -> None:
    """Two padded turns behind a padded prompt, with steps between them, in which every fourth breathes."""
    agree(build(family, dtype=torch.float64), LIVES[life], [pieces(row) for row in range(3)])


@pytest.mark.parametrize(("attention", "masks"), [("eager", True), ("sdpa", False)])
def test_steps_after_it_may_leave_the_mask_out(attention: str, masks: bool) -> None:
    agree(build("llama", attention=attention), breathing, [pieces(row) for row in range(3)], masks=masks)


def test_what_a_mask_hides_of_a_turn_was_never_read() -> None:
    """Holes anywhere but in the last column: the row's tokens are the others."""
    model, rows = build("llama", dtype=torch.float64), [prompt(N, seed=row) for row in range(2)]
    shown = torch.ones(2, TURN, dtype=torch.int64)
    shown[0, [2, 3, 7]] = shown[1, [0, 9]] = 0
    for life in LIVES:
        cache, ids = RetainedCache(model.config), torch.cat([turn(1), turn(2)])
        with LIVES[life]()(model):
            at_once(model, torch.cat(rows), cache)
            logits = at_once(model, ids, cache, attention_mask=torch.nn.functional.pad(shown, (N, 0), value=1))
            after = at_once(model, torch.cat([turn(3, 1)] * 2), cache)
        for row, own in enumerate(rows):
            kept = ids[row : row + 1, shown[row].bool()]
            single, expected = alone(model, LIVES[life](), [own, kept, turn(3, 1)])
            assert cache.stored_positions(row).tolist() == single.stored_positions().tolist()
            assert relative(logits[row, shown[row].bool()], expected[1]) < 1e-10
            assert relative(after[row], expected[2]) < 1e-10


def test_generate_reads_a_padded_turn() -> None:
    """The second question of each row behind its own first answer, as a chat in a batch has it."""
    model, first = build("llama"), prompts()
    ids, mask = batch(first)
    more, shown = batch([turn(row, (12, 5, 9)[row]) for row in range(3)])
    cache = RetainedCache(model.config)
    with breathing()(model):
        answers = greedy(model, ids, T + 2, attention_mask=mask, past_key_values=cache)
        history = torch.cat([ids, answers, more], dim=1)
        seen = torch.cat([mask, torch.ones_like(answers), shown], dim=1)
        second = greedy(model, history, T + 2, attention_mask=seen, past_key_values=cache)
    for row, own in enumerate(first):
        single = RetainedCache(model.config)
        with breathing()(model):
            answer = greedy(model, own, T + 2, past_key_values=single)
            history = torch.cat([own, answer, turn(row, (12, 5, 9)[row])], dim=1)
            assert answers[row].tolist() == answer[0].tolist()
            assert second[row].tolist() == greedy(model, history, T + 2, past_key_values=single)[0].tolist()


@pytest.mark.law("decided-as-the-reference")
@pytest.mark.spec("CC-OBSERVED-LAYER")
@pytest.mark.parametrize(("budget", "which"), [(0.5, 0), (30, 0), (0.5, 1), (30, -1), (0.5, -2)])
def test_the_kept_sets_are_those_of_the_reference(budget: float | int, which: int) -> None:
    """Prompt, steps, turn, steps, turn: the states equal those that the reference gives on the same q and k."""
    model, parameters = build("llama", dtype=torch.float64), replace(TINY, observed_layer=which)
    observed, expected = Observed(model, layer=which % 3), empty_state(parse_budget(budget))
    with CrystalCache(budget, ENDS, parameters, backend="numpy")(model):
        cache = RetainedCache(model.config)
        for ids in (prompt(N), turn(1, 1), turn(2, 1), turn(3), turn(4, 1), turn(5, 7)):
            with observed.forward() as seen:
                at_once(model, ids, cache)
            numbers = ids[0].numpy()
            if len(numbers) == 1:
                expected = append(expected, int(numbers[0]), float(inverse_key_norms(seen.new_k)[0]))
            else:
                k = observed.stored(expected.stored, seen)
                expected = extend(expected, seen.q, k, numbers, ENDS, TINY)
                (state,) = states_of(cache).rows
                same_state(state, expected)
            assert cache.stored_positions().tolist() == expected.stored.tolist()


@pytest.mark.parametrize(("family", "cut"), [("llama", (5, 1, 6)), ("gemma3", (1, 11))])
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


def hiding(columns: slice) -> dict[str, Tensor]:
    """A turn of two rows, and a mask that hides these columns of the second."""
    mask = torch.ones(2, N + TURN, dtype=torch.int64)
    mask[1, columns] = 0
    return {"input_ids": torch.cat([turn(1), turn(2)]), "attention_mask": mask}


SEEN = torch.arange(N + TURN)[None]
# Family, rows of the cache, what is given of a turn, words of the error.
WRONG: list[tuple[str, int, dict[str, Tensor], str]] = [
    ("llama", 1, {"attention_mask": (SEEN != N + TURN - 1).long()}, "right padding is not served"),
    ("llama", 1, {"attention_mask": (SEEN > 3).long()}, "the prompt's padding so far was"),
    ("llama", 1, {"attention_mask": torch.ones(1, TURN, dtype=torch.int64)}, "must have a column for each token"),
    ("llama", 1, {"position_ids": torch.arange(32, 44)[None]}, "must be 64 to 75: they follow what was seen"),
    ("llama", 1, {"input_ids": torch.cat([turn(1), turn(2)])}, "the cache has 1 rows"),
    ("llama", 1, {"input_ids": torch.full((1, TURN), 999)}, "input_ids = 999"),
    ("llama", 2, hiding(slice(N, N + TURN - 1)), "1 tokens.: one query is a decode step"),
    ("llama", 2, hiding(slice(N, N + TURN)), "0 tokens.: one query is a decode step"),
    ("llama", 2, hiding(slice(N + TURN - 4, N + TURN)), "right padding is not served"),
    ("llama", 2, hiding(slice(N - 4, N + 4)), r"padding so far was \[0, 0\]"),
    ("gemma3", 2, hiding(slice(N, N + 4)), "not served beside sliding-window or recurrent layers"),
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
