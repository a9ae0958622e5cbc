"""Arguments beyond a size, for the witnesses of saboteurs by size: seeded, and no larger than they have to be."""

from typing import Any

import numpy as np

from conformance.assurance.saboteurs.registry import Array
from spec.budget import Budget
from spec.decode import DecodeState, LiveTrunks, TrunkWeights
from spec.parameters import CrystalCacheParameters
from spec.policy import LayerView, Scores
from spec.records import CoAttention, Edges

__all__ = [
    "attended", "equal_trunks", "given_by", "live_state", "live_trunks", "one_sided", "ramp", "random_rows", "scored",
    "segment", "star", "tied_eviction", "view", "whole_line",
]


def ramp(rows: int, columns: int) -> Array:
    """Rows that rise from the first column to the last, up to 1."""
    return np.tile(np.arange(1, columns + 1) / columns, (rows, 1))


def random_rows(*shape: int) -> Array:
    """Values in [0, 1) from a seed."""
    return np.random.default_rng(28).random(shape)


def attended(n: int, H: int, H_kv: int, d: int = 4) -> tuple[Any, ...]:
    """What CC-ATTENTION is given: n queries and keys, one of another."""
    rng, places = np.random.default_rng(28), np.arange(n)
    return rng.standard_normal((H, n, d)), rng.standard_normal((H_kv, n, d)), places, places, d**-0.5, None


def segment(n: int, H: int, H_kv: int, parameters: CrystalCacheParameters) -> tuple[Any, ...]:
    """What CC-COATTENTION is given: a prompt of n tokens."""
    q, k, places, _, scaling, softcap = attended(n, H, H_kv)
    return q, k, places, parameters, scaling, softcap


def one_sided(n: int, k: int, start: int = 0) -> CoAttention:
    """A record in which each token has its next k as neighbours, and no source."""
    near = (np.arange(n)[:, None] + np.arange(1, k + 1)) % n + start
    return CoAttention(start, np.ones(n), near, np.full((n, k), 0.5), near[:, :0], np.empty((n, 0)))


def given_by(pairs: list[tuple[int, int, float]]) -> Edges:
    """Edges as columns."""
    first, second, weight = zip(*pairs, strict=True)
    return Edges(np.array(first), np.array(second), np.array(weight))


def whole_line(n: int, every: int) -> Array:
    """Sentence ends at each `every`-th of n tokens."""
    ends: Array = np.arange(1, n + 1) % every == 0
    return ends


def equal_trunks(m: int, size: int) -> Array:
    """Offsets of m trunks of one size."""
    return size * np.arange(m + 1)


def star(m: int, weight: float = 0.5) -> TrunkWeights:
    """Trunk 0 joined to each of the other m - 1, and these to no other."""
    indptr = np.concatenate([[0], m - 1 + np.arange(m)])
    indices = np.concatenate([np.arange(1, m), np.zeros(m - 1, dtype=np.int64)])
    return TrunkWeights(indptr, indices, np.full(2 * (m - 1), weight))


def live_trunks(m: int, size: int = 1) -> LiveTrunks:
    """A table of m trunks of one size, without gaps."""
    n = m * size
    norms = np.linspace(0.1, 1.0, n)
    return LiveTrunks(np.arange(n), equal_trunks(m, size), 1 + random_rows(n), norms, 1 + random_rows(m))


def live_state(m: int, size: int = 1, step: int = 0, tail: int = 0) -> DecodeState:
    """A state of m trunks in a star, every id seen once, with room for half of the tokens."""
    live, seen = live_trunks(m, size), m * size
    return DecodeState(
        Budget(count=seen // 2), seen + tail, step, live, random_rows(m), star(m), np.arange(seen),
        np.ones(seen, dtype=np.int64), 0.5, 0.5, tuple(range(tail)), (1.0,) * tail,
    )


def tied_eviction(m: int, size: int, B: int) -> tuple[Any, ...]:
    """What CC-DISSOLVE is given: m trunks of one size, none protected, all scores and all members equal."""
    return (
        np.full(m, 0.5), equal_trunks(m, size), np.ones(m * size), np.full(m, 0.5), np.zeros(m, dtype=np.bool_), B, 3,
    )


def scored(values: Array) -> Scores:
    """Scores of single tokens, a row per group."""
    return Scores(values, np.arange(values.shape[1] + 1), heads=len(values))


def view(n: int, H: int = 2, H_kv: int = 2) -> LayerView:
    """A layer that shows all its queries."""
    q, k, _, _, scaling, softcap = attended(n, H, H_kv)
    return LayerView(q, k, None, scaling, softcap)
