"""Stage S6: branch dissolution, the eviction of tokens (Section 3.7, Algorithm 1)."""

import numpy as np

from accelerated.numba_cpu.compiled import compiled
from spec.arrays import BoolVector, IntVector, Vector

__all__ = ["dissolve", "kept_tokens"]


@compiled()
def kept_tokens(size: int, before: int, c_0: int, N_min: int) -> int:
    """Return the number of tokens that a trunk keeps, by the closed form of Equations 32 and 33.

    `before` is the number of tokens in all trunks with lower scores. The loop of Equation 32 must still evict c_0 -
    `before` tokens while this difference is positive. Only the last step evicts too many tokens.
    """
    if before >= c_0:
        return size
    rest = before + size - c_0
    if rest >= max(N_min, 1):
        return rest
    return 0


@compiled()
def dissolve(
    score: Vector, offsets: IntVector, M: Vector, D: Vector, protected: BoolVector, B: int, N_min: int,
) -> tuple[IntVector, Vector, Vector]:
    """Return the kept positions, and the kept ratio r and D of each trunk, after the eviction.

    Implements: CC-CUT, CC-ALLOCATE, CC-KEEP-COUNT, CC-DISSOLVE-D, CC-DISSOLVE
    """
    m = len(offsets) - 1
    alive = np.flatnonzero(~protected)
    order = alive[np.argsort(score[alive], kind="mergesort")]
    T_alive = 0
    for g in alive:
        T_alive += offsets[g + 1] - offsets[g]
    B_avail = B - (offsets[m] - offsets[0] - T_alive)
    c_0 = min(max(0, T_alive - B_avail), T_alive)
    r = np.ones(m)
    keep = np.ones(len(M), dtype=np.bool_)
    before = 0
    for g in order:
        size = offsets[g + 1] - offsets[g]
        k = kept_tokens(size, before, c_0, N_min)
        r[g] = k / size
        if k < size:
            first, last = offsets[g] - offsets[0], offsets[g + 1] - offsets[0]
            weakest = np.argsort(-M[first:last], kind="mergesort")[k:]
            keep[first + weakest] = False
        before += size
    return offsets[0] + np.flatnonzero(keep), r, r * D
