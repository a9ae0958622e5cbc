"""Networks of KVzap in a safetensors file: one linear map, or two linear maps, for each layer of a model."""

from os import PathLike
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from models_integration.model.architecture import Architecture, describe
from models_integration.model.identity import ModelIdentity
from models_integration.model.layer_kinds import layer_types, of_layer
from models_integration.policies.served import heads_served_by
from reference.calibration import Calibration, Networks
from spec.arrays import Float64, Matrix
from spec.errors import SpecError

__all__ = ["holds_networks", "read_networks"]

# Tensors of a layer of KVzapModel (kvpress 0.5): those of an nn.Linear, or of an nn.Sequential (linear, GELU, linear).
_LINEAR = {"W_2": "weight", "b_2": "bias"}
_MLP = {"W_1": "0.weight", "b_1": "0.bias", "W_2": "2.weight", "b_2": "2.bias"}


def read_networks(
    path: str | PathLike[str], model: PreTrainedModel, identity: ModelIdentity | None = None,
) -> Calibration:
    """Read the networks of KVzap from the safetensors file of KVzapModel.

        policy = kvspec.policy_from_name("kvzap", 0.3, calibration="KVzap-mlp-Qwen3-8B/model.safetensors")
        found = read_networks("KVzap-mlp-Qwen3-8B/model.safetensors", model)

    The file does not name a model. Therefore kvspec checks only the numbers of layers, channels and KV heads.

    Args:
        path: path of the .safetensors file.
        model: model that the networks were trained for.
        identity: identity of the model, if known. Default: the identity is computed from all parameters of the model.

    Raises:
        SpecError: if the file cannot be read, or if the networks do not fit the model.
    """
    architecture = describe(model)
    networks, layers = _of_layers(Path(path), architecture), architecture.full_layers
    nothing = np.empty((len(layers), of_layer(architecture.config, "num_attention_heads", layers[0]), 0))
    return Calibration(heads_served_by(model, identity), layers, nothing, nothing, networks=networks)


def holds_networks(path: str | PathLike[str]) -> bool:
    """Return True if a safetensors file has networks of KVzap."""
    try:
        with safe_open(path, framework="pt") as file:
            return any(name.startswith("layers.") for name in file.keys())  # noqa: SIM118  # no dict
    except (OSError, SafetensorError):
        return False


def _of_layers(path: Path, architecture: Architecture) -> Networks:
    """Read the networks of the full-attention layers.

    Raises:
        SpecError: if the file is not a safetensors file with one network for each layer of the model, or if a network
            does not have the model's number of channels and of KV heads.
    """
    tensors, config, full = _tensors(path), architecture.config, architecture.full_layers
    form = _MLP if "layers.0.0.weight" in tensors else _LINEAR
    layers = range(len(layer_types(config)))
    wanted = {f"layers.{at}.{part}" for at in layers for part in form.values()}
    if different := sorted(wanted ^ tensors.keys()):
        state = "lacks" if different[0] in wanted else "has also"
        reason = f"{state} {different[0]}: pass the model.safetensors of KVzap for a model of {len(layers)} layers"
        raise SpecError("calibration", str(path), reason)
    try:
        stacked = {key: np.stack([tensors[f"layers.{at}.{part}"] for at in full]) for key, part in form.items()}
        networks = Networks(**stacked)
    except (ValueError, TypeError, SpecError) as error:
        raise SpecError("calibration", str(path), f"has networks whose shapes or numbers are wrong: {error}") from error
    fits = of_layer(config, "hidden_size", full[0]), of_layer(config, "num_key_value_heads", full[0])
    if (networks.width, networks.W_2.shape[1]) != fits:
        has = f"has networks from {networks.width} channels to {networks.W_2.shape[1]} KV heads"
        raise SpecError("calibration", str(path), f"{has}; the model has {fits[0]} channels and {fits[1]} KV heads")
    return networks


def _tensors(path: Path) -> dict[str, Float64[Matrix, "_ _"]]:
    """Return all tensors of a file by name. A safetensors file contains no code."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name).double().numpy() for name in file.keys()}  # noqa: SIM118  # no dict
    except (OSError, SafetensorError) as error:
        reason = f"must be a safetensors file: {str(error).splitlines()[0]}"
        raise SpecError("calibration", str(path), reason) from error
