"""S6: branch dissolution, the eviction of tokens trunk by trunk (Section 3.7, Algorithm 1)."""

from collections.abc import Callable

import numpy as np

from reference.crystalcache.protection import cut
from spec.arrays import Bool, BoolVector, Float64, Int64, IntVector, Vector
from spec.records import Dissolution

__all__ = ["allocate", "allocate_step", "carried_out", "dissolve", "dissolved_D", "keep_count", "strongest_members"]

Allocation = Callable[[Int64[IntVector, " alive"], int, int], Float64[Vector, " alive"]]


def allocate_step(size: int, c: int, N_min: int) -> tuple[int, int]:
    """Apply Eq. 32 to one trunk.

    Return the number of tokens that the trunk keeps, and the number c of tokens that must still be evicted.

    Source: Eq. 32. The four branches of the function are in the order of the paper.
    """
    if c <= 0:
        return size, c
    if size <= c:
        return 0, c - size
    if size - c >= N_min:
        return size - c, 0
    return 0, c - size


def allocate(sizes: Int64[IntVector, " alive"], c_0: int, N_min: int) -> Float64[Vector, " alive"]:
    """Return r per trunk: the fraction of the trunk's tokens that is kept. Trunks must be sorted by ascending score.

    Implements: CC-ALLOCATE

    Source: Eq. 32, Stage 1. Precondition: c_0, the number of tokens to evict, is at most the sum of the sizes.
    """
    r = np.ones(len(sizes))
    c = c_0
    for g, size in enumerate(sizes.tolist()):
        kept, c = allocate_step(size, c, N_min)
        r[g] = kept / size
        if c <= 0:
            break
    return r


def keep_count(r: float, size: int, N_min: int) -> int:
    """Return k_g, the number of kept tokens of a partly evicted trunk.

    Implements: CC-KEEP-COUNT

    Source: Eq. 33. As in the paper, r * size is rounded to the nearest integer, with halves rounded to even. For r of
    `allocate`, a quotient k / size with k >= N_min, the result is k: rounding removes only the error of the division.
    For any other r, N_min and the rounding can decide.
    """
    return min(size, max(N_min, round(r * size)))


def strongest_members(M: Float64[Vector, " size"], k: int) -> Int64[IntVector, " k"]:
    """Return the indices of the k largest M_i, ascending. Of two equal M_i, the lower index is chosen first.

    Source: Section 3.7, Stage 2.
    """
    return np.sort(np.argsort(-M, kind="stable")[:k])


def dissolved_D(D: Float64[Vector, " m"], r: Float64[Vector, " m"]) -> Float64[Vector, " m"]:
    """Return D after the eviction: D times the kept ratio r.

    Implements: CC-DISSOLVE-D

    Source: Eq. 34. The product r D covers all three cases of Eq. 34, because r is exactly 0 for a fully evicted trunk
    and 1 for a fully kept trunk.
    """
    return r * D


def dissolve(
    score: Float64[Vector, " m"], offsets: Int64[IntVector, " m_and_one"], M: Float64[Vector, " n"],
    D: Float64[Vector, " m"], protected: Bool[BoolVector, " m"], B: int, N_min: int,
) -> Dissolution:
    """Evict trunks in ascending order of score until at most B tokens are kept. Protected trunks are always kept.

    Implements: CC-DISSOLVE

    Source: Algorithm 1. The scores of protected trunks are ignored. Of two trunks with equal scores, the earlier trunk
    is evicted first.

    Args:
        score: score of each trunk (S5).
        offsets: position of the first token of each trunk, and the position after the last trunk. In a later segment,
            offsets[0] is the number of tokens before the segment.
        M: impact of each token (S3). M[0] belongs to the token at position offsets[0].
        D: D of each trunk (S4).
        protected: True for each trunk that is always kept.
        B: budget in tokens, including the tokens of protected trunks.
        N_min: smallest number of tokens that a partly evicted trunk keeps.
    """
    return carried_out(allocate, score, offsets, M, D, protected, B, N_min)


def carried_out(
    allocation: Allocation, score: Float64[Vector, " m"], offsets: Int64[IntVector, " m_and_one"],
    M: Float64[Vector, " n"], D: Float64[Vector, " m"], protected: Bool[BoolVector, " m"], B: int, N_min: int,
) -> Dissolution:
    """Evict trunks by Algorithm 1 with the function `allocation` as Stage 1. The arguments are those of `dissolve`.

    Stage 1 of the paper is `allocate`. The essay has a different Stage 1, `tier_allocate`.
    """
    sizes = np.diff(offsets)
    alive = np.flatnonzero(~protected)
    order = alive[np.argsort(score[alive], kind="stable")]
    r = np.ones(len(sizes))
    r[order] = allocation(sizes[order], cut(sizes, protected, B), N_min)
    kept = []
    for g in np.flatnonzero(r > 0):
        start, size = int(offsets[g]), int(sizes[g])
        k_g = size if r[g] == 1 else keep_count(float(r[g]), size, N_min)
        kept.append(start + strongest_members(M[start - offsets[0] :][:size], k_g))
    return Dissolution(np.concatenate([np.empty(0, dtype=np.int64), *kept]), r, dissolved_D(D, r))
