"""Arrays of the .safetensors files that the authors of Q-Filters and of Expected Attention publish for some models."""

from collections.abc import Mapping
from os import PathLike
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from models_integration.model.architecture import Architecture
from models_integration.model.layer_kinds import layer_config_value, layer_types
from spec.arrays import Cube, Float64, Hypercube
from spec.errors import SpecError
from spec.files import check_regular

__all__ = ["FILTERS", "STATISTICS", "filters_of", "load_tensors", "statistics_of"]

FILTERS = "q_filters"
STATISTICS = ("query_mean", "query_cov")
INSTEAD = "run `kvspec calibrate some-text.txt` with the same --model instead"


def load_tensors(path: str | PathLike[str]) -> dict[str, Tensor]:
    """Return the tensors of a .safetensors file by name.

    Raises:
        SpecError: if the file cannot be read.
    """
    try:
        check_regular(path)
        tensors: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise SpecError("path", str(path), f"must be a .safetensors file ({error}); {INSTEAD}") from error
    return tensors


def filters_of(tensors: Mapping[str, Tensor], architecture: Architecture) -> Float64[Cube, "L H_kv d"]:
    """Return the filters of the full-attention layers, with the sign of kvspec, which is opposite to the sign in files.

    Raises:
        SpecError: if the file does not have one filter for each layer and KV head of the model.
    """
    filters: Cube = -_rows(tensors, FILTERS, architecture, "key_value", axes=3)
    return filters


def statistics_of(
    tensors: Mapping[str, Tensor], architecture: Architecture, d: int,
) -> tuple[Float64[Cube, "L H d"], Float64[Hypercube, "L H d d"]]:
    """Return mean and covariance of the queries of the full-attention layers, for heads of d channels.

    Raises:
        SpecError: if the file does not have a mean and a covariance for each layer and query head of the model.
    """
    mean, covariance = (
        _rows(tensors, name, architecture, "attention", axes, d) for axes, name in enumerate(STATISTICS, 3)
    )
    return mean, covariance


def _rows(
    tensors: Mapping[str, Tensor], name: str, architecture: Architecture, heads: str, axes: int, d: int | None = None,
) -> Any:
    """Return the rows of the full-attention layers of a tensor (L, heads, d) or (L, heads, d, d)."""
    layers, config = architecture.full_layers, architecture.config
    first = (len(layer_types(config)), layer_config_value(config, f"num_{heads}_heads", layers[0]))
    tensor = tensors.get(name, torch.empty(0))
    shape = tuple(tensor.shape)
    if len(shape) != axes or shape[:2] != first or (d is not None and set(shape[2:]) != {d}):
        kind = "KV heads" if heads == "key_value" else "query heads"
        size = "" if d is None else f" of {d} channels"
        raise SpecError(name, shape, f"must have {first[0]} layers of {first[1]} {kind}{size}; {INSTEAD}")
    if not tensor.is_floating_point():
        raise SpecError(name, str(tensor.dtype), f"must have floating-point numbers; {INSTEAD}")
    return tensor[list(layers)].double().numpy()
