"""Rows of a batch that differ in length, in prompts and in turns: left-padded, each row equals its single run."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from conformance.own.models_integration.session.families import (
    FAMILIES,
    METHODS,
    SLIDING,
    at_once,
    build,
    greedy,
    prompt,
    relative,
)
from conformance.own.models_integration.session.masked import Masked
from conformance.own.models_integration.session.sessions import (
    LENGTHS,
    TURN,
    T,
    batch,
    breathing,
    now,
    prompts,
    same_state,
    sets,
    turn,
)
from models_integration import RetainedCache
from models_integration.cache.positions import EMPTY
from models_integration.policies.methods import RetentionPolicy
from spec.errors import SpecError
from spec.retention import Retention

pytestmark = pytest.mark.law("parts-equal-the-whole")


N = 64
NEW = 6


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_generate_serves_padded_batches(family: str) -> None:
    model, rows = build(family), prompts()
    ids, mask = batch(rows)
    with METHODS["crystalcache"]()(model) as run:
        chosen = greedy(model, ids, NEW, attention_mask=mask)
    for row, alone_ids in enumerate(rows):
        assert chosen[row].tolist() == Masked(model, alone_ids, sets(run)[row]).greedy(NEW)


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


@pytest.mark.law("eviction-equals-masking")
def test_a_row_left_alone_has_no_empty_slots() -> None:
    """It stood beside one that keeps more, and had as many slots."""
    model, ids, new = build("llama"), torch.cat([prompt(61, seed=seed) for seed in (1, 2)]), prompt(NEW, seed=50)
    cache = RetainedCache(model.config)
    with METHODS["fullcache"]()(model):
        at_once(model, ids, cache)
    kept = [np.arange(5), np.arange(20)]
    cache.compact([Retention.shared(own, 61) for own in kept])
    cache.batch_select_indices(torch.tensor([0]))
    assert cache.stored_length == 5
    found = at_once(model, new, cache)
    assert relative(found, Masked(model, ids[:1], kept[0].tolist()).read(new)) < 1e-5


def test_rows_that_agree_are_stored_as_one() -> None:
    model = build("llama")
    cache = RetainedCache(model.config)
    with METHODS["streamingllm"]()(model) as run:
        at_once(model, torch.cat([prompt(50, seed=1), prompt(50, seed=2)]), cache)
    assert isinstance(run.retention, tuple)
    assert cache.full_layers[0].rows.shared
    following = torch.cat([prompt(4, seed=3), prompt(4, seed=4)])
    found = at_once(model, following, cache)
    for row in range(2):
        oracle = Masked(model, prompt(50, seed=row + 1), sets(run)[row])
        assert relative(found[row], oracle.read(following[row : row + 1])[0]) < 1e-5


FULL = [family for family in FAMILIES if family not in SLIDING]
LIVES: dict[str, Callable[[], RetentionPolicy]] = {**METHODS, "breathing": breathing}
# What three rows read, one list each: a prompt, then forwards of their own lengths, or of one token.
FORWARDS = ((61, 1, 12, 1, 1, 5, 1, 1), (44, 1, 5, 1, 1, 9, 1, 1), (52, 1, 9, 1, 1, 2, 1, 1))


def pieces(row: int) -> list[Tensor]:
    return [prompt(n, seed=1000 * row + number) for number, n in enumerate(FORWARDS[row])]


def together(
    model: PreTrainedModel, method: RetentionPolicy, rows: Sequence[Sequence[Tensor]], *, masks: bool = True,
    known: Any = None,
) -> tuple[RetainedCache, list[list[Tensor]]]:
    """The cache, and each row's logits at its own tokens, forward by forward."""
    cache = RetainedCache(model.config) if known is None else known[0]
    shown = torch.empty(len(rows), 0, dtype=torch.int64) if known is None else known[1]
    found: list[list[Tensor]] = [[] for _ in rows]
    with method(model):
        for forward in zip(*rows, strict=True):
            ids, mask = batch(forward)
            shown = torch.cat([shown, mask], dim=1)
            options = {"attention_mask": shown} if masks or not bool(mask.all()) else {}
            logits = at_once(model, ids, cache, **options)
            for row, own in enumerate(forward):
                found[row].append(logits[row, ids.shape[1] - own.shape[1] :])
    return cache, found


def alone(model: PreTrainedModel, method: RetentionPolicy, row: Sequence[Tensor]) -> tuple[RetainedCache, list[Tensor]]:
    cache = RetainedCache(model.config)
    with method(model):
        return cache, [at_once(model, ids, cache)[0] for ids in row]


def agree(
    model: PreTrainedModel, method: Callable[[], RetentionPolicy], rows: Sequence[Sequence[Tensor]], **given: Any,
) -> None:
    """Kept positions, states and logits of each row are those of its single run; no slot holds padding for ever."""
    bound = 1e-10 if model.dtype == torch.float64 else 1e-5
    cache, found = together(model, method(), rows, **given)
    for row, own in enumerate(rows):
        single, expected = alone(model, method(), own)
        assert cache.stored_positions(row).tolist() == single.stored_positions().tolist()
        for a, b in zip(found[row], expected, strict=True):
            assert relative(a, b) < bound
        if method is breathing:
            (state,) = now(single)
            same_state(now(cache)[row], state, rtol=1e3 * bound)
    widest = max(len(cache.stored_positions(row)) for row in range(len(rows)))
    assert {layer.stored_length for layer in cache.full_layers} == {widest}


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


def test_rows_that_began_together_may_part() -> None:
    """Two rows whose caches agree; and one row alone, whose turn is padded all the same."""
    model = build("llama", dtype=torch.float64)
    for life in ("streamingllm", "fullcache", "crystalcache"):
        rows = [[prompt(N, seed=row), turn(row, 12 - 4 * row), turn(9, 1), turn(4 + row, 2 + row)] for row in range(2)]
        agree(model, LIVES[life], rows)
    _, expected = alone(model, breathing(), [prompt(N), turn(1), turn(2, 1)])
    cache, mask = RetainedCache(model.config), torch.ones(1, N + TURN + 3, dtype=torch.int64)
    mask[:, N : N + 3] = 0
    with breathing()(model):
        at_once(model, prompt(N), cache)
        second = at_once(model, torch.cat([turn(7, 3), turn(1)], dim=1), cache, attention_mask=mask)
        third = at_once(model, turn(2, 1), cache)
    assert relative(second[0, 3:], expected[1]) < 1e-10
    assert relative(third[0], expected[2]) < 1e-10


@pytest.mark.parametrize("cut", [(7, 5), (8, 2, 2)], ids=str)
def test_a_row_may_begin_in_a_later_piece(cut: tuple[int, ...]) -> None:
    """Turns of 12 and 5 tokens in forwards of these sizes: the second row's first columns are padding alone."""
    model = build("llama", dtype=torch.float64)
    rows = [[prompt(N, seed=row), turn(row, n)] for row, n in enumerate((12, 5))]
    cache, ids = RetainedCache(model.config), batch([row[1] for row in rows])
    shown = torch.nn.functional.pad(ids[1], (N, 0), value=1)
    with breathing()(model) as run:
        at_once(model, torch.cat([row[0] for row in rows]), cache)
        with run.prompt():
            seen, logits = N, []
            for piece in torch.split(ids[0], list(cut), dim=1):
                seen += piece.shape[1]
                logits.append(at_once(model, piece, cache, attention_mask=shown[:, :seen]))
    for row, own in enumerate(rows):
        single, expected = alone(model, breathing(), own)
        assert cache.stored_positions(row).tolist() == single.stored_positions().tolist()
        n = own[1].shape[1]
        assert relative(torch.cat(logits, dim=1)[row, -n:], expected[1][-n:]) < 1e-10


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


@pytest.mark.law("freed-memory")
def test_padding_is_not_stored() -> None:
    """Not even by a policy that evicts nothing."""
    model = build("llama")
    rows = [[prompt(N, seed=row), turn(row, (12, 5)[row])] for row in (0, 1)]
    cache, _ = together(model, METHODS["fullcache"](), rows)
    assert cache.stored_positions(1).tolist() == list(range(N + 5))
    assert cache.full_layers[0].stored_positions()[1].tolist() == [EMPTY] * 7 + list(range(N + 5))
    assert cache.is_token[1].tolist() == [True] * N + [False] * 7 + [True] * 5


@pytest.mark.law("refused-before-anything-changes")
def test_an_earlier_turn_s_padding_stays_hidden() -> None:
    """A mask that shows it, or hides as much elsewhere, is about another sequence."""
    model = build("llama")
    cache, _ = together(model, breathing(), [pieces(row)[:4] for row in range(3)])
    for wrong in (torch.ones_like(cache.is_token), cache.is_token.sort(dim=1).values):
        mask = torch.nn.functional.pad(wrong.long(), (0, TURN), value=1)
        with breathing()(model), pytest.raises(SpecError, match="padding so far was"):
            at_once(model, torch.cat([turn(row) for row in range(3)]), cache, attention_mask=mask)
