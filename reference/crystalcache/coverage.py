"""Coverage backfill: a share of the budget goes to evenly spaced tokens of evicted trunks (the paper's F3)."""

from fractions import Fraction

import numpy as np

from reference.crystalcache.dissolution import dissolved_D
from spec.arrays import Bool, BoolVector, Float64, Int64, IntVector, Vector
from spec.records import Dissolution

__all__ = ["backfill", "coverage_reserve", "evenly_spaced"]


def coverage_reserve(
    sizes: Int64[IntVector, " m"], protected: Bool[BoolVector, " m"], B: int, coverage: float,
) -> int:
    """Tokens that dissolution leaves to the backfill: the exact share of what B leaves to unprotected trunks, floored.

    Source: the paper's F3. 0 where everything fits, and where protected trunks take all of B.
    """
    if int(sizes.sum()) <= B:
        return 0
    B_avail = max(0, B - int(sizes[protected].sum()))
    return int(Fraction(str(coverage)) * B_avail)


def evenly_spaced(candidates: Int64[IntVector, " e"], k: int) -> Int64[IntVector, " k"]:
    """The candidate in the middle of each of k equal parts of the list; all where there are no more than k."""
    e = len(candidates)
    if e <= k:
        return candidates
    return candidates[(2 * np.arange(k) + 1) * e // (2 * k)]


def backfill(
    found: Dissolution, offsets: Int64[IntVector, " m_and_one"], D: Float64[Vector, " m"], reserve: int,
) -> Dissolution:
    """The dissolution, and `reserve` evenly spaced tokens of the trunks that it evicted whole.

    Implements: CC-COVERAGE

    Source: the paper's F3. Such a trunk lives on with these tokens; r and D say how much of it.
    """
    sizes = np.diff(offsets)
    evicted = offsets[0] + np.flatnonzero(np.repeat(found.ratio == 0, sizes))
    added = evenly_spaced(evicted, reserve)
    counts = np.diff(np.searchsorted(added, offsets))
    ratio = np.where(found.ratio == 0, counts / sizes, found.ratio)
    return Dissolution(np.sort(np.concatenate([found.kept, added])), ratio, dissolved_D(D, ratio))
