"""CrystalCache goes on behind a splice: steps, breaths, turns and snapshots, each equal to masking."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from conformance.own.models_integration.archive.block_mask import ids
from conformance.own.models_integration.archive.models import build
from conformance.own.models_integration.archive.test_splice_and_evict import kept_of
from conformance.own.models_integration.session.families import relative, states_of
from models_integration import CrystalCache, RetainedCache
from models_integration.archive.splice import Chunk, compacted, computed, splice, upper_half
from models_integration.cache.continuation import Nothing
from models_integration.cache.crystal_states import DecodeRule
from models_integration.cache.snapshot import load_cache, save_cache
from models_integration.model.rotation import recognise
from reference.crystalcache.activation import inverse_key_norms
from reference.crystalcache.tail import join_chunk
from spec.decode import check_state
from spec.errors import SpecError
from spec.parameters import TINY

pytestmark = pytest.mark.law("eviction-equals-masking")

BOUND, WINDOW, T = 1e-5, 64, 8
ENDS = frozenset(range(3, 131, 6))
BREATHING = replace(TINY, T_breath=T, breath_protection="sink+recent")
GONE = {2, 3, 9, 10, 11}


def policy(budget: float | int = 24, **options: Any) -> CrystalCache:
    return CrystalCache(budget, ENDS, BREATHING, backend="numpy", **{"decode": True, **options})


class Told:
    """What a session reads, and afterwards one forward over all of it, in which each query sees what was stored."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.cache = model, RetainedCache(model.config)
        self.twin = copy.deepcopy(model)  # chunks are computed outside the context
        self.rotary = recognise(self.twin)
        self.tokens: list[int] = []
        self.block: list[int] = []  # 0 is the session
        self.stored: list[set[int]] = []
        self.logits: list[Tensor] = []
        self.chunks = 0

    def read(self, tokens: Sequence[int]) -> None:
        before, start = set(self.positions()), len(self.tokens)
        with torch.no_grad():
            logits = self.model(input_ids=torch.tensor([list(tokens)]), past_key_values=self.cache).logits
        self.logits.append(logits)
        self.stored += [before | set(range(start, start + at + 1)) for at in range(len(tokens))]
        self.tokens += tokens
        self.block += [0] * len(tokens)

    def steps(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.read([token])

    def splice(self, tokens: list[int], gone: frozenset[int] = frozenset()) -> None:
        chunk, start = computed(self.twin, tokens, self.rotary), len(self.tokens)
        splice(self.cache, [compacted(chunk, kept_of(len(tokens), set(gone))) if gone else chunk], self.rotary)
        self.chunks += 1
        self.stored += [set(range(start, start + at + 1)) for at in range(len(tokens))]
        self.tokens += tokens
        self.block += [self.chunks] * len(tokens)
        left = set(self.positions())
        assert {at - start for at in left if at >= start} == set(range(len(tokens))) - gone

    def positions(self) -> list[int]:
        found: list[int] = self.cache.stored_positions().tolist() if self.tokens else []
        return found

    def check(self) -> None:
        """Every forward's logits equal those of the mask."""
        n = len(self.tokens)
        full, near = torch.zeros(n, n, dtype=torch.bool), torch.zeros(n, n, dtype=torch.bool)
        for row, seen in enumerate(self.stored):
            full[row, sorted(seen)] = True
            read = [at for at in range(row + 1) if self.block[at] == self.block[row] and row - at < WINDOW]
            near[row, read] = True
        shaped: Any = full[None, None]
        if getattr(self.model.config, "layer_types", None) is not None:
            shaped = {"full_attention": shaped, "sliding_attention": near[None, None]}
        with torch.no_grad():
            expected = self.model(
                input_ids=torch.tensor([self.tokens]), attention_mask=shaped, past_key_values=DynamicCache(),
                position_ids=torch.arange(n)[None],
            ).logits
        session = torch.tensor(self.block) == 0
        assert relative(torch.cat(self.logits, 1), expected[:, session]) < BOUND
        assert len(self.positions()) < n - 20  # there was something to mask


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma3Text"])
def test_steps_breaths_and_turns_behind_a_splice_equal_masking(family: str) -> None:
    """Prompt, steps, a whole chunk, steps over a breath, a turn, a chunk with gaps, a turn, steps over two breaths."""
    model = build(family)
    told = Told(model)
    with policy()(model):
        told.read(ids(40, 1))
        told.steps(ids(3, 2))
        told.splice(ids(17, 3))
        told.steps(ids(T + 1, 4))
        assert len(told.positions()) <= 24 + T
        told.read(ids(9, 5))
        told.splice(ids(15, 6), frozenset(GONE))
        told.read(ids(6, 7))
        told.steps(ids(2 * T, 8))
    (state,) = states_of(told.cache).rows
    check_state(state)
    assert states_of(told.cache).covers(len(told.tokens))
    told.check()


@pytest.mark.parametrize("decode", [True, False])
def test_a_session_may_begin_with_a_chunk(decode: bool) -> None:
    model = build("Llama")
    told = Told(model)
    with policy(decode=decode)(model):
        told.splice(ids(30, 3))
        told.splice(ids(12, 4), frozenset(GONE))
        told.read(ids(9, 5))
        told.steps(ids(2 * T, 6))
        told.read(ids(5, 7))
    told.check()
    check_state(states_of(told.cache).rows[0])


def test_a_splice_right_before_and_right_after_a_breath() -> None:
    """Chunks do not count as steps: breaths come at the same steps of decode, and see the chunk at once."""
    model = build("Llama")
    told = Told(model)
    sizes = []
    with policy()(model):
        told.read(ids(40, 1))
        for at in range(2 * T):
            if at in (T - 1, T):
                told.splice(ids(11, 10 + at))
            told.read(ids(1, 30 + at))
            sizes.append(len(told.positions()))
    assert states_of(told.cache).rows[0].step == 2 * T
    assert sizes[T - 1] <= 24 < sizes[T - 2] + 12
    assert sizes[2 * T - 1] <= 24 < sizes[2 * T - 2] + 1
    told.check()


@pytest.mark.law("decided-as-the-reference")
@pytest.mark.parametrize("gone", [frozenset[int](), frozenset(GONE)])
def test_the_state_is_the_reference_s(gone: frozenset[int]) -> None:
    """The chunk joins the trunks by its stored keys, as the specification has it."""
    model = build("Llama", dtype=torch.float64)
    told, tokens = Told(model), ids(17, 3)
    with policy()(model):
        told.read(ids(40, 1))
        (before,) = states_of(told.cache).rows
        told.splice(tokens, gone)
        kept = np.array([at for at in range(17) if at not in gone], dtype=np.int64)
        keys = told.cache.keys_of(0)[0, :, -len(kept) :].numpy()
        rule = policy().method.continuation
        assert isinstance(rule, DecodeRule)
        expected = join_chunk(
            before, np.array(tokens), kept, inverse_key_norms(keys), ENDS, BREATHING, rule.engine
        )
        (found,) = rule.flushed(states_of(told.cache), told.cache.keys_of(0)).rows
    assert found.stored.tolist() == expected.stored.tolist() == told.positions()
    assert (found.seen, found.step) == (57, 0)
    for a, b in ((found.D, expected.D), (found.live.impact, expected.live.impact), (found.counts, expected.counts),
                 (found.live.inverse_norms, expected.live.inverse_norms), (found.live.offsets, expected.live.offsets)):
        np.testing.assert_array_equal(a, b)


@pytest.mark.law("saved-is-what-was")
def test_chunks_that_wait_are_saved_too(tmp_path: Path) -> None:
    model = build("Llama")
    told = Told(model)
    with policy()(model):
        told.read(ids(40, 1))
        told.steps(ids(2, 2))
        told.splice(ids(17, 3), frozenset(GONE))
        told.steps(ids(3, 4))
    save_cache(told.cache, model, tmp_path / "cache")
    again = load_cache(tmp_path / "cache", model)
    logits = []
    for cache in (told.cache, again):
        with policy()(model), torch.no_grad():
            logits.append(model(input_ids=torch.tensor([ids(7, 5)]), past_key_values=cache).logits)
    assert torch.equal(*logits)
    assert again.stored_positions().tolist() == told.positions()


@pytest.mark.law("refused-before-anything-changes")
def test_states_that_do_not_know_all_of_it_are_forgotten() -> None:
    """Tokens read outside the context, and layers that differ, are refused as without a splice."""
    model = build("Llama")
    rotary = recognise(model)
    chunk = computed(model, ids(9, 3), rotary)
    half = Chunk(chunk.ids, upper_half(chunk.layers, 2), 0, (), rotary)
    for outside, spliced in ((True, chunk), (False, half)):
        told = Told(model)
        with policy()(model):
            told.read(ids(40, 1))
        if outside:
            told.read(ids(2, 2))
        splice(told.cache, [spliced], rotary)
        assert told.cache.continuation == Nothing()
        with policy()(model), pytest.raises(SpecError, match=r"do not cover all of them|layers that differ"):
            told.read(ids(4, 5))


@pytest.mark.law("refused-before-anything-changes")
def test_a_chunk_is_not_computed_under_a_policy() -> None:
    """The policy would evict from it, and take it for the session's own prompt."""
    model = build("Llama")
    rotary = recognise(model)
    with policy()(model) as run, pytest.raises(SpecError, match="inside a context"):
        computed(model, ids(30, 3), rotary)
    assert run.retention is None


@pytest.mark.law("a-cache-like-any-other")
def test_what_is_taken_back_behind_a_chunk() -> None:
    """Tokens behind it leave the states as they were; a crop into the chunk forgets them."""
    model = build("Llama")
    told = Told(model)
    with policy()(model):
        told.read(ids(40, 1))
        told.splice(ids(9, 3))
        told.steps(ids(3, 4))
        told.cache.crop(-2)
        assert states_of(told.cache).covers(50)
        assert states_of(told.cache).ids() == [ids(3, 4)[:1]]
        told.cache.crop(-2)
    assert told.cache.continuation == Nothing()
    assert told.cache.get_seq_length() == 48
