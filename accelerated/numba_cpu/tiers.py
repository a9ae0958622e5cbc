"""The essay's tiers as Stage 1 of S6.

The shift t is found by bisection. A larger t never keeps fewer tokens.
"""

import numpy as np

from accelerated.numba_cpu.compiled import compiled
from spec.arrays import BoolVector, IntVector, Vector

__all__ = ["dissolve_in_tiers", "kept_in_tier", "least_shift"]


@compiled()
def kept_in_tier(size: int, rank: int, m: int, t: int, N_min: int) -> int:
    """Return how many tokens the trunk with rank `rank` keeps at shift t. The highest-scored trunk has rank 0.

    Implements: CC-TIER-COUNT
    """
    a = min(max(3 * m // 10 + t, 0), m)
    b = min(max(7 * m // 10 + t, a), m)
    if rank < a:
        return size
    if rank >= b:
        return 0
    w = max(1, b - a - 1)
    return min(size, max(N_min, (2 * size * (8 * w - 3 * (rank - a)) + 10 * w) // (20 * w)))


@compiled()
def kept_in_all(sizes: IntVector, t: int, N_min: int) -> int:
    """Return how many tokens all trunks together keep at shift t. Trunks are sorted by score, ascending."""
    m = len(sizes)
    total = 0
    for g in range(m):
        total += kept_in_tier(sizes[g], m - 1 - g, m, t, N_min)
    return total


@compiled()
def least_shift(sizes: IntVector, B_avail: int, N_min: int) -> int:
    """Return the smallest shift t in [-m, m] at which the tiers keep at least B_avail tokens."""
    low, high = -len(sizes), len(sizes)
    while low < high:
        t = (low + high) // 2
        if kept_in_all(sizes, t, N_min) >= B_avail:
            high = t
        else:
            low = t + 1
    return low


@compiled()
def dissolve_in_tiers(
    score: Vector, offsets: IntVector, M: Vector, D: Vector, protected: BoolVector, B: int, N_min: int,
) -> tuple[IntVector, Vector, Vector]:
    """Return the kept positions, and the kept ratio r and D of each trunk, after the eviction.

    Implements: CC-TIERS
    """
    m = len(offsets) - 1
    alive = np.flatnonzero(~protected)
    order = alive[np.argsort(score[alive], kind="mergesort")]
    sizes = offsets[order + 1] - offsets[order]
    T_alive = sizes.sum()
    B_avail = min(max(0, B - (offsets[m] - offsets[0] - T_alive)), T_alive)
    t = least_shift(sizes, B_avail, N_min)
    c = kept_in_all(sizes, t, N_min) - B_avail
    r = np.ones(m)
    keep = np.ones(len(M), dtype=np.bool_)
    for at in range(len(order)):
        g = order[at]
        k = kept_in_tier(sizes[at], len(order) - 1 - at, len(order), t, N_min)
        if c > 0:
            rest = k - c if k > c and k - c >= N_min else 0
            c -= k - rest
            k = rest
        r[g] = k / sizes[at]
        first, last = offsets[g] - offsets[0], offsets[g + 1] - offsets[0]
        keep[first + np.argsort(-M[first:last], kind="mergesort")[k:]] = False
    return offsets[0] + np.flatnonzero(keep), r, r * D
