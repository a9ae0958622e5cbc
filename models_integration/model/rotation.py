"""Turning cached keys on their device: the twin of reference/injection/rotation.py on tensors."""

import torch
from torch import Tensor

__all__ = ["STYLES", "angles_between", "turned"]

STYLES = ("half_split", "interleaved")


def angles_between(tokens: int, start: int, archived: Tensor, live: Tensor) -> Tensor:
    """Angles (tokens, pairs) in float64 from positions 0, 1, ... to start, start + 1, ...

    Each product is rounded to float32, as the model's own angle is, so that the result is what the model would have
    computed at the new position and not the geometrically better value (they differ by start * 2^-24).
    """
    at = torch.arange(tokens, device=live.device, dtype=torch.float32)[:, None]
    to, back = (at + start) * live.float(), at * archived.float()
    return to.double() - back.double()


def turned(x: Tensor, angles: Tensor, style: str) -> Tensor:
    """x (..., tokens, d) with its first 2 * pairs channels turned; computed in float64, rounded once."""
    pairs = angles.shape[-1]
    width = 2 * pairs
    wide = x[..., :width].double()
    halves = (wide[..., :pairs], wide[..., pairs:]) if style == "half_split" else (wide[..., 0::2], wide[..., 1::2])
    cos, sin, still = angles.cos(), angles.sin(), angles == 0
    first = torch.where(still, halves[0], halves[0] * cos - halves[1] * sin)
    second = torch.where(still, halves[1], halves[0] * sin + halves[1] * cos)
    joined = torch.cat([first, second], -1) if style == "half_split" else torch.stack([first, second], -1).flatten(-2)
    return torch.cat([joined.to(x.dtype), x[..., width:]], -1)
