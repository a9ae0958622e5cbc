"""Oracles for full sizes of what no backend's stage computes: float64 NumPy from the text of spec/*.md."""

from itertools import pairwise

import numpy as np

from conformance.oracles.scale.decode import Rows, Weights, rows_of
from spec.arrays import BoolVector, IntVector, Vector

__all__ = ["left", "whole_units"]


def whole_units(s: Vector, sizes: IntVector, shut: BoolVector, B: int) -> list[int]:
    """PO-TOP-UNITS of one set: the protected units, then the best until one does not fit; their tokens."""
    kept, tokens = set(np.flatnonzero(shut).tolist()), int(sizes[shut].sum())
    for u in sorted(np.flatnonzero(~shut).tolist(), key=lambda u: (-s[u], u)):
        tokens += int(sizes[u])
        if tokens > B:
            break
        kept.add(u)
    first = np.cumsum(sizes) - sizes
    return [i for u in sorted(kept) for i in range(int(first[u]), int(first[u] + sizes[u]))]


def left(offsets: IntVector, W: Weights, stays: BoolVector) -> tuple[list[int], list[int], Rows]:
    """CC-LIVE: the trunks that live on, the offsets of what they keep, and their rows of W, renumbered."""
    sizes = [int(stays[a:b].sum()) for a, b in pairwise(offsets.tolist())]
    alive = [g for g, size in enumerate(sizes) if size]
    number = {g: at for at, g in enumerate(alive)}
    rows = rows_of(W)
    return (
        alive, np.cumsum([0, *(sizes[g] for g in alive)]).tolist(),
        [[(number[h], w) for h, w in rows[g] if h in number] for g in alive],
    )
