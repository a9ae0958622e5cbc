"""Splices beside sliding windows and of half of the layers; what CrystalCache knows of a chunk."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from conformance.own.models_integration.archive.block_mask import block_masked, build, ids
from conformance.own.models_integration.archive.test_splice import BOUND, CHUNKS, QUERY, read
from conformance.own.models_integration.session.families import relative, states_of
from models_integration import CrystalCache
from models_integration.archive.layer_masks import layer_masks
from models_integration.archive.splice import Chunk, compacted, computed, splice, upper_half
from models_integration.cache.continuation import Nothing
from models_integration.cache.crystal_states import DecodeRule
from models_integration.model.rotation import plain_layers, recognise
from reference.crystalcache.activation import inverse_key_norms
from reference.crystalcache.tail import join_chunk
from reference.policies import retain
from reference.policies.protections import protecting
from reference.policies.streaming_llm import streaming_llm
from spec.budget import parse_budget
from spec.errors import SpecError
from spec.parameters import TINY
from spec.policy import Observation
from spec.retention import Retention

SESSION = ids(12, 8)
VISIBLE = sum(len(chunk) - hidden for chunk, hidden in CHUNKS)


def kept_of(seen: int, evicted: set[int]) -> Retention:
    return Retention.shared(np.array([at for at in range(seen) if at not in evicted], dtype=np.int64), seen)


def chunks_of(model: PreTrainedModel) -> list[Chunk]:
    rotary = recognise(model)
    return [computed(model, chunk, rotary, hidden, markers=(0, len(chunk) - 1)) for chunk, hidden in CHUNKS]


def window_of(model: PreTrainedModel) -> int | None:
    slides = "sliding_attention" in (getattr(model.config, "layer_types", None) or ())
    return model.config.sliding_window if slides else None


@pytest.mark.law("a-splice-equals-a-block-mask")
def test_eviction_after_a_splice_keeps_the_markers() -> None:
    """Tokens of the session and of the chunks go; the policy's own five parts keep the markers."""
    model = build("Llama")
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


ENDS = frozenset(range(3, 131, 6))
BREATHING = replace(TINY, T_breath=8, breath_protection="sink+recent")
GONE = {2, 3, 9, 10, 11}


def policy(budget: float | int = 24, **options: Any) -> CrystalCache:
    return CrystalCache(budget, ENDS, BREATHING, backend="numpy", **{"decode": True, **options})


@pytest.mark.law("decided-as-the-reference")
@pytest.mark.parametrize("gone", [frozenset[int](), frozenset(GONE)])
def test_the_state_is_the_reference_s(gone: frozenset[int]) -> None:
    """The chunk joins the trunks by its stored keys, as the specification has it."""
    model, tokens = build("Llama", dtype=torch.float64), ids(17, 3)
    rotary = recognise(model)
    chunk, kept = computed(model, tokens, rotary), kept_of(17, set(gone))
    with policy()(model):
        _, cache = read(model, ids(40, 1))
        (before,) = states_of(cache).rows
        splice(cache, [compacted(chunk, kept)], rotary)
        keys = cache.keys_of(0)[0, :, -len(kept.positions) :].numpy()
        rule = policy().method.continuation
        assert isinstance(rule, DecodeRule)
        expected = join_chunk(
            before, np.array(tokens), kept.positions, inverse_key_norms(keys), ENDS, BREATHING, rule.engine
        )
        (found,) = rule.flushed(states_of(cache), cache.keys_of(0)).rows
    assert found.stored.tolist() == expected.stored.tolist() == cache.stored_positions().tolist()
    assert (found.seen, found.step) == (57, 0)
    for a, b in ((found.D, expected.D), (found.live.impact, expected.live.impact), (found.counts, expected.counts),
                 (found.live.inverse_norms, expected.live.inverse_norms), (found.live.offsets, expected.live.offsets)):
        np.testing.assert_array_equal(a, b)


@pytest.mark.law("refused-before-anything-changes")
def test_states_that_do_not_know_all_of_it_are_forgotten() -> None:
    """Tokens read outside the context, and layers that differ, are refused as without a splice."""
    model = build("Llama")
    rotary = recognise(model)
    chunk = computed(model, ids(9, 3), rotary)
    half = Chunk(chunk.ids, upper_half(chunk.layers, 2), 0, (), rotary)
    for outside, spliced in ((True, chunk), (False, half)):
        with policy()(model):
            _, cache = read(model, ids(40, 1))
        if outside:
            read(model, ids(2, 2), cache)
        splice(cache, [spliced], rotary)
        assert cache.continuation == Nothing()
        with policy()(model), pytest.raises(SpecError, match=r"do not cover all of them|layers that differ"):
            read(model, ids(4, 5), cache)


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
    rotary = recognise(model)
    chunk = computed(model, ids(9, 3), rotary)
    with policy()(model):
        _, cache = read(model, ids(40, 1))
        splice(cache, [chunk], rotary)
        for token in ids(3, 4):
            read(model, [token], cache)
        cache.crop(-2)
        assert states_of(cache).covers(50)
        assert states_of(cache).ids() == [ids(3, 4)[:1]]
        cache.crop(-2)
    assert cache.continuation == Nothing()
    assert cache.get_seq_length() == 48
