"""The one mask function: visibility by stored positions, for gaps, rows with different counts and true windows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.masking_utils import eager_mask, sdpa_mask, sliding_window_causal_mask_function

from conformance.own.models_integration.session.families import (
    METHODS,
    Masked,
    at_once,
    build,
    greedy,
    prompt,
    relative,
)
from conformance.own.models_integration.session.rows import two_rows
from models_integration import prefill
from models_integration.attention.capture import observing
from models_integration.attention.masks import retained_mask
from models_integration.cache.positions import EMPTY, SlotOffset, StoredRows
from models_integration.model.architecture import describe
from spec.errors import SpecError

pytestmark = pytest.mark.law("a-cache-like-any-other")


def sees(query: int, key: int, window: int | None, hidden: set[int]) -> bool:
    """The rule, in words: a stored token of the past, inside the window, not hidden."""
    return key != EMPTY and key <= query and (window is None or key > query - window) and key not in hidden


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[list[int]], list[int], int]:
    """Kept positions per row, tokens seen per row, queries."""
    seen = draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    kept = [sorted(draw(st.sets(st.integers(0, n - 1), min_size=1))) for n in seen]
    return kept, seen, draw(st.integers(1, 4))


@given(layouts(), st.integers(0, 3), st.none() | st.integers(1, 6), st.booleans(), st.data())
def test_the_mask_is_the_rule_over_positions(
    layout: tuple[list[list[int]], list[int], int], grown: int, window: int | None, eager: bool, data: st.DataObject,
) -> None:
    kept, seen, q = layout
    width, columns = max(map(len, kept)), max(seen)
    rows = StoredRows(
        torch.tensor([[EMPTY] * (width - len(row)) + row for row in kept]), torch.tensor(seen)
    )
    padding = torch.ones(len(seen), columns + grown + q, dtype=torch.bool)
    hidden: list[set[int]] = []
    for row, n in enumerate(seen):
        padding[row, : columns - n] = False
        hidden.append(data.draw(st.sets(st.integers(0, n - 1), max_size=2)))
        for position in hidden[-1]:
            padding[row, position + columns - n] = False
    kv_length = width + grown + q
    options = {}
    if window is not None:
        options = {"mask_function": sliding_window_causal_mask_function(window), "local_size": window}
    mask = retained_mask(eager_mask if eager else sdpa_mask)(
        batch_size=len(seen), q_length=q, kv_length=kv_length, q_offset=columns + grown,
        kv_offset=SlotOffset(columns - width, rows), attention_mask=padding, allow_is_causal_skip=True,
        device=torch.device("cpu"), dtype=torch.float32, **options,
    )
    found = torch.ones(len(seen), 1, q, kv_length, dtype=torch.bool) if mask is None else _boolean(mask)
    for row, n in enumerate(seen):
        slots = rows.kept[row].tolist() + list(range(n, n + grown + q))
        for i in range(q):
            expected = [sees(n + grown + i, key, window, hidden[row]) for key in slots]
            assert found[row, 0, i].tolist() == expected


def _boolean(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask == 0


def test_a_single_decode_step_needs_no_mask() -> None:
    rows = StoredRows(torch.tensor([[0, 3, 7]]), torch.tensor([9]))
    mask = retained_mask(sdpa_mask)(
        batch_size=1, q_length=1, kv_length=5, q_offset=10, kv_offset=SlotOffset(6, rows), allow_is_causal_skip=True
    )
    assert mask is None


def test_the_offset_added_to_slot_numbers_gives_positions() -> None:
    offset = SlotOffset(6, StoredRows(torch.tensor([[0, 3, 7]]), torch.tensor([9])))
    assert (torch.arange(5) + offset).tolist() == [0, 3, 7, 9, 10]
    assert offset + 1 == 7


@pytest.mark.law("refused-before-anything-changes")
def test_the_offset_of_differing_rows_is_refused_outside_the_context() -> None:
    offset = SlotOffset(6, StoredRows(torch.tensor([[0, 3], [EMPTY, 2]]), torch.tensor([9, 4])))
    with pytest.raises(SpecError, match="inside the context manager only"):
        torch.arange(3) + offset
    with pytest.raises(SpecError, match="not used in"):
        torch.arange(3) * offset


@pytest.mark.law("parts-equal-the-whole")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("padding", [True, False])
def test_rows_with_different_counts_equal_their_single_runs(attention: str, padding: bool) -> None:
    rows = two_rows(build("llama", attention=attention))
    assert (rows.cache.full_layers[0].rows.kept == EMPTY).any()
    first, second = torch.split(rows.following, [4, 2], dim=1)
    found = torch.cat([rows.together(first, padding=padding), rows.together(second, padding=padding)], dim=1)
    assert relative(found, rows.alone) < 1e-5


@pytest.mark.law("refused-before-anything-changes")
def test_a_2d_mask_that_covers_the_new_tokens_only_is_refused() -> None:
    rows = two_rows(build("llama"))
    with observing(describe(rows.model), rows.cache), pytest.raises(SpecError, match="attention_mask"):
        at_once(rows.model, rows.following, rows.cache, attention_mask=torch.ones(2, 6, dtype=torch.int64))


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_mask_that_hides_a_token_that_was_read_is_refused_in_a_step(attention: str) -> None:
    """As at prompts and turns: the cache knows which columns hold a token."""
    model, ids, token = build("llama", attention=attention), prompt(64), prompt(1, seed=9)
    with METHODS["crystalcache"]()(model) as run:
        greedy(model, ids, 1)
        assert run.cache is not None
        kept = run.cache.stored_positions().tolist()
        mask = torch.ones(1, 65, dtype=torch.int64)
        mask[0, kept[5]] = 0
        with pytest.raises(SpecError, match="attention_mask"):
            at_once(model, token, run.cache, attention_mask=mask)
        found = at_once(model, token, run.cache)
    assert relative(found, Masked(model, ids, kept).read(token)) < 1e-5


@pytest.mark.law("the-model-stays-as-it-was")
def test_a_prompt_is_masked_as_without_us() -> None:
    model, ids = build("gemma3"), prompt(40)
    with torch.no_grad():
        expected = model(input_ids=ids).logits
    with METHODS["crystalcache"]()(model):
        found = model(input_ids=ids).logits
    assert torch.equal(found, expected)
    assert prefill(model, METHODS["fullcache"](), ids).logits.shape == (1, 1, expected.shape[2])
