"""Self-calibration: recognised models and rotations, and codec and rotation on tensors compared with the reference."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance import tolerances
from conformance.plugin import fewer_examples
from models_integration import policy_from_name
from models_integration.archive.library import decode, encode
from models_integration.model import rotation as rope
from models_integration.model.errors import UnknownModel
from models_integration.model.identity import identify
from models_integration.model.rotation import STYLES, angles_between, frequencies_at, recognise, turned
from reference.injection.quantisers import ARMS, SCHEMES, codes, scale
from reference.injection.rotation import TURNS, shift_angles
from spec.arrays import Cube, Vector
from spec.errors import SpecError
from tests.models_integration.archive.block_mask import REFUSED, ROTATIONS, build
from tests.models_integration.session.families import _GQA, VOCABULARY, prepared
from tests.reference.test_injection import keys, near

pytestmark = pytest.mark.law("refused-before-anything-changes")

_YARN = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}
_WIDTH: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 48}


def growing_queries(beta: float = 0.1) -> Any:
    parameters = {**_YARN, "llama_4_scaling_beta": beta}
    return prepared("Ministral3", **_GQA, head_dim=12, rope_parameters=parameters)


UNTURNED: dict[str, tuple[Callable[[], Any], str]] = {
    "MPT": (partial(prepared, "Mpt", vocab_size=VOCABULARY, d_model=48, n_heads=4, n_layers=3), "ALiBi"),
    "Bloom": (partial(prepared, "Bloom", **_WIDTH, n_layer=3, n_head=4), "ALiBi"),
    "Falcon": (partial(prepared, "Falcon", **_WIDTH, num_hidden_layers=3, num_attention_heads=4, alibi=True), "ALiBi"),
    "one layer": (partial(prepared, "Bloom", **_WIDTH, n_layer=1, n_head=4), "ALiBi"),
    "Ministral3": (growing_queries, "queries are scaled with the position"),
}


@pytest.mark.parametrize("name", [*REFUSED, *UNTURNED])
@pytest.mark.filterwarnings("ignore")
def test_a_model_that_is_not_recognised_is_refused_by_name(name: str) -> None:
    """Check unsupported models, and models whose keys would not follow from a rotation of stored keys."""
    make, words = UNTURNED.get(name, (partial(build, name), name))
    with pytest.raises(UnknownModel, match=words):
        recognise(make())


def test_growing_queries_are_seen_past_the_original_length_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check growing queries, independent of the name of the option in the config."""
    monkeypatch.setattr(rope, "_originals", lambda *_: [64])
    with pytest.raises(UnknownModel, match="into the keys at position 128"):
        recognise(growing_queries())


@pytest.mark.law("as-it-is-described")
def test_a_model_whose_keys_need_no_turn_or_an_even_one_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check queries that do not grow, and a model without positions."""
    assert all(layer.slot == "keys" for layer in recognise(growing_queries(0.0)).layers)
    model = build("Llama")
    monkeypatch.setattr("transformers.models.llama.modeling_llama.apply_rotary_pos_emb", lambda q, k, *_: (q, k))
    assert all(layer.slot is None for layer in recognise(model).layers)


def test_a_model_whose_frequencies_are_not_its_buffer_s_is_refused() -> None:
    """The gate trusts forward passes and not names. A buffer that the model does not use explains no rotation."""
    model = build("Llama")
    module = model.get_submodule("model.rotary_emb")
    module.forward = lambda x, position_ids: _rotated_by(1.3, module, x, position_ids)
    with pytest.raises(UnknownModel, match="layer 0"):
        recognise(model)


def _rotated_by(
    factor: float, module: torch.nn.Module, x: torch.Tensor, position_ids: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    angles = position_ids[..., None].float() * module.inv_freq * factor  # type: ignore[operator]
    double = torch.cat([angles, angles], -1)
    return double.cos(), double.sin()


@pytest.mark.law("the-model-stays-as-it-was")
def test_the_model_is_left_as_it_was() -> None:
    model = build("Llama")
    before = copy.deepcopy({**dict(model.named_parameters()), **dict(model.named_buffers())})
    recognise(model)
    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.law("an-identity-tells-apart")
@pytest.mark.parametrize("rotation", [name for name in ROTATIONS if name not in ("default", "partial")])
def test_another_rotation_is_another_rotation_of_the_identity(rotation: str) -> None:
    """Check each rotation. `dynamic` equals the default rotation inside its range, and only the config differs."""
    base = identify(build("Llama", rope_parameters=dict(ROTATIONS["default"])))
    other = identify(build("Llama", rope_parameters=dict(ROTATIONS[rotation])))
    assert (other.rotation == base.rotation) == (rotation == "dynamic")
    assert other.config != base.config


@pytest.mark.law("as-it-is-described")
def test_longrope_has_its_long_frequencies_in_a_long_session() -> None:
    model = build("Llama", rope_parameters=dict(ROTATIONS["longrope"]))
    actual = recognise(model)
    (name,) = actual.used()
    assert torch.equal(frequencies_at(model, actual, 64).frequencies[name], actual.frequencies[name])
    ratio = actual.frequencies[name] / frequencies_at(model, actual, 65).frequencies[name]
    assert (ratio - torch.tensor([2.0, 3 / 1.1, 5 / 1.2, 8 / 1.3])).abs().max() < 1e-5


def test_dynamic_frequencies_are_refused_beyond_their_range() -> None:
    model = build("Llama", rope_parameters=dict(ROTATIONS["dynamic"]))
    actual = recognise(model)
    (name,) = actual.used()
    assert torch.equal(frequencies_at(model, actual, 256).frequencies[name], actual.frequencies[name])
    with pytest.raises(SpecError, match="max_position_embeddings, 256"):
        frequencies_at(model, actual, 257)


@pytest.mark.law("the-proof-has-teeth")
def test_the_bound_of_the_probe_lies_far_from_both() -> None:
    """Correct and wrong hypotheses have errors a hundredfold below and above the bound."""
    model = build("Llama")
    before, after = (rope._probe(model, start) for start in (0, rope.PROBE_START))
    actual = recognise(model)
    (name,) = actual.used()
    theta = actual.frequencies[name]
    errors = {
        style: rope._error(
            turned(before[0]["keys"], angles_between(9, rope.PROBE_START, theta, theta), style),
            after[0]["keys"],
        )
        for style in STYLES
    }
    assert errors["half_split"] < rope.PROBE_BOUND[torch.float32] / 100
    assert errors["interleaved"] > rope.PROBE_BOUND[torch.float32] * 100


@pytest.mark.law("as-it-is-described")
def test_rounding_of_a_deep_half_precision_model_is_no_other_rotation() -> None:
    """Check a bfloat16 Llama with 32 layers and 4 096 channels, which was once refused at layer 25."""
    generator, frequencies = torch.Generator().manual_seed(2), {"inv_freq": 100.0 ** (-torch.arange(8) / 8)}
    keys, values = (torch.randn(1, 2, 9, 16, generator=generator).bfloat16() for _ in range(2))

    def explained(turn: float) -> rope.LayerRotary | None:
        angles = rope.angles_between(9, 37, frequencies["inv_freq"], turn * frequencies["inv_freq"])
        after = rope.turned(keys, angles, "half_split") if turn else keys
        noise = 0.15 * keys.abs().max() * torch.rand(keys.shape, generator=generator).bfloat16()
        return rope.explain_rotation(
            rope.probed(keys, values), rope.probed(after + noise, values + noise), 37, frequencies
        )

    assert explained(1.0) == rope.LayerRotary("keys", "half_split", "inv_freq")
    assert explained(0.0) == rope.LayerRotary()
    assert explained(1.1) is None


@pytest.mark.law("as-it-is-described")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_large_channels_that_rotate_slowly_hide_no_rotation(dtype: torch.dtype) -> None:
    """Check keys like those of SmolLM2, which position 37 changes by less than the bound of half precision."""
    model = prepared("Llama", **_GQA, head_dim=12)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight.view(-1, 12, layer.self_attn.k_proj.in_features)[:, (5, 11)] *= 60
    torch.nn.Module.to(model, dtype)
    assert {(layer.slot, layer.style) for layer in recognise(model).layers} == {("keys", "half_split")}
    before, after = (rope._probe(model, start) for start in (0, rope.PROBE_START))
    assert dtype == torch.float32 or rope._error(before[0]["keys"], after[0]["keys"]) < rope.PROBE_BOUND_HALF
    with policy_from_name("expected-attention", 0.5)(model) as run:
        model(input_ids=torch.arange(20)[None])
    assert run.kept_tokens[0].most == 10


@pytest.mark.law("decided-as-the-reference")
@pytest.mark.parametrize("arm", ARMS)
def test_a_codec_on_tensors_is_the_reference_s(arm: str) -> None:
    generator = torch.Generator().manual_seed(4)
    layers = {
        at: (torch.randn(2, 12, 4, generator=generator), torch.randn(2, 12, 6, generator=generator)) for at in range(4)
    }
    layers[2][0][1] = 0.0
    tensors = encode(layers, arm, 4)
    for at, pair in layers.items():
        for name, x, actual, scheme in zip(
            "kv", pair, decode(tensors, at, torch.float32), (ARMS[arm].keys, ARMS[arm].values), strict=True
        ):
            if f"{at}.{name}" in tensors:
                assert torch.equal(actual, x)
                continue
            part = x[:, ARMS[arm].first : 12 - ARMS[arm].last].double().numpy()
            step = scale(part, SCHEMES[str(scheme)], 8)
            assert tensors[f"{at}.{name}.q"].tolist() == codes(part, step, 8).tolist()
            assert tensors[f"{at}.{name}.s"].double().numpy().tolist() == step.tolist()
            assert (actual - x).abs().max() <= 0.51 * step.max()


@pytest.mark.law("decided-as-the-reference")
@pytest.mark.parametrize("style", ["half_split", "interleaved"])
@fewer_examples
@given(inputs=keys(), start=st.integers(0, 2048))
def test_tensors_turn_as_the_reference_does(style: str, inputs: tuple[Cube, Vector], start: int) -> None:
    """Compare tensors for equal angles. The integration rounds angles to float32, as models do."""
    x, theta = inputs
    tensor = torch.tensor(theta, dtype=torch.float32)
    angles = angles_between(x.shape[1], start, tensor, tensor)
    assert near(turned(torch.tensor(x), angles, style).numpy(), TURNS[style](x, angles.numpy()), angles.numpy(), 1)
    exact = shift_angles(x.shape[1], start, theta)
    rounding = 4 * tolerances.UNIT_ROUNDOFF["float32"] * (start + x.shape[1])
    assert (np.abs(angles.numpy() - exact) <= rounding).all()
