"""Names and digest of the statement that a server makes about an eviction (spec/witness.md)."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from spec.arrays import IntVector

__all__ = ["FORMAT", "POSITIONS", "Ranges", "digest_of", "make_eviction"]

FORMAT = 1
POSITIONS = ("kept", "renumbered")
Ranges = list[list[int]]
"""A kept set, as ascending ranges [first, end]."""


def digest_of(seen: int, sets: Sequence[Ranges], layers: Sequence[Sequence[int]]) -> str:
    """Return the SHA-256 that commits a server to a kept set."""
    return hashlib.sha256(json.dumps([seen, sets, layers], separators=(",", ":")).encode()).hexdigest()


def make_eviction(seen: int, kept: Sequence[Sequence[IntVector]]) -> dict[str, Any]:
    """Return an entry of `evictions`.

    Args:
        seen: number of tokens that the model had read when the server evicted.
        kept: ascending kept positions of each layer and KV head. One entry serves all layers, or all heads of a layer.
    """
    distinct = dict[tuple[tuple[int, int], ...], int]()
    layers = [[distinct.setdefault(_ranges(one), len(distinct)) for one in heads] for heads in kept]
    sets = [[[first, end] for first, end in one] for one in distinct]
    return {"seen": seen, "sets": sets, "layers": layers, "digest": digest_of(seen, sets, layers)}


def _ranges(positions: IntVector) -> tuple[tuple[int, int], ...]:
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    return tuple((int(part[0]), int(part[-1]) + 1) for part in np.split(positions, breaks) if len(part))
