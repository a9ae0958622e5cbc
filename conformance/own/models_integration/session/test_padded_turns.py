"""Turns whose rows differ in length: left-padded, each row equals its single run."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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
from conformance.own.models_integration.session.test_batches import batch, prompts
from conformance.own.models_integration.session.test_breaths import T, breathing
from conformance.own.models_integration.session.test_turns import TURN, N, turn
from models_integration import RetainedCache, load_cache, save_cache
from models_integration.cache.positions import EMPTY
from models_integration.policies.methods import RetentionPolicy
from spec.errors import SpecError

pytestmark = pytest.mark.law("parts-equal-the-whole")

FULL = [family for family in FAMILIES if family not in SLIDING]
LIVES: dict[str, Callable[[], RetentionPolicy]] = {**METHODS, "breathing": breathing}
# What three rows read, one list each: a prompt, then forwards of their own lengths, or of one token.
LENGTHS = ((61, 1, 12, 1, 1, 5, 1, 1), (44, 1, 5, 1, 1, 9, 1, 1), (52, 1, 9, 1, 1, 2, 1, 1))


def pieces(row: int) -> list[Tensor]:
    return [prompt(n, seed=1000 * row + number) for number, n in enumerate(LENGTHS[row])]


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
    widest = max(len(cache.stored_positions(row)) for row in range(len(rows)))
    assert {layer.stored_length for layer in cache.full_layers} == {widest}


@pytest.mark.parametrize("family", FULL)
@pytest.mark.parametrize("life", LIVES)
def test_each_row_equals_its_single_run(family: str, life: str) -> None:
    """Two padded turns behind a padded prompt, with steps between them, in which every fourth breathes."""
    agree(build(family, dtype=torch.float64), LIVES[life], [pieces(row) for row in range(3)])


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("masks", [True, False])
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


@pytest.mark.parametrize("cut", [(3, 9), (7, 5), (8, 2, 2)], ids=str)
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


@pytest.mark.law("a-cache-like-any-other")
def test_rows_can_be_chosen_saved_and_taken_back_afterwards(tmp_path: Path) -> None:
    """The padding of a turn goes with its row, and into the file."""
    model, rows = build("llama", dtype=torch.float64), [pieces(row) for row in range(3)]
    cache, _ = together(model, breathing(), [row[:5] for row in rows])
    save_cache(cache, model, tmp_path / "cache")
    loaded = load_cache(tmp_path / "cache", model)
    assert torch.equal(loaded.is_token, cache.is_token)
    loaded.batch_select_indices(torch.tensor([2, 0]))
    loaded.crop(-1)
    order = [2, 0]
    _, found = together(
        model, breathing(), [rows[row][4:] for row in order], known=(loaded, loaded.is_token.long()),
    )
    for at, row in enumerate(order):
        single, expected = alone(model, breathing(), rows[row])
        assert loaded.stored_positions(at).tolist() == single.stored_positions().tolist()
        for a, b in zip(found[at], expected[4:], strict=True):
            assert relative(a, b) < 1e-10


@pytest.mark.law("freed-memory")
def test_padding_is_not_stored() -> None:
    """Not even by a policy that evicts nothing."""
    model = build("llama")
    rows = [[prompt(N, seed=row), turn(row, (12, 5)[row])] for row in (0, 1)]
    cache, _ = together(model, METHODS["fullcache"](), rows)
    assert cache.stored_positions(1).tolist() == list(range(N + 5))
    assert cache.full_layers[0].stored_positions()[1].tolist() == [EMPTY] * 7 + list(range(N + 5))
    assert cache.is_token[1].tolist() == [True] * N + [False] * 7 + [True] * 5


# What a mask hides of the second row: from a column up to another, of N + TURN.
WRONG: dict[str, tuple[str, str, slice]] = {
    "a sliding window": ("gemma3", "not served beside sliding-window or recurrent layers", slice(N, N + 4)),
    "one token of a row": ("llama", "1 tokens.: one query is a decode step", slice(N, N + TURN - 1)),
    "nothing of a row": ("llama", "0 tokens.: one query is a decode step", slice(N, N + TURN)),
    "padding on the right": ("llama", "right padding is not served", slice(N + TURN - 4, N + TURN)),
    "a hidden token": ("llama", r"padding so far was \[0, 0\]", slice(N - 4, N + 4)),
}


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_follow_is_named_and_changes_nothing(name: str) -> None:
    family, words, hidden = WRONG[name]
    model, kept = build(family), []
    for wrong in (True, False):
        cache = RetainedCache(model.config)
        with METHODS["crystalcache"]()(model):
            at_once(model, torch.cat([prompt(N, seed=row) for row in range(2)]), cache)
            if wrong:
                mask = torch.ones(2, N + TURN, dtype=torch.int64)
                mask[1, hidden] = 0
                with pytest.raises(SpecError, match=words):
                    at_once(model, torch.cat([turn(1), turn(2)]), cache, attention_mask=mask)
            at_once(model, torch.cat([turn(1), turn(2)]), cache)
        kept.append([cache.stored_positions(row).tolist() for row in range(2)])
    assert kept[0] == kept[1]


@pytest.mark.law("refused-before-anything-changes")
def test_an_earlier_turn_s_padding_stays_hidden() -> None:
    """A mask that shows it, or hides as much elsewhere, is about another sequence."""
    model = build("llama")
    cache, _ = together(model, breathing(), [pieces(row)[:4] for row in range(3)])
    for wrong in (torch.ones_like(cache.is_token), cache.is_token.sort(dim=1).values):
        mask = torch.nn.functional.pad(wrong.long(), (0, TURN), value=1)
        with breathing()(model), pytest.raises(SpecError, match="padding so far was"):
            at_once(model, torch.cat([turn(row) for row in range(3)]), cache, attention_mask=mask)
