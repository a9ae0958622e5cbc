"""Quantisation of archived keys and values to 8-bit integers, and dequantisation."""

from collections.abc import Mapping

import torch
from torch import Tensor

from reference.injection.quantisers import ARMS, SCHEMES, SMALLEST_SCALE, quantised_region
from spec.validate import check_choices

__all__ = ["decode", "encode"]

BITS = 8
HIGHEST = 2 ** (BITS - 1) - 1


def encode(layers: Mapping[int, tuple[Tensor, Tensor]], arm: str, depth: int) -> dict[str, Tensor]:
    """Encode keys and values (heads, n, d) by layer as tensors of an object. The model has `depth` layers.

    This function computes the same as reference/injection/quantisers.py, but on tensors.

    Raises:
        SpecError: if the arm is unknown.
    """
    check_choices("codec", (arm,), ARMS)
    found: dict[str, Tensor] = {}
    for layer, pair in layers.items():
        chosen, tokens = quantised_region(ARMS[arm], depth, pair[0].shape[1])
        for name, x, scheme in zip("kv", pair, (ARMS[arm].keys, ARMS[arm].values), strict=True):
            coded = scheme is not None and layer in chosen and len(tokens) > 0
            found |= _coded(f"{layer}.{name}", x, SCHEMES[str(scheme)], tokens) if coded else {f"{layer}.{name}": x}
    return found


def decode(tensors: Mapping[str, Tensor], layer: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the keys and values (heads, n, d) of one layer, in the dtype of the original keys and values."""
    keys, values = (_decoded(tensors, f"{layer}.{name}", dtype) for name in "kv")
    return keys, values


def _coded(name: str, x: Tensor, axes: tuple[int, ...], tokens: range) -> dict[str, Tensor]:
    """Return the codes and the scales, and the unquantised tokens before and after the quantised region."""
    part = x[:, tokens.start : tokens.stop].double()
    step = (part.abs().amax(axes, keepdim=True) / HIGHEST).clamp_min(SMALLEST_SCALE).float()
    codes = (part / step.double()).round().clamp(-HIGHEST, HIGHEST).to(torch.int8)
    return {
        f"{name}.q": codes, f"{name}.s": step, f"{name}.first": x[:, : tokens.start].contiguous(),
        f"{name}.last": x[:, tokens.stop :].contiguous(),
    }


def _decoded(tensors: Mapping[str, Tensor], name: str, dtype: torch.dtype) -> Tensor:
    if name in tensors:
        return tensors[name].to(dtype)
    part = (tensors[f"{name}.q"].float() * tensors[f"{name}.s"]).to(dtype)
    return torch.cat([tensors[f"{name}.first"].to(dtype), part, tensors[f"{name}.last"].to(dtype)], dim=1)
