"""Coverage backfill: part of the budget keeps evenly spaced tokens of evicted trunks (Section 8, F3)."""

from fractions import Fraction

import numpy as np

from reference.crystalcache.dissolution import dissolved_D
from spec.arrays import Bool, BoolVector, Float64, Int64, IntVector, Vector
from spec.records import Dissolution

__all__ = ["backfill", "coverage_reserve", "evenly_spaced"]


def coverage_reserve(
    sizes: Int64[IntVector, " m"], protected: Bool[BoolVector, " m"], B: int, coverage: float,
) -> int:
    """Return the number of tokens reserved for the backfill: floor(coverage * (B - protected tokens)).

    Source: Section 8, F3. The floor is computed in exact arithmetic. The reserve is 0 if at most B tokens exist, or if
    the protected trunks have at least B tokens.
    """
    if int(sizes.sum()) <= B:
        return 0
    B_avail = max(0, B - int(sizes[protected].sum()))
    return int(Fraction(str(coverage)) * B_avail)


def evenly_spaced(candidates: Int64[IntVector, " e"], k: int) -> Int64[IntVector, " k"]:
    """Split the candidates into k equal parts and return the middle candidate of each part.

    If there are at most k candidates, return all candidates.
    """
    e = len(candidates)
    if e <= k:
        return candidates
    return candidates[(2 * np.arange(k) + 1) * e // (2 * k)]


def backfill(
    dissolution: Dissolution, offsets: Int64[IntVector, " m_and_one"], D: Float64[Vector, " m"], reserve: int,
) -> Dissolution:
    """Return `dissolution` with `reserve` more kept tokens, which are evenly spaced tokens of fully evicted trunks.

    Implements: CC-COVERAGE

    Source: Section 8, F3. If a trunk regains tokens, the r and the D of the trunk are computed again from its kept
    tokens.
    """
    sizes = np.diff(offsets)
    evicted = offsets[0] + np.flatnonzero(np.repeat(dissolution.ratio == 0, sizes))
    added = evenly_spaced(evicted, reserve)
    counts = np.diff(np.searchsorted(added, offsets))
    ratio = np.where(dissolution.ratio == 0, counts / sizes, dissolution.ratio)
    return Dissolution(np.sort(np.concatenate([dissolution.kept, added])), ratio, dissolved_D(D, ratio))
