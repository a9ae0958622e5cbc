"""Diagnostics of the paper on injection: entropy, sink mass, key cosines, and bands of layers."""

from collections.abc import Mapping

import numpy as np

from reference.injection.rotation import TURNS
from reference.injection.splicing import SINKS
from spec.arrays import Cube, Float64, Int64, IntVector, Matrix, Vector
from spec.errors import SpecError

__all__ = ["bands", "entropy", "key_cosine", "sink_mass"]

PAPER_DEPTH = 40
# Bands of layers [low, high) of Phi-3-medium, which has 40 layers.
PAPER_BANDS = {"early": (0, 6), "mid": (10, 16), "upper": (20, 33), "all": (0, 40)}


def entropy(weights: Float64[Cube, "heads q n"]) -> Float64[Matrix, "heads q"]:
    """Return the entropy H = -sum_i a_i log a_i of each query's attention, in nats. The term 0 log 0 is 0.

    Implements: IN-ENTROPY

    Source: Section 3.10.
    """
    terms = weights * np.log(np.where(weights > 0, weights, 1.0))
    entropies: Matrix = 0.0 - terms.sum(axis=-1)
    return entropies


def sink_mass(
    weights: Float64[Cube, "heads q n"], positions: Int64[IntVector, " n"], sinks: int = SINKS,
) -> Float64[Matrix, "heads q"]:
    """Return the total attention of each query to positions below `sinks`, added in the order of the positions.

    Implements: IN-SINK-MASS

    Source: Section 3.10 ("attention mass on first 4 positions").
    """
    total = np.zeros(weights.shape[:2])
    for slot in np.flatnonzero(positions < sinks):
        total = total + weights[..., slot]
    return total


def key_cosine(
    archived: Float64[Cube, "heads n d"], fresh: Float64[Cube, "heads n d"],
    positions: tuple[Int64[IntVector, " n"], Int64[IntVector, " n"]], inverse_frequencies: Float64[Vector, " pairs"],
    style: str,
) -> tuple[Float64[Matrix, "heads n"], Float64[Matrix, "heads n"]]:
    """Return two cosines between the archived and fresh keys of each token: with RoPE, and with RoPE removed.

    Implements: IN-KEY-COSINE

    Source: Section 3.10. `positions` contains the positions at which the archived and the fresh keys were computed.

    Raises:
        SpecError: if the RoPE style is unknown.
    """
    if style not in TURNS:
        raise SpecError("style", style, f"must be one of {', '.join(TURNS)}")
    still = [
        TURNS[style](keys, -at[:, None] * inverse_frequencies)
        for keys, at in zip((archived, fresh), positions, strict=True)
    ]
    return _cosine(archived, fresh), _cosine(still[0], still[1])


def _cosine(a: Float64[Cube, "heads n d"], b: Float64[Cube, "heads n d"]) -> Float64[Matrix, "heads n"]:
    """Return the cosine of each pair of vectors, or 0 if one vector of the pair is zero."""
    lengths = np.sqrt((a * a).sum(-1) * (b * b).sum(-1))
    cosines: Matrix = np.where(lengths > 0, (a * b).sum(-1) / np.where(lengths > 0, lengths, 1.0), 0.0)
    return cosines


def bands(depth: int) -> Mapping[str, tuple[int, int]]:
    """Return the layer bands [low, high) for residual patching, scaled from the paper's 40 layers to `depth` layers.

    Implements: IN-BANDS

    Source: Section 4.6, Table 13.

    Raises:
        SpecError: if the depth is below 1.
    """
    if depth < 1:
        raise SpecError("depth", depth, "must be at least 1 layer")
    bands = {}
    for name, (low, high) in PAPER_BANDS.items():
        first = low * depth // PAPER_DEPTH
        bands[name] = (first, max(first + 1, high * depth // PAPER_DEPTH))
    return bands
