"""Batches: left-padded rows of different lengths equal their single runs, and may keep different counts."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from conformance.own.models_integration.session.crossings import crossed
from conformance.own.models_integration.session.families import (
    FAMILIES,
    METHODS,
    Masked,
    at_once,
    build,
    greedy,
    prompt,
    relative,
)
from models_integration import RetainedCache, Session
from models_integration.cache.positions import EMPTY
from spec.errors import SpecError
from spec.records import CrystalRetention
from spec.retention import Retention

pytestmark = pytest.mark.law("parts-equal-the-whole")

LENGTHS = (61, 44, 52)
NEW = 6

families = pytest.mark.parametrize("family", FAMILIES)


def prompts(lengths: Sequence[int] = LENGTHS) -> list[Tensor]:
    return [prompt(n, seed=40 + n) for n in lengths]


def batch(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Left-padded ids and their mask."""
    width = max(row.shape[1] for row in rows)
    ids = torch.cat([torch.nn.functional.pad(row, (width - row.shape[1], 0)) for row in rows])
    mask = torch.stack([torch.arange(width) >= width - row.shape[1] for row in rows]).long()
    return ids, mask


def sets(run: Session) -> list[list[int]]:
    assert isinstance(run.retention, tuple)
    return [
        (one.retention if isinstance(one, CrystalRetention) else one).positions.tolist() for one in run.retention
    ]


def read(
    model: PreTrainedModel, method: str, rows: Sequence[Tensor], new: Tensor, *, masked_steps: bool = True,
) -> tuple[Session, Tensor, Tensor]:
    """A run, the logits at each row's last token, and those of the new tokens, step by step (rows, NEW, ...)."""
    ids, mask = batch(rows)
    cache = RetainedCache(model.config)
    with METHODS[method]()(model) as run:
        first = at_once(model, ids, cache, attention_mask=mask)[:, -1]
        steps = []
        for token in torch.split(new, 1, dim=1):
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            steps.append(at_once(model, token, cache, **({"attention_mask": mask} if masked_steps else {})))
    return run, first, torch.cat(steps, dim=1)


def alone(model: PreTrainedModel, method: str, row: Tensor, new: Tensor) -> tuple[list[int], Tensor, Tensor]:
    cache = RetainedCache(model.config)
    with METHODS[method]()(model) as run:
        first = at_once(model, row, cache)[:, -1]
        steps = [at_once(model, token, cache) for token in torch.split(new, 1, dim=1)]
    assert run.kept is not None
    return run.kept.tolist(), first, torch.cat(steps, dim=1)


@crossed("method", METHODS, always=["crystalcache"])
def test_rows_equal_their_single_runs(family: str, method: str) -> None:
    """The same kept sets, of different sizes, and the same logits."""
    new = torch.cat([prompt(NEW, seed=50 + row) for row in range(len(LENGTHS))])
    precisions = [(torch.float64, 1e-10), (torch.float32, 1e-5)]
    if family == "gemma2":
        # Eager attention of transformers is NaN in float64 where there is padding.
        precisions = precisions[1:]
    for dtype, tolerance in precisions:
        model = build(family, dtype=dtype)
        run, first, steps = read(model, method, prompts(), new)
        for row, ids in enumerate(prompts()):
            kept, expected, after = alone(model, method, ids, new[row : row + 1])
            assert sets(run)[row] == kept
            assert relative(first[row], expected[0]) < tolerance
            assert relative(steps[row], after[0]) < tolerance
        if method == "crystalcache":
            assert len({len(kept) for kept in sets(run)}) > 1


@families
def test_generate_serves_padded_batches(family: str) -> None:
    model, rows = build(family), prompts()
    ids, mask = batch(rows)
    with METHODS["crystalcache"]()(model) as run:
        chosen = greedy(model, ids, NEW, attention_mask=mask)
    for row, alone_ids in enumerate(rows):
        assert chosen[row].tolist() == Masked(model, alone_ids, sets(run)[row]).greedy(NEW)


@pytest.mark.law("a-cache-like-any-other")
def test_the_slots_of_a_row_hold_its_own_tokens() -> None:
    """Keys carry the rotation of positions that count no padding; empty slots are on the left, and zero."""
    model, rows = build("llama"), prompts()
    new = torch.cat([prompt(1, seed=50 + row) for row in range(len(rows))])
    # A mask would be compared with what the cache has seen, which a mutant of the cache gets wrong.
    run, _, _ = read(model, "crystalcache", rows, new, masked_steps=False)
    assert run.cache is not None
    width = max(map(len, sets(run))) + 1
    saved = 0
    for row, ids in enumerate(rows):
        kept = sets(run)[row]
        stored = [*kept, ids.shape[1]]
        assert run.cache.stored_positions(row).tolist() == stored
        oracle = Masked(model, ids, kept)
        oracle.read(new[row : row + 1])
        for layer, (keys, values, _) in zip(run.cache.full_layers, oracle.cache, strict=True):
            assert layer.keys is not None
            assert layer.values is not None
            for found, expected in ((layer.keys[row], keys[0]), (layer.values[row], values[0])):
                assert relative(found[:, width - len(stored) :], expected[:, stored]) < 1e-5
                assert not found[:, : width - len(stored)].any()
        saved += max(LENGTHS) - (width - 1)
    assert run.bytes_freed == saved * 3 * 2 * 2 * 12 * 4
    assert bool((run.cache.full_layers[0].stored_positions() == EMPTY).any())


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


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_what_a_step_leaves_out_is_filled_in(family: str) -> None:
    """Without position ids and mask, padded rows go on at their own positions, and padding stays hidden."""
    model, rows = build(family), prompts()
    new = torch.cat([prompt(NEW, seed=50 + row) for row in range(len(rows))])
    _, _, expected = read(model, "crystalcache", rows, new)
    ids, mask = batch(rows)
    cache = RetainedCache(model.config)
    with METHODS["crystalcache"]()(model):
        at_once(model, ids, cache, attention_mask=mask)
        found = torch.cat([at_once(model, token, cache) for token in torch.split(new, 1, dim=1)], dim=1)
    assert relative(found, expected) < 1e-5


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


@pytest.mark.law("a-cache-like-any-other")
def test_a_single_padded_row_can_be_repeated() -> None:
    """Each copy goes on as the row would have."""
    model, token = build("llama"), prompt(1, seed=50)
    ids, mask = (tensor[1:2] for tensor in batch(prompts((61, 44))))
    caches = [RetainedCache(model.config) for _ in range(2)]
    with METHODS["crystalcache"]()(model):
        for cache in caches:
            at_once(model, ids, cache, attention_mask=mask)
        caches[1].batch_repeat_interleave(2)
        once, twice = (at_once(model, token.expand(rows, 1), cache) for rows, cache in enumerate(caches, 1))
    assert relative(twice, once.expand_as(twice)) < 1e-5


@pytest.mark.parametrize("method", ["crystalcache", "fullcache"])
def test_a_single_padded_row_equals_its_unpadded_run(method: str) -> None:
    model, row, new = build("llama"), prompts()[0], prompt(NEW, seed=50)
    ids, mask = torch.nn.functional.pad(row, (9, 0)), torch.ones(1, 70, dtype=torch.int64)
    mask[:, :9] = 0
    kept, _, expected = alone(model, method, row, new)
    cache = RetainedCache(model.config)
    with METHODS[method]()(model) as run:
        at_once(model, ids, cache, attention_mask=mask)
        found = torch.cat([at_once(model, token, cache) for token in torch.split(new, 1, dim=1)], dim=1)
    np.testing.assert_array_equal(run.kept, kept)
    assert relative(found, expected) < 1e-5
    assert cache.stored_positions().tolist() == [*kept, *range(61, 61 + NEW)]


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize("padded", [True, False])
def test_rows_that_differ_are_refused_outside_the_context(padded: bool) -> None:
    model = build("llama")
    rows = prompts() if padded else [prompt(50, seed=1), prompt(50, seed=2)]
    run, _, _ = read(model, "crystalcache", rows, torch.cat([prompt(1)] * len(rows)))
    assert run.cache is not None
    for tokens in (1, 3):
        with pytest.raises(SpecError, match=r"rows that differ.*inside the context manager only"):
            at_once(model, torch.cat([prompt(tokens)] * len(rows)), run.cache)


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


@pytest.mark.law("a-cache-like-any-other")
def test_tokens_after_compaction_can_be_taken_back_in_rows_that_differ() -> None:
    model, rows = build("llama"), prompts()
    new = torch.cat([prompt(NEW, seed=50 + row) for row in range(len(rows))])
    run, _, expected = read(model, "crystalcache", rows, new)
    cache = run.cache
    assert cache is not None
    cache.crop(-2)
    with METHODS["crystalcache"]()(model):
        again = at_once(model, new[:, -2:-1], cache)
    assert relative(again[:, 0], expected[:, -2]) < 1e-5
    with pytest.raises(SpecError, match="tokens_to_remove = -6: rows that differ can give back 5 so far"):
        cache.crop(-6)
    assert cache.get_seq_length() == max(LENGTHS) + NEW - 1
