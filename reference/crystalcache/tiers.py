"""The essay's Stage 1: the rank of a trunk decides whether it is kept fully, in part, or not at all.

The boundaries between these tiers shift to fit the budget. Rank 0 is the trunk with the highest score; Eq. 32 evicts in
the reverse order.
"""

import numpy as np

from reference.crystalcache.dissolution import allocate_step, carried_out
from spec.arrays import Bool, BoolVector, Float64, Int64, IntVector, Vector
from spec.records import Dissolution

__all__ = ["dissolve_in_tiers", "least_shift", "tier_allocate", "tier_bounds", "tier_counts"]


def tier_bounds(m: int, t: int) -> tuple[int, int]:
    """Return the tier boundaries (a, b) of m trunks at shift t: ranks below a are kept, ranks from b are evicted."""
    a = min(max(3 * m // 10 + t, 0), m)
    return a, min(max(7 * m // 10 + t, a), m)


def tier_counts(sizes: Int64[IntVector, " m"], t: int, N_min: int) -> Int64[IntVector, " m"]:
    """Return the number of tokens that each trunk keeps at shift t. Trunks are sorted by score, descending.

    Implements: CC-TIER-COUNT

    Source: the essay, section 5. The j-th of the w middle trunks keeps the share 0.8 - 0.3 j / (w - 1) of its tokens.
    Halves are rounded up, in integer arithmetic.
    """
    a, b = tier_bounds(len(sizes), t)
    j = np.arange(b - a)
    steps = 10 * max(1, b - a - 1)
    tenths = 8 * max(1, b - a - 1) - 3 * j
    rounded = (2 * sizes[a:b] * tenths + steps) // (2 * steps)
    middle = np.minimum(sizes[a:b], np.maximum(N_min, rounded))
    return np.concatenate([sizes[:a], middle, np.zeros(len(sizes) - b, dtype=np.int64)])


def least_shift(sizes: Int64[IntVector, " m"], B_avail: int, N_min: int) -> int:
    """Return the smallest shift t at which the trunks keep at least B_avail tokens. At t = m they keep all tokens."""
    shifts = range(-len(sizes), len(sizes) + 1)
    return next(t for t in shifts if tier_counts(sizes, t, N_min).sum() >= B_avail)


def tier_allocate(sizes: Int64[IntVector, " alive"], c_0: int, N_min: int) -> Float64[Vector, " alive"]:
    """Return the kept ratio r of each trunk. Trunks are sorted by score, ascending, as in `allocate`.

    Implements: CC-TIERS

    Source: the essay, section 5. If the tiers keep more than the budget, the loop of Eq. 32 cuts the rest. In this loop
    the size of a trunk is the number of tokens that its tier keeps. Precondition: c_0 is at most the sum of the sizes.
    """
    B_avail = int(sizes.sum()) - c_0
    best_first = sizes[::-1]
    kept = tier_counts(best_first, least_shift(best_first, B_avail, N_min), N_min)[::-1]
    c = int(kept.sum()) - B_avail
    r = np.zeros(len(sizes))
    for g, size in enumerate(sizes.tolist()):
        left, c = allocate_step(int(kept[g]), c, N_min)
        r[g] = left / size
    return r


def dissolve_in_tiers(
    score: Float64[Vector, " m"], offsets: Int64[IntVector, " m_and_one"], M: Float64[Vector, " n"],
    D: Float64[Vector, " m"], protected: Bool[BoolVector, " m"], B: int, N_min: int,
) -> Dissolution:
    """Run Algorithm 1 with the essay's tiers as Stage 1.

    Implements: CC-TIERS

    Source: the essay, section 5.
    """
    return carried_out(tier_allocate, score, offsets, M, D, protected, B, N_min)
