"""Spliced chunks equal one forward pass with masks that separate them, also between evictions."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from models_integration import CrystalCache, NamedPolicy, RetentionPolicy, StreamingLLM
from models_integration.archive import splice as module
from models_integration.archive.layer_masks import layer_masks
from models_integration.archive.library import Library
from models_integration.archive.splice import Chunk, compacted, computed, splice, upper_half
from models_integration.archive.store import Archive
from models_integration.cache.continuation import Continuation
from models_integration.cache.retained_cache import RetainedCache
from models_integration.model.rotation import Rotary, angles_between, frequencies_at, plain_layers, prefilled, recognise
from models_integration.session.crystal import CrystalMethod
from reference.crystalcache.activation import inverse_key_norms
from reference.crystalcache.tail import join_chunk
from reference.injection.wrappers import FORMS, wrap
from reference.policies import retain
from reference.policies.protections import protecting
from reference.policies.streaming_llm import streaming_llm
from spec.budget import parse_budget
from spec.errors import SpecError
from spec.parameters import TINY
from spec.policy import Observation
from spec.retention import Granularity, Retention
from tests.models_integration.archive.block_mask import (
    CHAT,
    FAMILIES,
    ROTATIONS,
    Chunks,
    Oracle,
    block_masked,
    build,
    ids,
)
from tests.models_integration.session.families import relative, states_of

pytestmark = pytest.mark.law("a-splice-equals-a-block-mask")

BOUND, BOUND_BF16 = 1e-5, 5e-2
SYSTEM, QUERY = ids(5, 1), ids(4, 2)
CHUNKS = [(ids(7, 3), 0), (ids(9, 4), 3), (ids(6, 5), 0)]  # The second chunk has a hidden preamble.


def read(model: PreTrainedModel, tokens: list[int], cache: RetainedCache | None = None) -> tuple[Tensor, RetainedCache]:
    """Run one forward pass with the defaults of transformers: no positions and no mask."""
    cache = RetainedCache(model.config.get_text_config(decoder=True)) if cache is None else cache
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens]), past_key_values=cache, use_cache=True).logits, cache


def injected(
    model: PreTrainedModel, chunks: Chunks, change: Callable[[Chunk], Chunk] = lambda chunk: chunk,
) -> tuple[Tensor, RetainedCache]:
    rotary = recognise(model)
    total = len(SYSTEM) + sum(len(chunk) - hidden for chunk, hidden in chunks) + len(QUERY)
    created = [change(computed(model, chunk, rotary, hidden)) for chunk, hidden in chunks]
    _, cache = read(model, SYSTEM)
    splice(cache, created, frequencies_at(model, rotary, total))
    assert cache.get_seq_length() == total - len(QUERY)
    return read(model, QUERY, cache)


def gap(logits: Tensor, cache: RetainedCache, oracle: Oracle) -> float:
    """Return the largest relative difference of the logits and of every layer's keys and values."""
    pairs = [(logits, oracle.logits)]
    for actual, expected in zip(plain_layers(cache), plain_layers(oracle.cache), strict=True):
        slots = oracle.session_slots if actual.is_sliding else oracle.visible  # The window is longer than the session.
        pairs += [(actual.keys, expected.keys[:, :, slots]), (actual.values, expected.values[:, :, slots])]
    return max(relative(a.float(), b.float()) for a, b in pairs)


def distance(model: PreTrainedModel, chunks: Chunks, change: Callable[[Chunk], Chunk] = lambda chunk: chunk) -> float:
    return gap(*injected(model, chunks, change), block_masked(model, SYSTEM, chunks, QUERY))


MOST, BOTH = ("Llama", "Glm", "DeepseekV3"), [("Gemma3Text", "yarn"), ("GPTNeoX", "longrope")]
"""Families that are tested with every rotation in float32, and pairs that are tested in both dtypes."""


def cases() -> Iterator[Any]:
    """Yield every family in both dtypes and with every rotation. Most rotations run in the nightly profile."""
    for family in FAMILIES:
        yield family, None
        for rotation in ROTATIONS:
            # The rotary part of a latent cache is a separate tensor, which rotates as a whole. Phi3 supports only
            # longrope.
            if family in MOST and (family, rotation) != ("DeepseekV3", "partial"):
                yield family, rotation
            elif rotation not in ("default", "partial") and (family != "Phi3" or rotation == "longrope"):
                yield pytest.param(family, rotation, marks=[pytest.mark.nightly] * ((family, rotation) not in BOTH))


@pytest.mark.parametrize(("family", "rotation"), cases())
def test_spliced_chunks_equal_the_block_mask(family: str, rotation: str | None) -> None:
    """Compare logits, keys and values. In bfloat16 an argmax within the bound depends on the processor."""
    changes: dict[str, Any] = {} if rotation is None else {"rope_parameters": parameters_of(family, rotation)}
    assert distance(build("Phi3" if (family, rotation) == ("Llama", "partial") else family, **changes), CHUNKS) < BOUND
    if rotation is not None and family in MOST:
        return
    model = in_bfloat16(family, **changes)
    assert distance(model, CHUNKS) < BOUND_BF16


def parameters_of(family: str, rotation: str) -> dict[str, Any]:
    """Return rotary parameters of the config. A family that rotates half of its channels has half of the factors."""
    parameters = dict(ROTATIONS[rotation])
    if family in ("Glm", "GPTNeoX"):
        parameters = {"partial_rotary_factor": 0.5, **parameters}
        for name in parameters.keys() & {"short_factor", "long_factor"}:
            parameters[name] = parameters[name][:2]
    if family == "Gemma3Text":
        return {"full_attention": parameters, "sliding_attention": dict(ROTATIONS["default"])}
    return parameters


def test_a_chunk_is_rebased_where_the_session_outgrows_the_first_range() -> None:
    """Check longrope: a chunk with short frequencies in a session of 105 tokens, which uses the long ones."""
    model = build("Llama", rope_parameters=dict(ROTATIONS["longrope"]))
    chunks = [ids(60, 6), ids(40, 7)]
    rotary = recognise(model)
    created = [computed(model, chunk, rotary) for chunk in chunks]
    fresh = plain_layers(prefilled(model, SYSTEM + chunks[0] + chunks[1]))[0].keys  # These keys are in the long range.

    def error(live: Rotary) -> float:
        _, cache = read(model, SYSTEM)
        splice(cache, created, live)
        return relative(plain_layers(cache)[0].keys[:, :, 5:], fresh[:, :, 5:])

    assert error(frequencies_at(model, rotary, 105)) < BOUND
    assert error(rotary) > 0.1


def in_bfloat16(family: str, **changes: Any) -> PreTrainedModel:
    """Return a bfloat16 model with frequencies in float32, as from_pretrained keeps them."""
    model, sharp = build(family, torch.bfloat16, **changes), dict(build(family, **changes).named_buffers())
    for name in [name for name in sharp if name.endswith("inv_freq")]:
        path, _, attribute = name.rpartition(".")
        model.get_submodule(path).register_buffer(attribute, sharp[name], persistent=False)
    return model


def one_too_far(n: int, start: int, before: Tensor, after: Tensor) -> Tensor:
    return angles_between(n, start + 1, before, after)


def other_style(chunk: Chunk) -> Chunk:
    styles = {"half_split": "interleaved", "interleaved": "half_split", None: None}
    return replace(chunk, rotary=replace(chunk.rotary, layers=tuple(
        replace(layer, style=styles[layer.style]) for layer in chunk.rotary.layers
    )))


@pytest.mark.law("the-proof-has-teeth")
@pytest.mark.parametrize("family", ["Llama", "Glm", "DeepseekV2", "DeepseekV3"])
def test_a_wrong_shift_or_style_fails_the_oracle(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(family)
    assert distance(model, CHUNKS, other_style) > 1000 * BOUND
    monkeypatch.setattr(module, "angles_between", one_too_far)
    assert distance(model, CHUNKS) > 1000 * BOUND


@pytest.mark.law("the-proof-has-teeth")
@pytest.mark.parametrize("rotation", ["linear", "yarn", "llama3", "longrope"])
def test_frequencies_from_theta_alone_fail_the_oracle(rotation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("Llama", rope_parameters=dict(ROTATIONS[rotation]))
    plain = recognise(build("Llama", rope_parameters=dict(ROTATIONS["default"])))
    (name,) = plain.used()
    monkeypatch.setattr(
        module, "angles_between",
        lambda n, start, before, after: (start * plain.frequencies[name].double()).expand(n, -1),
    )
    assert distance(model, CHUNKS) > 100 * BOUND


@pytest.mark.law("the-model-stays-as-it-was")
def test_chunks_stay_as_they_are() -> None:
    model = build("Llama")
    rotary = recognise(model)
    chunk = computed(model, CHUNKS[0][0], rotary)
    stored = {at: (keys.clone(), values.clone()) for at, (keys, values) in chunk.layers.items()}
    _, cache = read(model, SYSTEM)
    splice(cache, [chunk, chunk], rotary)
    for layer in plain_layers(cache):
        layer.keys.zero_()
    assert all(torch.equal(chunk.layers[at][0], stored[at][0]) for at in stored)


@pytest.mark.law("refused-before-anything-changes")
def test_a_refused_splice_changes_nothing() -> None:
    model = build("Gemma3Text")
    rotary = recognise(model)
    chunk = computed(model, CHUNKS[0][0], rotary)
    assert sorted(chunk.layers) == [1]
    local = replace(chunk, layers={0: chunk.layers[1]})
    _, cache = read(model, SYSTEM)
    before = [layer.keys for layer in plain_layers(cache)]
    for wrong in (local, replace(chunk, layers={})):
        with pytest.raises(SpecError, match=r"chunks\[1\] .* must contain only full-attention layers: \[1\]"):
            splice(cache, [chunk, wrong], rotary)
    assert cache.get_seq_length() == len(SYSTEM)
    assert all(layer.keys is keys for layer, keys in zip(plain_layers(cache), before, strict=True))
    with pytest.raises(SpecError, match="hidden"):
        computed(model, [5, 6], rotary, 2)


@pytest.mark.law("refused-before-anything-changes")
def test_several_rows_and_a_row_with_padding_are_refused() -> None:
    """A padded row has more columns than tokens, and a chunk follows the tokens."""
    model, padded, rows = build("Llama"), torch.tensor([[0, 1, 1, 1, 1, 1]]), RetainedCache(build("Llama").config)
    rotary = recognise(model)
    with torch.no_grad(), StreamingLLM(budget=4, N_sink=1)(model) as run:
        model(input_ids=torch.tensor([[0, *SYSTEM]]), attention_mask=padded)
    assert run.cache is not None
    with torch.no_grad():
        model(input_ids=torch.tensor([SYSTEM, SYSTEM]), past_key_values=rows)
    for cache, words in ((run.cache, "without padding"), (rows, "must have one row")):
        with pytest.raises(SpecError, match=words):
            splice(cache, [computed(model, CHUNKS[0][0], rotary)], rotary)
    assert run.cache.stored_positions().tolist() == [0, 2, 3, 4]


@pytest.mark.law("refused-before-anything-changes")
def test_a_model_that_only_slides_is_refused() -> None:
    model = build("Mistral", sliding_window=16)
    with pytest.raises(SpecError, match="must have a full-attention layer"):
        computed(model, SYSTEM, recognise(model))


SESSION = ids(12, 8)
VISIBLE = sum(len(chunk) - hidden for chunk, hidden in CHUNKS)


def kept_of(seen: int, evicted: set[int]) -> Retention:
    return Retention.shared(np.array([at for at in range(seen) if at not in evicted], dtype=np.int64), seen)


def chunks_of(model: PreTrainedModel) -> list[Chunk]:
    rotary = recognise(model)
    return [computed(model, chunk, rotary, hidden, markers=(0, len(chunk) - 1)) for chunk, hidden in CHUNKS]


def read_apart(model: PreTrainedModel, cache: RetainedCache, first: int = 3) -> Tensor:
    """Return the logits of the query. The first `first` tokens are read in a separate forward pass."""
    with pytest.raises(SpecError, match="layers that differ"):
        read(model, QUERY[:1], cache)
    with layer_masks(model, cache):
        return torch.cat([read(model, part, cache)[0] for part in (QUERY[:first], QUERY[first:])], 1)


def test_eviction_after_a_splice_keeps_the_markers() -> None:
    """Check that tokens of session and chunks are evicted, and that the policy keeps the markers."""
    model = build("Llama")
    _, cache = read(model, SESSION)
    markers = splice(cache, chunks_of(model), recognise(model)).tolist()
    assert markers == [12, 18, 24, 25, 30]  # The first marker of the hidden preamble is not spliced.
    seen = cache.get_seq_length()
    policy = streaming_llm(2)
    plain = retain(policy, parse_budget(8), Observation(seen, 1, None, {}))
    kept = retain(protecting(policy, markers), parse_budget(8), Observation(seen, 1, None, {}))
    assert not {12, 18, 24} <= set(plain.positions.tolist())
    assert set(markers) <= set(kept.positions.tolist())
    assert len(kept.positions) == 8


@pytest.mark.parametrize("window", [6, 20, 34, 64])
def test_a_window_counts_positions_across_a_splice(window: int) -> None:
    """Check windows that end inside the query, inside the chunks, inside the session, and never."""
    model = build("Gemma3Text", sliding_window=window)
    _, cache = read(model, SESSION)
    splice(cache, chunks_of(model), recognise(model))
    oracle = block_masked(model, SESSION, CHUNKS, QUERY)
    logits, cache = read(model, QUERY[:3], cache)
    assert relative(logits, oracle.logits[:, :3]) < BOUND
    logits, cache = read(model, QUERY[3:], cache)
    assert relative(logits, oracle.logits[:, 3:]) < BOUND
    assert plain_layers(cache)[0].keys.shape[2] <= window - 1
    cache.reset()
    assert relative(read(model, SESSION, cache)[0], read(model, SESSION)[0]) == 0


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["Llama", "DeepseekV3"])
def test_an_archive_of_the_upper_half(family: str, attention: str) -> None:
    model = build(family)
    model.set_attn_implementation(attention)
    chunks = [replace(chunk, layers=upper_half(chunk.layers, 2)) for chunk in chunks_of(model)]
    assert all(sorted(chunk.layers) == [1] for chunk in chunks)
    _, cache = read(model, SESSION)
    splice(cache, chunks, recognise(model))
    assert [layer.get_seq_length() for layer in plain_layers(cache)] == [len(SESSION) + VISIBLE] * 2
    logits = read_apart(model, cache)
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
    """The chunk joins the trunks by its stored keys, as specified."""
    model, tokens = build("Llama", dtype=torch.float64), ids(17, 3)
    rotary = recognise(model)
    chunk, kept = computed(model, tokens, rotary), kept_of(17, set(gone))
    with policy()(model):
        _, cache = read(model, ids(40, 1))
        (before,) = states_of(cache).rows
        splice(cache, [compacted(chunk, kept)], rotary)
        keys = cache.keys_of(0)[0, :, -len(kept.positions) :].numpy()
        rule = policy().method
        assert isinstance(rule, CrystalMethod)
        expected = join_chunk(
            before, np.array(tokens), kept.positions, inverse_key_norms(keys), ENDS, BREATHING, rule.engine
        )
        (actual,) = rule.flushed(states_of(cache), cache.keys_of(0)).rows
    assert actual.stored.tolist() == expected.stored.tolist() == cache.stored_positions().tolist()
    assert (actual.seen, actual.step) == (57, 0)
    for name in ("D", "counts"):
        np.testing.assert_array_equal(getattr(actual, name), getattr(expected, name))
    for name in ("impact", "inverse_norms", "offsets"):
        np.testing.assert_array_equal(getattr(actual.live, name), getattr(expected.live, name))


@pytest.mark.law("refused-before-anything-changes")
def test_states_that_do_not_know_all_of_it_are_forgotten() -> None:
    """Check that tokens read outside the context, and layers that differ, raise an error as without a splice."""
    model = build("Llama")
    rotary = recognise(model)
    chunk = computed(model, ids(9, 3), rotary)
    half = replace(chunk, layers=upper_half(chunk.layers, 2))
    for outside, spliced in ((True, chunk), (False, half)):
        with policy()(model):
            _, cache = read(model, ids(40, 1))
        if outside:
            read(model, ids(2, 2), cache)
        splice(cache, [spliced], rotary)
        assert cache.continuation == Continuation()
        with policy()(model), pytest.raises(SpecError, match=r"do not cover all of them|layers that differ"):
            read(model, ids(4, 5), cache)


@pytest.mark.law("refused-before-anything-changes")
def test_a_chunk_is_not_computed_under_a_policy() -> None:
    """The policy would evict tokens of the chunk, and treat the chunk as the prompt of the session."""
    model = build("Llama")
    rotary = recognise(model)
    with policy()(model) as run, pytest.raises(SpecError, match="is already inside `with policy"):
        computed(model, ids(30, 3), rotary)
    assert run.retentions == ()


@pytest.mark.law("a-cache-like-any-other")
def test_what_is_taken_back_behind_a_chunk() -> None:
    """A crop of tokens after the chunk keeps the states. A crop into the chunk removes them."""
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
    assert cache.continuation == Continuation()
    assert cache.get_seq_length() == 48


# Positions in each chunk. The second chunk has a hidden preamble of 3 tokens.
GAPS = [{1, 2, 4}, {0, 1, 4, 6, 7}, set[int]()]
PART = ids(24, 21)


def with_gaps(model: PreTrainedModel, rotary: Rotary) -> list[Chunk]:
    created = [computed(model, chunk, rotary, hidden, (0, len(chunk) - 1)) for chunk, hidden in CHUNKS]
    return [compacted(chunk, kept_of(len(chunk.ids), gone)) for chunk, gone in zip(created, GAPS, strict=True)]


def evicted_positions(start: int) -> set[int]:
    actual = set()
    for (chunk, hidden), gone in zip(CHUNKS, GAPS, strict=True):
        actual |= {start + place - hidden for place in gone if place >= hidden}
        start += len(chunk) - hidden
    return actual


@pytest.mark.parametrize("family", ["Llama", "Gemma3Text", "Glm", "GPTNeoX", "DeepseekV2", "DeepseekV3"])
def test_a_compacted_chunk_keeps_its_positions_and_its_room(family: str) -> None:
    """Check a splice into a session with gaps, followed by a second eviction. This covers all three orders."""
    model = build(family)
    rotary, session_gone = recognise(model), {2, 3, 8}
    _, cache = read(model, SESSION)
    cache.compact([kept_of(len(SESSION), session_gone)])
    markers = splice(cache, with_gaps(model, rotary), rotary).tolist()
    assert markers == [12, 18, 24, 25, 30]
    seen = len(SESSION) + VISIBLE
    gone = session_gone | evicted_positions(len(SESSION))
    assert cache.get_seq_length() == seen
    assert cache.stored_positions().tolist() == [at for at in range(seen) if at not in gone]
    gone |= {0, 15, 22}
    cache.compact([kept_of(seen, gone)])
    oracle = block_masked(model, SESSION, CHUNKS, QUERY, evicted=gone)
    for part in (QUERY[:3], QUERY[3:]):
        first = 0 if part == QUERY[:3] else 3
        wanted = oracle.logits[:, first : first + len(part)]
        assert relative(read(model, part, cache)[0], wanted) < BOUND
    for layer, expected in zip(plain_layers(cache), plain_layers(oracle.cache), strict=True):
        if not layer.is_sliding:
            assert relative(layer.keys, expected.keys[:, :, oracle.visible]) < BOUND
            assert relative(layer.values, expected.values[:, :, oracle.visible]) < BOUND


@pytest.mark.law("the-proof-has-teeth")
def test_closed_gaps_fail_the_oracle() -> None:
    """Plant an error: a chunk counts only its stored tokens, which moves all later tokens to wrong positions."""
    model = build("Llama")
    rotary = recognise(model)
    oracle = block_masked(model, SESSION, CHUNKS, QUERY, evicted=evicted_positions(len(SESSION)))
    for close, low, high in ((False, 0.0, BOUND), (True, 100 * BOUND, 9.0)):
        chunks = with_gaps(model, rotary)
        if close:
            left = chunks[0].places(0)[0].tolist()
            chunks[0] = replace(chunks[0], kept=None, ids=tuple(chunks[0].ids[at] for at in left))
        _, cache = read(model, SESSION)
        splice(cache, chunks, rotary)
        assert low <= relative(read(model, QUERY, cache)[0], oracle.logits) < high


def test_a_compacted_chunk_is_rebased_token_by_token() -> None:
    """Check longrope: the angle of each kept token depends on the position of the token."""
    model = build("Llama", rope_parameters=dict(ROTATIONS["longrope"]))
    rotary, tokens = recognise(model), ids(60, 6)
    gone = {at for at in range(60) if at % 3 == 1}
    chunk = compacted(computed(model, tokens, rotary), kept_of(60, gone))
    _, cache = read(model, SESSION)
    splice(cache, [chunk], frequencies_at(model, rotary, 80))
    whole = computed(model, tokens, rotary)
    _, full = read(model, SESSION)
    splice(full, [whole], frequencies_at(model, rotary, 80))
    kept = [*range(12), *(12 + at for at in range(60) if at not in gone)]
    for a, b in zip(plain_layers(cache), plain_layers(full), strict=True):
        assert torch.equal(a.keys, b.keys[:, :, kept])


@pytest.mark.law("refused-before-anything-changes")
def test_what_no_chunk_can_keep_is_refused() -> None:
    model = build("Llama")
    chunk = computed(model, CHUNKS[0][0], recognise(model), 0, (0, 6))
    with pytest.raises(SpecError, match=r"without markers \[6\]"):
        compacted(chunk, kept_of(7, {1, 6}))
    with pytest.raises(SpecError, match="must describe all 7 tokens"):
        compacted(chunk, kept_of(8, {1}))
    with pytest.raises(SpecError, match="must describe all 7 tokens"):
        compacted(compacted(chunk, kept_of(7, {1})), kept_of(7, {2}))
    for granularity in (Granularity.LAYER, Granularity.HEAD):
        sets = Retention(np.array([0, 6] * 3), np.arange(0, 8, 2), 7, granularity)
        with pytest.raises(SpecError, match=r"'3 groups': must have (2|4) groups"):
            compacted(chunk, sets)


METHODS: dict[str, RetentionPolicy] = {
    "streamingllm": StreamingLLM(0.4, N_sink=2), "snapkv": NamedPolicy("snapkv", 9, W=4),
    "crystalcache": CrystalCache(0.4, frozenset(range(3, 131, 5)), TINY, backend="numpy"),
    "chunkkv": NamedPolicy("chunkkv", 12, W=4, c=5), "adakv": NamedPolicy("adakv", 13, W=4),
}


@pytest.mark.parametrize(("name", "form", "family"), [
    *((name, "markers", "Llama") for name in METHODS), ("adakv", "full_hidden_preamble", "Llama"),
    ("chunkkv", "markers", "DeepseekV3"),
])
def test_an_archive_of_what_a_policy_keeps(archive: Archive, name: str, form: str, family: str) -> None:
    """Check one kept set, and kept sets for each layer and each head: put, get, verify and splice equal the mask."""
    model, wrapped = build(family), wrap(FORMS[form], PART, CHAT)
    library = Library(archive, model, CHAT, "alice")
    key = library.put(PART, form, method=METHODS[name])
    assert library.put(PART, form, method=METHODS[name]) == key != library.put(PART, form)
    assert archive.verify().clean
    chunk = library.get(key)
    assert chunk is not None
    assert chunk.kept is not None
    n, hidden = len(wrapped.ids), wrapped.hidden
    gaps = {
        layer: [{len(SESSION) + at - hidden for at in range(hidden, n) if at not in group.tolist()} for group in places]
        for layer, places in chunk.kept.items()
    }
    assert {len(group) for group in gaps.values()} == {2 if name in ("snapkv", "adakv") else 1}
    assert all(all(group) for group in gaps.values())
    pinned = {at for at in wrapped.markers if at >= hidden}
    assert all(pinned <= set(group.tolist()) for places in chunk.kept.values() for group in places)
    cache, markers = library.inject(read(model, SESSION)[1], [key], room=len(QUERY))
    assert markers.tolist() == [len(SESSION) + at - hidden for at in wrapped.markers if at >= hidden]
    with layer_masks(model, cache):
        logits = torch.cat([read(model, part, cache)[0] for part in (QUERY[:3], QUERY[3:])], 1)
    oracle = block_masked(model, SESSION, [(list(wrapped.ids), hidden)], QUERY, evicted_in=gaps)
    assert relative(logits, oracle.logits) < BOUND


@pytest.mark.law("an-identity-tells-apart")
def test_a_compacted_chunk_is_never_the_full_one(archive: Archive) -> None:
    """Each kept set has a separate key, also in combination with a codec and half of the layers."""
    library = Library(archive, build("Llama"), CHAT, "alice")
    keys = [
        library.put(PART), library.put(PART, method=StreamingLLM(12)), library.put(PART, method=StreamingLLM(13)),
        library.put(PART, codec="kivi", method=StreamingLLM(12)),
        library.put(PART, upper=True, method=StreamingLLM(12)),
    ]
    assert len(set(keys)) == 5
    # All tokens are kept, and the manifest records this.
    assert library.put(PART, method=StreamingLLM(24)) not in keys[1:]
    sizes = {key: archive.get(key, "alice") for key in keys}
    for key, stored in zip(keys, (24, 12, 13, 12, 12), strict=True):
        chunk, actual = library.get(key), sizes[key]
        assert chunk is not None
        assert actual is not None
        assert (actual.manifest.tokens, chunk.ids) == (24, tuple(PART))
        assert all(tuple(chunk.places(layer).shape) == (1, keys_of.shape[1]) == (1, stored)
                   for layer, (keys_of, _) in chunk.layers.items())
    assert len(archive.entries()) == 6


def test_chunks_behind_a_session_whose_heads_differ() -> None:
    """Check a session with different kept sets per head, then a whole chunk, a chunk with gaps, and a turn."""
    model = build("Llama")
    rotary = recognise(model)
    with NamedPolicy("snapkv", 7, W=4)(model) as run, torch.no_grad():
        model(input_ids=torch.tensor([SESSION]))
    cache = run.cache
    assert cache is not None
    left = {layer: [positions.head_positions(0, head).tolist() for head in (0, 1)]
            for layer, positions in enumerate(cache.full_layers)}
    whole, gapped = (computed(model, CHUNKS[at][0], rotary) for at in (0, 2))
    heads = Retention(np.array([0, 2, 5, 1, 3, 5, 0, 1, 2, 5]), np.array([0, 3, 4, 6, 10]), 6, Granularity.HEAD)
    assert [set(heads.group(at).tolist()) for at in range(4)] == [{0, 2, 5}, {1}, {3, 5}, {0, 1, 2, 5}]
    splice(cache, [whole, compacted(gapped, heads)], rotary)
    gaps = {
        layer: [
            {at for at in range(12) if at not in left[layer][head]}
            | {19 + at for at in range(6) if at not in heads.group(2 * layer + head)} for head in (0, 1)
        ] for layer in (0, 1)
    }
    oracle = block_masked(model, SESSION, [CHUNKS[0], CHUNKS[2]], QUERY, evicted_in=gaps)
    assert relative(read_apart(model, cache, 2), oracle.logits) < BOUND
    assert cache.get_seq_length() == 12 + 7 + 6 + 4
    empty = RetainedCache(model.config)
    splice(empty, [compacted(gapped, heads)], rotary)
    with layer_masks(model, empty):
        logits, _ = read(model, QUERY, empty)
    alone = {layer: [{at - 19 for at in positions if at >= 19} for positions in sets] for layer, sets in gaps.items()}
    assert relative(logits, block_masked(model, [], [CHUNKS[2]], QUERY, evicted_in=alone).logits) < BOUND
