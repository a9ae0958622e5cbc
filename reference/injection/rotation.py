"""RoPE rotations that move archived keys to new positions, computed from the model's inverse frequencies."""

from collections.abc import Callable

import numpy as np

from spec.arrays import Cube, Float64, Matrix, Vector

__all__ = ["TURNS", "rebase_angles", "shift_angles", "turn_half_split", "turn_interleaved"]


def shift_angles(n: int, start: int, inverse_frequencies: Float64[Vector, " pairs"]) -> Float64[Matrix, "n pairs"]:
    """Return RoPE angles (radians) that move n tokens, archived at positions 0 to n - 1, by `start` positions.

    Implements: IN-SHIFT-ANGLES

    Source: Section 3.7 and Appendix B. Each frequency has the same angle for all tokens. A rotation by these angles
    needs no factor, because an archived key already contains the attention factor of the model (mscale).
    """
    return np.tile(start * inverse_frequencies, (n, 1))


def rebase_angles(
    n: int, start: int, archived: Float64[Vector, " pairs"], live: Float64[Vector, " pairs"],
) -> Float64[Matrix, "n pairs"]:
    """Return RoPE angles (radians) that move n tokens and replace the archive's RoPE frequencies by the session's.

    Implements: IN-REBASE-ANGLES

    Source: none in the paper. With longrope and dynamic scaling, the RoPE frequencies depend on the length of the
    session.
    """
    at = np.arange(n, dtype=np.float64)[:, None]
    return (start + at) * live - at * archived


def turn_half_split(x: Float64[Cube, "heads n d"], angles: Float64[Matrix, "n pairs"]) -> Float64[Cube, "heads n d"]:
    """Rotate the channel pairs (i, pairs + i) of each token. The channels 2 * pairs and above are unchanged.

    Implements: IN-HALF-SPLIT

    Source: Appendix B ("contiguous-half rotate_half").
    """
    pairs = angles.shape[1]
    turned = x.copy()
    turned[..., :pairs], turned[..., pairs : 2 * pairs] = _turned(x[..., :pairs], x[..., pairs : 2 * pairs], angles)
    return turned


def turn_interleaved(x: Float64[Cube, "heads n d"], angles: Float64[Matrix, "n pairs"]) -> Float64[Cube, "heads n d"]:
    """Rotate the channel pairs (2i, 2i + 1) of each token. The channels 2 * pairs and above are unchanged.

    Implements: IN-INTERLEAVED

    Source: none in the paper. In Hugging Face transformers, the models GLM, Cohere and DeepSeek-V2 use adjacent
    channels as pairs.
    """
    width = 2 * angles.shape[1]
    turned = x.copy()
    turned[..., 0:width:2], turned[..., 1:width:2] = _turned(x[..., 0:width:2], x[..., 1:width:2], angles)
    return turned


def _turned(
    x: Float64[Cube, "heads n pairs"], y: Float64[Cube, "heads n pairs"], angles: Float64[Matrix, "n pairs"],
) -> tuple[Float64[Cube, "heads n pairs"], Float64[Cube, "heads n pairs"]]:
    """Rotate each pair (x, y) by its angle. An angle of 0 changes no bit, not even the sign of a negative zero."""
    cos, sin, still = np.cos(angles), np.sin(angles), angles == 0
    return np.where(still, x, x * cos - y * sin), np.where(still, y, x * sin + y * cos)


Turn = Callable[[Float64[Cube, "heads n d"], Float64[Matrix, "n pairs"]], Float64[Cube, "heads n d"]]

TURNS: dict[str, Turn] = {"half_split": turn_half_split, "interleaved": turn_interleaved}
