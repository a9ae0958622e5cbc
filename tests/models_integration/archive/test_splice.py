"""The splice oracle: chunks in a RetainedCache equal one forward pass with masks that separate them, in every layer."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from models_integration import StreamingLLM
from models_integration.archive import splice as module
from models_integration.archive.splice import Chunk, computed, splice
from models_integration.cache.retained_cache import RetainedCache
from models_integration.model.rotation import Rotary, angles_between, frequencies_at, plain_layers, prefilled, recognise
from spec.errors import SpecError
from tests.models_integration.archive.block_mask import (
    FAMILIES,
    ROTATIONS,
    Chunks,
    Oracle,
    block_masked,
    build,
    ids,
)
from tests.models_integration.session.families import relative

pytestmark = pytest.mark.law("a-splice-equals-a-block-mask")

BOUND, BOUND_BF16 = 1e-5, 5e-2
SYSTEM, QUERY = ids(5, 1), ids(4, 2)
CHUNKS = [(ids(7, 3), 0), (ids(9, 4), 3), (ids(6, 5), 0)]  # The second chunk has a hidden preamble.


def as_it_is(chunk: Chunk) -> Chunk:
    return chunk


def read(model: PreTrainedModel, tokens: list[int], cache: RetainedCache | None = None) -> tuple[Tensor, RetainedCache]:
    """Run one forward pass with the defaults of transformers: no positions and no mask."""
    cache = RetainedCache(model.config.get_text_config(decoder=True)) if cache is None else cache
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens]), past_key_values=cache, use_cache=True).logits, cache


def injected(
    model: PreTrainedModel, chunks: Chunks, change: Callable[[Chunk], Chunk] = as_it_is,
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
        slots = oracle.own if actual.is_sliding else oracle.visible  # The window is longer than the session.
        pairs += [(actual.keys, expected.keys[:, :, slots]), (actual.values, expected.values[:, :, slots])]
    return max(relative(a.float(), b.float()) for a, b in pairs)


def distance(model: PreTrainedModel, chunks: Chunks, change: Callable[[Chunk], Chunk] = as_it_is) -> float:
    return gap(*injected(model, chunks, change), block_masked(model, SYSTEM, chunks, QUERY))


MOST, BOTH = ("Llama", "Glm", "DeepseekV3"), [("Gemma3Text", "yarn"), ("GPTNeoX", "longrope")]
"""Families that are tested with every rotation in float32, and pairs that are tested in both dtypes."""


def cases() -> Iterator[Any]:
    """Yield every family without changes in both dtypes, and with every rotation.

    Most rotations run in the nightly profile.
    """
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
    """Check longrope: the chunk is archived under the short frequencies.

    The session of 105 tokens uses the long frequencies.
    """
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
