"""The splice oracle: chunks spliced equal one forward in which a mask keeps them apart, in every layer and logit."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from conformance.injection.models import FAMILIES, ROTATIONS, VOCABULARY, build
from conformance.integration.families import relative
from models_integration.archive import splice
from models_integration.archive.codec import decode, encode
from models_integration.archive.rope import frequencies_at, plain_layers, prefilled, recognise
from models_integration.archive.splice import Chunk, computed, spliced
from reference.injection.quantisers import ARMS, SCHEMES, codes, scale
from spec.errors import SpecError

BOUND, BOUND_BF16 = 1e-5, 5e-2


def ids(n: int, seed: int) -> list[int]:
    drawn: list[int] = torch.randint(3, VOCABULARY, (n,), generator=torch.Generator().manual_seed(seed)).tolist()
    return drawn


SYSTEM, QUERY = ids(5, 1), ids(4, 2)
CHUNKS = [(ids(7, 3), 0), (ids(9, 4), 3), (ids(6, 5), 0)]  # the second has a hidden preamble


Chunks = Sequence[tuple[list[int], int]]


def as_it_is(chunk: Chunk) -> Chunk:
    return chunk


def block_masked(model: PreTrainedModel, chunks: Chunks) -> tuple[Tensor, DynamicCache, Tensor]:
    """Logits of the query and the cache of one forward over everything, and which of its slots are visible."""
    tokens, positions, owner, hidden = [*SYSTEM], [*range(len(SYSTEM))], [0] * len(SYSTEM), [False] * len(SYSTEM)
    at = len(SYSTEM)
    for number, (chunk, preamble) in enumerate(chunks, 1):
        tokens += chunk
        positions += range(at - preamble, at - preamble + len(chunk))
        owner += [number] * len(chunk)
        hidden += [place < preamble for place in range(len(chunk))]
        at += len(chunk) - preamble
    tokens += QUERY
    positions += range(at, at + len(QUERY))
    owner += [-1] * len(QUERY)
    hidden += [False] * len(QUERY)
    n = len(tokens)
    mask = torch.zeros(n, n, dtype=torch.bool)
    for row in range(n):
        for column in range(row + 1):
            mask[row, column] = owner[row] == owner[column] or (owner[row] == -1 and not hidden[column])
    shaped: Any = mask[None, None]
    if getattr(model.config, "layer_types", None) is not None and "sliding_attention" in model.config.layer_types:
        shaped = {"full_attention": shaped, "sliding_attention": shaped}
    cache = DynamicCache()
    with torch.no_grad():
        logits = model(
            input_ids=torch.tensor([tokens]), position_ids=torch.tensor([positions]), attention_mask=shaped,
            past_key_values=cache, use_cache=True,
        ).logits
    return logits[:, -len(QUERY) :], cache, ~torch.tensor(hidden)


def injected(
    model: PreTrainedModel, chunks: Chunks, change: Callable[[Chunk], Chunk] = as_it_is,
) -> tuple[Tensor, DynamicCache]:
    rotary = recognise(model)
    total = len(SYSTEM) + sum(len(chunk) - hidden for chunk, hidden in chunks) + len(QUERY)
    made = [change(computed(model, chunk, hidden, rotary)) for chunk, hidden in chunks]
    cache = spliced(prefilled(model, SYSTEM), made, frequencies_at(model, rotary, total))
    past = plain_layers(cache)[0].keys.shape[-2]
    with torch.no_grad():
        logits = model(
            input_ids=torch.tensor([QUERY]), past_key_values=cache, use_cache=True,
            position_ids=torch.arange(past, past + len(QUERY))[None],
            attention_mask=torch.ones(1, past + len(QUERY), dtype=torch.long),
        ).logits
    return logits, cache


def distance(model: PreTrainedModel, chunks: Chunks, change: Callable[[Chunk], Chunk] = as_it_is) -> float:
    """The largest relative difference over the logits and every layer's keys and values."""
    wanted, whole, visible = block_masked(model, chunks)
    logits, cache = injected(model, chunks, change)
    pairs = [(logits, wanted)]
    for found, expected in zip(plain_layers(cache), plain_layers(whole), strict=True):
        pairs += [(found.keys, expected.keys[:, :, visible]), (found.values, expected.values[:, :, visible])]
    return max(relative(a.float(), b.float()) for a, b in pairs)


@pytest.mark.parametrize("family", FAMILIES)
def test_spliced_chunks_equal_the_block_mask(family: str) -> None:
    assert distance(build(family), CHUNKS) < BOUND


@pytest.mark.parametrize(
    ("family", "rotation"),
    # The rotary part of a latent cache is a tensor of its own, which rotates whole.
    [(family, rotation) for family in ("Llama", "Glm", "DeepseekV3") for rotation in ROTATIONS
     if (family, rotation) != ("DeepseekV3", "partial")],
)
def test_every_rotation_equals_the_block_mask(family: str, rotation: str) -> None:
    parameters = dict(ROTATIONS[rotation])
    if family == "Glm":
        parameters = {"partial_rotary_factor": 0.5, **parameters}
        for name in ("short_factor", "long_factor"):
            parameters |= {name: parameters[name][:2]} if name in parameters else {}
    model = build("Phi3" if (family, rotation) == ("Llama", "partial") else family, rope_parameters=parameters)
    assert distance(model, CHUNKS) < BOUND


def test_a_chunk_is_rebased_where_the_session_outgrows_the_first_range() -> None:
    """longrope: the chunk is archived under the short frequencies, the session of 70 tokens reads the long ones."""
    model = build("Llama", rope_parameters=dict(ROTATIONS["longrope"]))
    chunks = [(ids(60, 6), 0), (ids(40, 7), 0)]
    rotary = recognise(model)
    made = [computed(model, chunk, 0, rotary) for chunk, _ in chunks]
    fresh = plain_layers(prefilled(model, SYSTEM + chunks[0][0] + chunks[1][0]))[0].keys  # now in the long range
    distances = [
        relative(plain_layers(spliced(prefilled(model, SYSTEM), made, live))[0].keys[:, :, 5:], fresh[:, :, 5:])
        for live in (frequencies_at(model, rotary, 105), rotary)
    ]
    assert distances[0] < BOUND
    assert distances[1] > 0.1


def test_bfloat16_stays_within_its_bound() -> None:
    model = build("Llama", dtype=torch.bfloat16)
    sharp = dict(build("Llama").named_buffers())["model.rotary_emb.inv_freq"]
    model.get_submodule("model.rotary_emb").register_buffer("inv_freq", sharp, persistent=False)  # as from_pretrained
    assert distance(model, CHUNKS) < BOUND_BF16
    wanted, _, _ = block_masked(model, CHUNKS)
    assert torch.equal(injected(model, CHUNKS)[0].argmax(-1), wanted.argmax(-1))


def wrong_start(chunk: Chunk) -> Chunk:
    """A shift of one token too many: the chunk's keys stand one position on already."""
    moved = spliced(_single(chunk), [replace(chunk)], chunk.rotary)
    n = chunk.visible
    return replace(chunk, layers={
        at: (layer.keys[0, :, 1 : n + chunk.hidden + 1], layer.values[0, :, 1 : n + chunk.hidden + 1])
        for at, layer in enumerate(plain_layers(moved))
    })


def _single(chunk: Chunk) -> DynamicCache:
    cache = DynamicCache()
    for at, (keys, values) in chunk.layers.items():
        cache.update(keys[None, :, :1], values[None, :, :1], at)
    return cache


def other_style(chunk: Chunk) -> Chunk:
    styles = {"half_split": "interleaved", "interleaved": "half_split", None: None}
    return replace(chunk, rotary=replace(chunk.rotary, layers=tuple(
        replace(layer, style=styles[layer.style]) for layer in chunk.rotary.layers
    )))


@pytest.mark.parametrize("family", ["Llama", "Glm", "DeepseekV2", "DeepseekV3"])
@pytest.mark.parametrize("change", [wrong_start, other_style])
def test_a_wrong_shift_or_style_fails_the_oracle(family: str, change: Callable[[Chunk], Chunk]) -> None:
    chunks = [(ids(7, 3), 0), (ids(6, 5), 0)]
    assert distance(build(family), chunks) < BOUND
    assert distance(build(family), chunks, change) > 1000 * BOUND


@pytest.mark.parametrize("rotation", ["linear", "yarn", "llama3", "longrope"])
def test_frequencies_from_theta_alone_fail_the_oracle(rotation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("Llama", rope_parameters=dict(ROTATIONS[rotation]))
    plain = recognise(build("Llama", rope_parameters=dict(ROTATIONS["default"])))
    (name,) = plain.used()
    monkeypatch.setattr(
        splice, "angles_between",
        lambda n, start, before, after: (start * plain.frequencies[name].double()).expand(n, -1),
    )
    assert distance(model, CHUNKS) > 100 * BOUND


def test_nothing_that_is_given_changes() -> None:
    model = build("Llama")
    rotary = recognise(model)
    system, chunk = prefilled(model, SYSTEM), computed(model, CHUNKS[0][0], 0, rotary)
    before = [(layer.keys.clone(), layer.values.clone()) for layer in plain_layers(system)]
    stored = {at: (keys.clone(), values.clone()) for at, (keys, values) in chunk.layers.items()}
    found = spliced(system, [chunk, chunk], rotary)
    plain_layers(found)[0].keys.zero_()
    assert all(torch.equal(layer.keys, keys) for layer, (keys, _) in zip(plain_layers(system), before, strict=True))
    assert all(torch.equal(chunk.layers[at][0], stored[at][0]) for at in stored)


def test_a_chunk_of_other_layers_is_refused() -> None:
    model = build("Llama")
    rotary = recognise(model)
    chunk = computed(model, CHUNKS[0][0], 0, rotary)
    upper = replace(chunk, layers={1: chunk.layers[1]})
    with pytest.raises(SpecError, match="must hold the 2 layers"):
        spliced(prefilled(model, SYSTEM), [chunk, upper], rotary)
    with pytest.raises(SpecError, match="hidden"):
        computed(model, [5, 6], 2, rotary)


@pytest.mark.parametrize("arm", ARMS)
def test_a_codec_on_tensors_is_the_reference_s(arm: str) -> None:
    generator = torch.Generator().manual_seed(4)
    layers = {
        at: (torch.randn(2, 12, 4, generator=generator), torch.randn(2, 12, 6, generator=generator)) for at in range(4)
    }
    layers[2][0][1] = 0.0
    tensors = encode(layers, arm, 4)
    for at, given in layers.items():
        for name, x, found, scheme in zip(
            "kv", given, decode(tensors, at, torch.float32), (ARMS[arm].keys, ARMS[arm].values), strict=True
        ):
            if f"{at}.{name}" in tensors:
                assert torch.equal(found, x)
                continue
            part = x[:, ARMS[arm].first : 12 - ARMS[arm].last].double().numpy()
            step = scale(part, SCHEMES[str(scheme)], 8)
            assert tensors[f"{at}.{name}.q"].tolist() == codes(part, step, 8).tolist()
            assert tensors[f"{at}.{name}.s"].double().numpy().tolist() == step.tolist()
            assert (found - x).abs().max() <= 0.51 * step.max()


def test_an_unknown_arm_is_refused() -> None:
    with pytest.raises(SpecError, match="codec = 'int8'"):
        encode({}, "int8", 1)
