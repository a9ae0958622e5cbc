"""Stage 1 of the essay: trunks are divided by score into three tiers (kept, partly kept, evicted).

The boundaries between the tiers are shifted until the kept tokens fill the budget. The trunk with the highest score has
rank 0. In contrast, Eq. 32 begins with the trunk with the lowest score.
"""

import numpy as np

from reference.crystalcache.dissolution import allocate_step, carried_out
from spec.arrays import Bool, BoolVector, Float64, Int64, IntVector, Vector
from spec.records import Dissolution

__all__ = ["dissolve_in_tiers", "least_shift", "tier_allocate", "tier_bounds", "tier_counts"]


def tier_bounds(m: int, t: int) -> tuple[int, int]:
    """Return the tier boundaries (a, b) of m trunks at shift t. Ranks below a are kept, ranks from b on are evicted."""
    a = min(max(3 * m // 10 + t, 0), m)
    return a, min(max(7 * m // 10 + t, a), m)


def tier_counts(sizes: Int64[IntVector, " m"], t: int, N_min: int) -> Int64[IntVector, " m"]:
    """Return the number of tokens that each trunk keeps at shift t. The trunks must be sorted by descending score.

    Implements: CC-TIER-COUNT

    Source: the essay, section 5. Trunk j of the w trunks in the middle tier keeps the fraction 0.8 - 0.3 j / (w - 1) of
    its tokens. Token counts are rounded in integer arithmetic, with halves rounded up.
    """
    a, b = tier_bounds(len(sizes), t)
    j = np.arange(b - a)
    steps = 10 * max(1, b - a - 1)
    tenths = 8 * max(1, b - a - 1) - 3 * j
    rounded = (2 * sizes[a:b] * tenths + steps) // (2 * steps)
    middle = np.minimum(sizes[a:b], np.maximum(N_min, rounded))
    return np.concatenate([sizes[:a], middle, np.zeros(len(sizes) - b, dtype=np.int64)])


def least_shift(sizes: Int64[IntVector, " m"], B_avail: int, N_min: int) -> int:
    """Return the smallest shift t at which the trunks keep at least B_avail tokens. At t = m all tokens are kept."""
    shifts = range(-len(sizes), len(sizes) + 1)
    return next(t for t in shifts if tier_counts(sizes, t, N_min).sum() >= B_avail)


def tier_allocate(sizes: Int64[IntVector, " alive"], c_0: int, N_min: int) -> Float64[Vector, " alive"]:
    """Return r per trunk: the fraction of the trunk's tokens that is kept. Trunks must be sorted by ascending score.

    Implements: CC-TIERS

    Source: the essay, section 5. If the tiers keep more tokens than the budget allows, the loop of Eq. 32 evicts the
    excess. In the loop of Eq. 32, the size of a trunk is the number of tokens that the trunk's tier keeps.
    Precondition: c_0, the number of tokens to evict, is at most the sum of the sizes.
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
    """Evict trunks by Algorithm 1 with the essay's tiers as Stage 1.

    Implements: CC-TIERS

    Source: the essay, section 5.
    """
    return carried_out(tier_allocate, score, offsets, M, D, protected, B, N_min)
