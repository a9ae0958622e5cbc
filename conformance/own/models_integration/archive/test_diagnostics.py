"""The instruments, against arithmetic by hand and against what they must show where the answer is known."""

import math
from dataclasses import replace

import pytest
import torch

from conformance.measure.studies.archive.diagnostics import (
    attention_entropy,
    attention_weights,
    bands,
    contamination,
    key_cosine,
    noise,
    patched,
    residuals,
    sink_mass,
    unrotated,
)
from conformance.own.models_integration.archive.block_mask import ids
from conformance.own.models_integration.archive.models import build
from conformance.own.models_integration.archive.test_splice import BOUND, QUERY, SYSTEM, read
from conformance.own.models_integration.session.families import relative
from models_integration.archive.splice import computed, splice
from models_integration.model.rotation import plain_layers, prefilled, recognise
from spec.errors import SpecError

pytestmark = pytest.mark.law("figures-are-counted-right")

CHUNK = ids(8, 11)


def test_entropy_and_mass_by_hand() -> None:
    weights = torch.tensor([[1.0, 0.0, 0.0, 0.0, 0.0], [0.5, 0.25, 0.25, 0.0, 0.0], [0.125, 0.125, 0.25, 0.25, 0.25]])
    wanted = [0.0, 0.5 * math.log(2) + 0.5 * math.log(4), 0.25 * math.log(8) + 0.75 * math.log(4)]
    assert (attention_entropy(weights) - torch.tensor(wanted, dtype=torch.float64)).abs().max() < 1e-7
    assert sink_mass(weights, torch.arange(5)).tolist() == [1.0, 1.0, 0.75]
    gaps = torch.tensor([0, 2, 3, 9, 11])  # positions 1 and 4 to 8 are evicted: slots are not positions
    assert sink_mass(weights, gaps).tolist() == [1.0, 1.0, 0.5]
    assert sink_mass(weights, gaps, 10).tolist() == [1.0, 1.0, 0.75]


@pytest.mark.law("decided-as-the-reference")
@pytest.mark.law("the-model-stays-as-it-was")
def test_attention_over_a_splice_is_that_of_the_model() -> None:
    """Rows sum to 1 over session, chunk and query; the model is left as it was, and the cache has read the query."""
    model = build("Llama")
    rotary = recognise(model)
    caches = []
    for _ in range(2):
        _, cache = read(model, SYSTEM)
        splice(cache, [computed(model, CHUNK, rotary)], rotary)
        caches.append(cache)
    weights = attention_weights(model, QUERY, caches[0])
    read(model, QUERY, caches[1])
    assert [tuple(layer.shape) for layer in weights] == [(4, 4, 17)] * 2
    assert all((layer.sum(-1) - 1).abs().max() < 1e-6 for layer in weights)
    assert model.config._attn_implementation == "sdpa"
    for a, b in zip(plain_layers(caches[0]), plain_layers(caches[1]), strict=True):
        assert relative(a.keys, b.keys) < BOUND
    # By hand in the first layer: the query's own first row sees no later token.
    assert all(torch.equal(layer[:, 0, 14:], torch.zeros(4, 3)) for layer in weights)


@pytest.mark.parametrize("family", ["Llama", "Glm", "GPTNeoX", "SmolLM3", "DeepseekV2"])
def test_unrotated_keys_stand_at_no_position(family: str) -> None:
    """The first layer's keys depend on token and position alone: without the rotation, equal ids have equal keys."""
    model = build(family)
    rotary = recognise(model)
    slot = rotary.layers[0].slot or "keys"
    near, far = (getattr(plain_layers(prefilled(model, CHUNK, at))[0], slot)[0] for at in (0, 41))
    at = torch.arange(len(CHUNK))[None]
    assert relative(unrotated(near, rotary, 0, at), unrotated(far, rotary, 0, at + 41)) < BOUND
    assert relative(near, far) > 0.1
    repeated = getattr(plain_layers(prefilled(model, [7] * 5))[0], slot)[0]
    still = unrotated(repeated, rotary, 0, torch.arange(5)[None])
    assert relative(still, still[:, :1].expand_as(still)) < BOUND


def test_cosines_tell_rotation_from_context() -> None:
    model = build("Llama")
    rotary = recognise(model)
    chunk = computed(model, CHUNK, rotary)
    moved = key_cosine(model, chunk, ids(40, 12))
    assert moved[0].raw.min() < 0.9  # the rotation, and nothing else, in the first layer
    assert (moved[0].unrotated - 1).abs().max() < 1e-6
    assert moved[1].unrotated.min() < 0.99  # the context, from the second layer on
    alone = key_cosine(model, chunk, [])
    assert all((one - 1).abs().max() < 1e-9 for probe in alone.values() for one in (probe.raw, probe.unrotated))


def test_an_archive_behind_its_own_text_is_not_contaminated() -> None:
    model = build("Llama")
    own, other = contamination(model, recognise(model), CHUNK, SYSTEM, ids(6, 13), QUERY)
    assert abs(own) < 1e-9
    assert other > 1e-4
    same, again = contamination(model, recognise(model), CHUNK, SYSTEM, SYSTEM, QUERY)
    assert same == again


def clean_and_corrupt() -> tuple[list[int], list[int], list[int]]:
    clean = [127, *CHUNK, 128]
    return clean, [3, *CHUNK, 4], [0, 9]


@pytest.mark.law("as-it-is-described")
@pytest.mark.parametrize("family", ["Llama", "GPTNeoX"])
def test_markers_patched_in_all_layers_have_the_keys_of_the_clean_run(family: str) -> None:
    model = build(family)
    clean, corrupt, places = clean_and_corrupt()
    states = residuals(model, clean)
    wanted = plain_layers(prefilled(model, clean))
    with patched(model, states, places, range(2)):
        found = plain_layers(prefilled(model, corrupt))
    for a, b in zip(found, wanted, strict=True):
        assert relative(a.keys[:, :, places], b.keys[:, :, places]) < BOUND
    # The tokens between see the clean opening marker; the closing one stands behind them.
    assert relative(found[1].keys[:, :, :9], wanted[1].keys[:, :, :9]) < BOUND
    untouched = plain_layers(prefilled(model, corrupt))
    assert relative(untouched[0].keys[:, :, places], wanted[0].keys[:, :, places]) > 0.01


@pytest.mark.law("as-it-is-described")
def test_a_patch_holds_in_its_band_alone() -> None:
    model = build("Llama")
    clean, corrupt, places = clean_and_corrupt()
    states, plain = residuals(model, clean), plain_layers(prefilled(model, corrupt))
    with patched(model, states, places, [1]):
        upper = plain_layers(prefilled(model, corrupt))
    assert torch.equal(upper[0].keys, plain[0].keys)
    assert torch.equal(upper[1].keys[:, :, 1:9], plain[1].keys[:, :, 1:9])
    assert relative(upper[1].keys[:, :, places], plain[1].keys[:, :, places]) > 0.01
    own = residuals(model, corrupt)
    for band, given in (([], states), ([0, 1], own)):
        with patched(model, given, places, band):
            same = plain_layers(prefilled(model, corrupt))
        assert all(torch.equal(a.keys, b.keys) for a, b in zip(same, plain, strict=True))
    with pytest.raises(SpecError, match=r"must lie in \[0, 2\)"), patched(model, states, places, [2]):
        pass


def test_bands_and_noise() -> None:
    found = bands(40, 1)
    assert {name: (band[0], band[-1]) for name, band in found.items() if name != "random"} == {
        "early": (0, 5), "mid": (10, 15), "upper": (20, 32), "all": (0, 39),
    }
    assert len(found["random"]) == 13 == len(set(found["random"]))
    assert found == bands(40, 1)
    assert found["random"] != bands(40, 2)["random"]
    assert all(0 <= layer < 3 for band in bands(3, 1).values() for layer in band)
    states = [torch.randn(5, 8, generator=torch.Generator().manual_seed(3))]
    drawn = noise(states, 4)
    assert (drawn[0].norm(dim=-1) - states[0].norm(dim=-1)).abs().max() < 1e-5
    assert relative(drawn[0], states[0]) > 0.5


def test_a_chunk_of_other_keys_lowers_both_cosines() -> None:
    model = build("Llama")
    rotary = recognise(model)
    chunk = computed(model, CHUNK, rotary)
    other = computed(model, ids(8, 14), rotary)
    mixed = key_cosine(model, replace(chunk, layers=other.layers), [])
    assert mixed[0].unrotated.mean() < 0.9
