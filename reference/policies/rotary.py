"""Rotary embedding, in pairs of the two halves of a head: to take it off queries, and to average it over positions."""

import numpy as np

from spec.arrays import Cube, Float64, Int64, IntVector, Matrix, Vector

__all__ = ["mean_rotation", "tables", "turned_back", "unrotated"]


def tables(
    positions: Int64[IntVector, " n"], inv_freq: Float64[Vector, " half"],
) -> tuple[Float64[Matrix, "n half"], Float64[Matrix, "n half"]]:
    """Cosines and sines of the angles at these positions: heads and layers of one rotation share them."""
    angle = positions[:, None] * inv_freq
    return np.cos(angle), np.sin(angle)


def turned_back(
    x: Float64[Cube, "H n d"], cos: Float64[Matrix, "n half"], sin: Float64[Matrix, "n half"],
) -> Float64[Cube, "H n d"]:
    """x, each token turned back by its angles."""
    first, second = np.split(x, 2, axis=2)
    back: Cube = np.concatenate([first * cos + second * sin, second * cos - first * sin], axis=2)
    return back


def unrotated(
    x: Float64[Cube, "H n d"], positions: Int64[IntVector, " n"], inv_freq: Float64[Vector, " half"], factor: float,
) -> Float64[Cube, "H n d"]:
    """x before its rotary embedding: turned back by its position, and divided by the attention factor."""
    return turned_back(x, *tables(positions, inv_freq)) / factor


def mean_rotation(
    positions: Int64[IntVector, " m"], inv_freq: Float64[Vector, " half"], factor: float,
) -> Float64[Matrix, "d d"]:
    """The mean over positions of the matrix that rotates a column vector."""
    angle = positions[:, None] * inv_freq
    cos, sin = factor * np.cos(angle).mean(axis=0), factor * np.sin(angle).mean(axis=0)
    R: Matrix = np.block([[np.diag(cos), np.diag(-sin)], [np.diag(sin), np.diag(cos)]])
    return R
