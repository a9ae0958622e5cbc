"""Partitions into trunks, co-attention records with given edges, and degrees."""

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from conformance.strategies.parameters import small_parameters
from conformance.strategies.sizes import DEGREES, NEAR, TEXT_TOKENS
from conformance.strategies.text import end_masks
from spec.arrays import BoolVector, IntVector, Vector
from spec.parameters import TINY, CrystalCacheParameters
from spec.records import CoAttention, Trunks

__all__ = ["Text", "coattentions", "degrees", "dyadic_impacts", "partitions", "record", "texts"]


@dataclass(frozen=True)
class Text:
    """What S2 and S4 are given."""

    coattention: CoAttention
    impact: Vector
    ends: BoolVector
    parameters: CrystalCacheParameters


def record(
    salience: list[float], intra: list[list[tuple[int, float]]], cross: list[list[tuple[int, float]]],
    k_intra: int, k_cross: int, start: int = 0,
) -> CoAttention:
    """Neighbour lists as the padded arrays of a CoAttention."""
    def padded(rows: list[list[tuple[int, float]]], k: int) -> tuple[IntVector, Vector]:
        index, weight = np.full((len(rows), k), -1, dtype=np.int64), np.zeros((len(rows), k))
        for i, row in enumerate(rows):
            for rank, (j, w) in enumerate(row):
                index[i, rank], weight[i, rank] = j, w
        return index, weight  # type: ignore[return-value]

    index, weight = padded(intra, k_intra)
    late, late_weight = padded(cross, k_cross)
    return CoAttention(start, np.array(salience), index, weight, late, late_weight)  # type: ignore[arg-type]


@st.composite
def coattentions(draw: st.DrawFn, n: int, p: CrystalCacheParameters, start: int = 0) -> CoAttention:
    """Neighbours anywhere the specification allows them, weights in sixteenths above the thresholds."""
    def neighbours(allowed: list[int], k: int, tau: float, label: str) -> list[tuple[int, float]]:
        if not allowed or not k:
            return []
        chosen = draw(st.lists(st.sampled_from(allowed), unique=True, max_size=k), label=label)
        low = int(tau * 16) + 1
        weights = [draw(st.integers(low, 16), label="sixteenths") / 16 for _ in chosen]
        return sorted(zip(chosen, weights, strict=True), key=lambda edge: (-edge[1], edge[0]))

    intra, cross = [], []
    for i in range(n):
        c = i // p.C * p.C
        near = [start + j for j in range(c, min(c + p.C, n)) if j != i and abs(i - j) <= NEAR]
        intra.append(neighbours(near, p.k_intra, p.tau_intra, "intra"))
        cross.append(neighbours([start + j for j in range(max(0, c - NEAR), c)], p.k_cross, p.tau_cross, "cross"))
    return record([1.0] * n, intra, cross, p.k_intra, p.k_cross, start)


def dyadic_impacts(n: int) -> st.SearchStrategy[Vector]:
    """M_i of few values, so that tokens tie."""
    return st.lists(st.integers(1, 9), min_size=n, max_size=n).map(lambda found: np.array(found) / 4)


@st.composite
def texts(draw: st.DrawFn, max_n: int = TEXT_TOKENS) -> Text:
    """Co-attention, impact and sentence ends of one text, from position 0."""
    p = draw(st.one_of(st.just(TINY), small_parameters()), label="parameters")
    n = draw(st.integers(2, max_n), label="n")
    return Text(
        draw(coattentions(n, p), label="coattention"), draw(dyadic_impacts(n), label="impact"),
        draw(end_masks(n), label="ends"), p,
    )


@st.composite
def partitions(draw: st.DrawFn, n: int) -> Trunks:
    """Any trunks of n tokens, with any impact."""
    inner = draw(st.sets(st.integers(1, n - 1)) if n > 1 else st.just(set()), label="boundaries")
    offsets = np.array([0, *sorted(inner), n], dtype=np.int64)
    return Trunks(offsets, draw(dyadic_impacts(len(offsets) - 1), label="trunk impact"))


def degrees() -> st.SearchStrategy[Vector]:
    """Degrees of 1 to 12 trunks in quarters, often equal."""
    quarters = st.one_of(st.integers(0, 3), st.integers(0, 400))
    return st.lists(quarters, min_size=1, max_size=DEGREES).map(lambda found: np.array(found) / 4)
