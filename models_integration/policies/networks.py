"""Networks of KVzap and gates of Fast KVzip in a safetensors file, for each layer of a model."""

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from models_integration.model.architecture import Architecture, describe
from models_integration.model.identity import ModelIdentity
from models_integration.model.layer_kinds import layer_config_value, layer_types
from models_integration.policies.served import heads_served_by
from reference.calibration import Calibration, Gates, Networks
from spec.arrays import Float64, Matrix
from spec.errors import SpecError
from spec.files import check_regular

__all__ = ["has_learned_scores", "read_gates", "read_networks"]

# Tensors of a layer of KVzapModel (kvpress 0.5): those of an nn.Linear, or of an nn.Sequential (linear, GELU, linear).
_LINEAR = {"W_2": "weight", "b_2": "bias"}
_MLP = {"W_1": "0.weight", "b_1": "0.bias", "W_2": "2.weight", "b_2": "2.bias"}
# Tensors of a layer of FastKVzipGate (kvpress 0.5).
_GATE = {
    "W_q": "q_proj.weight", "b_q": "q_proj.bias", "W_k": "k_proj.weight", "norm_q": "q_norm.weight",
    "norm_k": "k_norm.weight", "base": "k_base", "bias": "b",
}


def read_networks(
    path: str | PathLike[str], model: PreTrainedModel, identity: ModelIdentity | None = None,
) -> Calibration:
    """Read the networks of KVzap from the safetensors file of KVzapModel.

        policy = kvspec.policy_from_name("kvzap", 0.3, calibration="KVzap-mlp-Qwen3-8B/model.safetensors")
        calibration = read_networks("KVzap-mlp-Qwen3-8B/model.safetensors", model)

    The file does not name a model. Therefore kvspec checks only the numbers of layers, channels and KV heads.

    Args:
        path: path of the .safetensors file.
        model: model that the networks were trained for.
        identity: identity of the model, if known. Default: the identity is computed from all parameters of the model.

    Raises:
        SpecError: if the file cannot be read, or if the networks do not fit the model.
    """
    path, architecture = Path(path), describe(model)
    tensors = _tensors(path)
    form = _MLP if "layers.0.0.weight" in tensors else _LINEAR
    arrays = _stacked(path, tensors, "layers", form, architecture)
    try:
        networks = Networks(**arrays)
    except (ValueError, TypeError) as error:
        raise SpecError("calibration", str(path), f"has networks whose shapes or numbers are wrong: {error}") from error
    _check_heads(path, networks.width, networks.W_2.shape[1], "num_key_value_heads", architecture)
    return _calibration(model, identity, networks=networks)


def read_gates(
    path: str | PathLike[str], model: PreTrainedModel, identity: ModelIdentity | None = None,
) -> Calibration:
    """Read the gates of Fast KVzip from a safetensors file.

        policy = kvspec.policy_from_name("fast-kvzip", 0.3, calibration="gates.safetensors")
        calibration = read_gates("gates.safetensors", model)

    The tensors are those of kvpress's FastKVzipGate, with the names `gates.LAYER.NAME`. The file does not name a model.
    Therefore kvspec checks only the numbers of layers, channels and heads.

    Args:
        path: path of the .safetensors file.
        model: model that the gates were trained for.
        identity: identity of the model, if known. Default: the identity is computed from all parameters of the model.

    Raises:
        SpecError: if the file cannot be read, or if the gates do not fit the model.
    """
    path, architecture = Path(path), describe(model)
    arrays = _stacked(path, _tensors(path), "gates", _GATE, architecture)
    try:
        L, H_kv, _, s, r = arrays["base"].shape
        shapes: dict[str, tuple[int, ...]] = {
            "W_q": (L, -1, r, arrays["W_q"].shape[-1]), "b_q": (L, -1, r), "base": (L, H_kv, s, r), "bias": (L, -1),
            "W_k": (L, H_kv, r, arrays["W_k"].shape[-1]),
        }
        gates = Gates(**arrays | {name: arrays[name].reshape(shape) for name, shape in shapes.items()})
    except (ValueError, TypeError) as error:
        raise SpecError("calibration", str(path), f"has gates whose shapes or numbers are wrong: {error}") from error
    _check_heads(path, gates.width, gates.W_k.shape[1], "num_key_value_heads", architecture)
    _check_heads(path, gates.width, gates.W_q.shape[1], "num_attention_heads", architecture)
    return _calibration(model, identity, gates=gates)


def has_learned_scores(path: str | PathLike[str], prefix: str) -> bool:
    """Return True if a safetensors file has tensors of layers: "layers." for KVzap, "gates." for Fast KVzip."""
    try:
        check_regular(path)
        with safe_open(path, framework="pt") as file:
            return any(name.startswith(prefix) for name in file.keys())  # noqa: SIM118  # no dict
    except (OSError, SafetensorError):
        return False


def _calibration(model: PreTrainedModel, identity: ModelIdentity | None, **learned: Any) -> Calibration:
    architecture = describe(model)
    layers = architecture.full_layers
    nothing = np.empty((len(layers), layer_config_value(architecture.config, "num_attention_heads", layers[0]), 0))
    return Calibration(heads_served_by(model, identity), layers, nothing, nothing, **learned)


def _stacked(
    path: Path, tensors: Mapping[str, Any], prefix: str, form: Mapping[str, str], architecture: Architecture,
) -> dict[str, Any]:
    """Return the arrays of the full-attention layers by name. The first axis of an array is the layer.

    Raises:
        SpecError: if the file does not have one network for each layer of the model, or if layers differ in shape.
    """
    layers = range(len(layer_types(architecture.config)))
    wanted = {f"{prefix}.{at}.{part}" for at in layers for part in form.values()}
    if different := sorted(wanted ^ tensors.keys()):
        state = "lacks" if different[0] in wanted else "has also"
        source = {"layers": "model.safetensors of KVzap", "gates": "gates.safetensors of Fast KVzip"}[prefix]
        reason = f"{state} {different[0]}: pass the {source} for a model of {len(layers)} layers"
        raise SpecError("calibration", str(path), reason)
    try:
        full = architecture.full_layers
        return {key: np.stack([tensors[f"{prefix}.{at}.{part}"] for at in full]) for key, part in form.items()}
    except ValueError as error:
        reason = f"has networks whose shapes or numbers are wrong: {error}"
        raise SpecError("calibration", str(path), reason) from error


def _check_heads(path: Path, width: int, heads: int, kind: str, architecture: Architecture) -> None:
    config, first = architecture.config, architecture.full_layers[0]
    fits = layer_config_value(config, "hidden_size", first), layer_config_value(config, kind, first)
    if (width, heads) != fits:
        name = {"num_key_value_heads": "KV heads", "num_attention_heads": "query heads"}[kind]
        has = f"has networks from {width} channels to {heads} {name}"
        raise SpecError("calibration", str(path), f"{has}; the model has {fits[0]} channels and {fits[1]} {name}")


def _tensors(path: Path) -> dict[str, Float64[Matrix, "_ _"]]:
    """Return all tensors of a file by name. A safetensors file contains no code."""
    try:
        check_regular(path)
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no dict
    except (OSError, SafetensorError) as error:
        reason = f"must be a safetensors file: {str(error).splitlines()[0]}"
        raise SpecError("calibration", str(path), reason) from error
    if other := [name for name, tensor in tensors.items() if not tensor.is_floating_point()]:
        reason = f"has {tensors[other[0]].dtype} in {other[0]}, but must have floating-point numbers"
        raise SpecError("calibration", str(path), reason)
    return {name: tensor.double().numpy() for name, tensor in tensors.items()}
