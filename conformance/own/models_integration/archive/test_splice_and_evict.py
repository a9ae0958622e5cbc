"""Splices composed with eviction, sliding windows and generation; CrystalCache goes on behind a splice."""

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

from conformance.own.models_integration.archive.block_mask import Oracle, block_masked, build, ids
from conformance.own.models_integration.archive.test_splice import BOUND, CHUNKS, QUERY, read
from conformance.own.models_integration.session.families import relative, states_of
from models_integration import CrystalCache, RetainedCache
from models_integration.archive.layer_masks import layer_masks
from models_integration.archive.splice import Chunk, compacted, computed, splice, upper_half
from models_integration.cache.continuation import Nothing
from models_integration.cache.crystal_states import DecodeRule
from models_integration.cache.snapshot import load_cache, save_cache
from models_integration.model.rotation import plain_layers, recognise
from reference.crystalcache.activation import inverse_key_norms
from reference.crystalcache.tail import join_chunk
from reference.policies import retain
from reference.policies.protections import protecting
from reference.policies.streaming_llm import streaming_llm
from spec.budget import parse_budget
from spec.decode import check_state
from spec.errors import SpecError
from spec.parameters import TINY
from spec.policy import Observation
from spec.retention import Retention

SESSION = ids(12, 8)
VISIBLE = sum(len(chunk) - hidden for chunk, hidden in CHUNKS)
FAMILIES = ["Llama", "Gemma3Text", "DeepseekV2"]


def kept_of(seen: int, evicted: set[int]) -> Retention:
    return Retention.shared(np.array([at for at in range(seen) if at not in evicted], dtype=np.int64), seen)


def chunks_of(model: PreTrainedModel) -> list[Chunk]:
    rotary = recognise(model)
    return [computed(model, chunk, rotary, hidden, markers=(0, len(chunk) - 1)) for chunk, hidden in CHUNKS]


def window_of(model: PreTrainedModel) -> int | None:
    slides = "sliding_attention" in (getattr(model.config, "layer_types", None) or ())
    return model.config.sliding_window if slides else None


def stored(oracle: Oracle, cache: RetainedCache) -> float:
    return max(
        relative(layer.keys, expected.keys[:, :, oracle.visible])
        for layer, expected in zip(plain_layers(cache), plain_layers(oracle.cache), strict=True) if not layer.is_sliding
    )


@pytest.mark.law("a-splice-equals-a-block-mask")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_splice_into_an_evicted_session(family: str) -> None:
    model, evicted = build(family), {2, 3, 7, 8, 9}
    _, cache = read(model, SESSION)
    cache.compact([kept_of(len(SESSION), evicted)])
    splice(cache, chunks_of(model), recognise(model))
    logits, cache = read(model, QUERY, cache)
    oracle = block_masked(model, SESSION, CHUNKS, QUERY, evicted=evicted, window=window_of(model))
    assert relative(logits, oracle.logits) < BOUND
    assert stored(oracle, cache) < BOUND
    assert cache.stored_positions().tolist() == [
        at for at in range(len(SESSION) + VISIBLE + len(QUERY)) if at not in evicted
    ]
    assert cache.get_seq_length() == len(SESSION) + VISIBLE + len(QUERY)


@pytest.mark.law("a-splice-equals-a-block-mask")
@pytest.mark.parametrize("family", ["Llama", "DeepseekV2"])
def test_eviction_after_a_splice_keeps_the_markers(family: str) -> None:
    """Tokens of the session and of the chunks go; the policy's own five parts keep the markers."""
    model = build(family)
    _, cache = read(model, SESSION)
    markers = splice(cache, chunks_of(model), recognise(model)).tolist()
    assert markers == [12, 18, 24, 25, 30]  # the first marker of the hidden preamble is not spliced
    seen = cache.get_seq_length()
    policy = streaming_llm(2)
    plain, _ = retain(policy, parse_budget(8), Observation(seen, 1, None, {}))
    kept, _ = retain(protecting(policy, markers), parse_budget(8), Observation(seen, 1, None, {}))
    assert not {12, 18, 24} <= set(plain.positions.tolist())
    assert set(markers) <= set(kept.positions.tolist())
    assert len(kept.positions) == 8
    cache.compact([kept])
    logits, cache = read(model, QUERY, cache)
    evicted = set(range(seen)) - set(kept.positions.tolist())
    oracle = block_masked(model, SESSION, CHUNKS, QUERY, evicted=evicted)
    assert relative(logits, oracle.logits) < BOUND
    assert stored(oracle, cache) < BOUND


@pytest.mark.law("a-splice-equals-a-block-mask")
@pytest.mark.law("a-splice-equals-a-block-mask")
@pytest.mark.parametrize("window", [6, 20, 34, 64])
def test_a_window_counts_positions_across_a_splice(window: int) -> None:
    """Windows that end inside the query, inside the chunks, inside the session, and nowhere."""
    model = build("Gemma3Text", sliding_window=window)
    _, cache = read(model, SESSION)
    splice(cache, chunks_of(model), recognise(model))
    oracle = block_masked(model, SESSION, CHUNKS, QUERY, window=window)
    logits, cache = read(model, QUERY[:3], cache)
    assert relative(logits, oracle.logits[:, :3]) < BOUND
    logits, cache = read(model, QUERY[3:], cache)
    assert relative(logits, oracle.logits[:, 3:]) < BOUND
    assert plain_layers(cache)[0].keys.shape[2] <= window - 1
    cache.reset()
    assert relative(read(model, SESSION, cache)[0], read(model, SESSION)[0]) == 0


@pytest.mark.law("a-splice-equals-a-block-mask")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["Llama", "DeepseekV3"])
def test_an_archive_of_the_upper_half(family: str, attention: str) -> None:
    model = build(family)
    model.set_attn_implementation(attention)
    chunks = [
        Chunk(chunk.ids, upper_half(chunk.layers, 2), chunk.hidden, chunk.markers, chunk.rotary)
        for chunk in chunks_of(model)
    ]
    assert all(sorted(chunk.layers) == [1] for chunk in chunks)
    _, cache = read(model, SESSION)
    splice(cache, chunks, recognise(model))
    assert [layer.get_seq_length() for layer in plain_layers(cache)] == [len(SESSION) + VISIBLE] * 2
    with pytest.raises(SpecError, match="layers that differ"):
        read(model, QUERY[:1], cache)
    with layer_masks(model, cache):
        logits = torch.cat([read(model, part, cache)[0] for part in (QUERY[:3], QUERY[3:])], 1)
    model.set_attn_implementation("sdpa")
    oracle = block_masked(model, SESSION, CHUNKS, QUERY, lower={0})
    assert relative(logits, oracle.logits) < BOUND
    assert relative(logits, block_masked(model, SESSION, CHUNKS, QUERY).logits) > 100 * BOUND
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(SpecError, match="attn_implementation"), layer_masks(model, cache):
        pass


def generated(model: PreTrainedModel, cache: RetainedCache, tokens: list[int]) -> list[int]:
    options: dict[str, Any] = {
        "attention_mask": torch.ones(1, cache.get_seq_length() + len(tokens), dtype=torch.int64),
        "past_key_values": cache, "max_new_tokens": 6, "do_sample": False, "eos_token_id": None,
    }
    found = model.generate(torch.tensor([tokens]), **options)  # type: ignore[operator]
    answer: list[int] = found[0, len(tokens) :].tolist()
    return answer


@pytest.mark.law("a-splice-equals-a-block-mask")
@pytest.mark.parametrize("family", ["Llama", "Gemma3Text"])
def test_generate_goes_on_from_a_splice(family: str) -> None:
    model = build(family)
    _, cache = read(model, SESSION)
    splice(cache, chunks_of(model), recognise(model))
    answer = generated(model, cache, QUERY)
    oracle = block_masked(model, SESSION, CHUNKS, [*QUERY, *answer], window=window_of(model))
    assert answer == oracle.logits[0, len(QUERY) - 1 : -1].argmax(-1).tolist()


@pytest.mark.law("a-splice-equals-a-block-mask")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_splice_into_an_empty_cache(family: str) -> None:
    model = build(family)
    cache = RetainedCache(model.config.get_text_config(decoder=True))
    splice(cache, chunks_of(model), recognise(model))
    logits, _ = read(model, QUERY, cache)
    oracle = block_masked(model, [], CHUNKS, QUERY, window=window_of(model))
    assert relative(logits, oracle.logits) < BOUND


WINDOW, T = 64, 8
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


@pytest.mark.law("eviction-equals-masking")
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


@pytest.mark.law("eviction-equals-masking")
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


@pytest.mark.law("eviction-equals-masking")
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
