"""S6: wrong readings of the allocation, the keep count and Algorithm 1."""

import math
from dataclasses import replace

import numpy as np

from conformance.assurance.saboteurs.registry import Array, instead_of
from reference.crystalcache.dissolution import (
    allocate,
    allocate_step,
    dissolve,
    dissolved_D,
    keep_count,
    strongest_members,
)
from spec.records import Dissolution

__all__: list[str] = []


@instead_of(allocate_step, "CC-ALLOCATE")
def remnant_above_N_min(size: int, c: int, N_min: int) -> tuple[int, int]:
    """A remnant of exactly N_min tokens is evicted."""
    return allocate_step(size, c, max(N_min, 1) + 1)


@instead_of(allocate_step, "CC-ALLOCATE")
def never_too_many(size: int, c: int, N_min: int) -> tuple[int, int]:
    """A trunk whose remnant would be too small stays whole, and the cut ends short."""
    kept, left = allocate_step(size, c, N_min)
    return (size, 0) if left < 0 < c else (kept, left)


@instead_of(allocate_step, "CC-ALLOCATE")
def remnant_raised_to_N_min(size: int, c: int, N_min: int) -> tuple[int, int]:
    """A trunk whose remnant would be too small keeps N_min tokens."""
    kept, left = allocate_step(size, c, N_min)
    return (min(size, N_min), 0) if left < 0 < c else (kept, left)


@instead_of(allocate, "CC-ALLOCATE")
def evicted_share(sizes: Array, c_0: int, N_min: int) -> Array:
    """r of a partial trunk is the share that goes."""
    r = allocate(sizes, c_0, N_min)
    return np.where((r > 0) & (r < 1), 1 - r, r)


@instead_of(keep_count, "CC-KEEP-COUNT")
def half_up(r: float, size: int, N_min: int) -> int:
    """Half is rounded up, as in the author's essay."""
    return min(size, max(N_min, math.floor(r * size + 0.5)))


@instead_of(keep_count, "CC-KEEP-COUNT")
def truncated(r: float, size: int, N_min: int) -> int:
    """The product is cut off, not rounded."""
    return min(size, max(N_min, int(r * size)))


@instead_of(keep_count, "CC-KEEP-COUNT")
def no_lower_bound(r: float, size: int, N_min: int) -> int:
    """N_min is left out."""
    return min(size, round(r * size))


@instead_of(keep_count, "CC-KEEP-COUNT")
def no_upper_bound(r: float, size: int, N_min: int) -> int:
    """A trunk smaller than N_min keeps N_min tokens, as in the author's essay."""
    return max(N_min, round(r * size))


@instead_of(dissolved_D, "CC-DISSOLVE-D")
def partial_trunks_keep_D(D: Array, r: Array) -> Array:
    """D is lost only where the trunk is."""
    return np.where(r > 0, D, 0.0)


@instead_of(dissolved_D, "CC-DISSOLVE-D")
def in_place(D: Array, r: Array) -> Array:
    """D is updated in place, as in Algorithm 1."""
    D.setflags(write=True)
    D *= r
    return D


@instead_of(dissolved_D, "CC-DISSOLVE-D")
def partial_trunks_lose_D(D: Array, r: Array) -> Array:
    """D survives in whole trunks only."""
    return np.where(r == 1, D, 0.0)


def ranked(score: Array, protected: Array, order: Array) -> Array:
    """Scores that are evicted in this order, NaN where protected."""
    rank = np.empty(len(score))
    rank[order] = np.arange(len(score))
    return np.where(protected, np.nan, rank)


@instead_of(dissolve, "CC-DISSOLVE")
def later_trunk_first(
    score: Array, offsets: Array, M: Array, D: Array, protected: Array, B: int, N_min: int,
) -> Dissolution:
    """Of equal scores the later trunk is evicted first."""
    order = np.lexsort((-np.arange(len(score)), score))
    return dissolve(ranked(score, protected, order), offsets, M, D, protected, B, N_min)


@instead_of(dissolve, "CC-DISSOLVE")
def smaller_trunk_first(
    score: Array, offsets: Array, M: Array, D: Array, protected: Array, B: int, N_min: int,
) -> Dissolution:
    """Of equal scores the smaller trunk is evicted first."""
    order = np.lexsort((np.diff(offsets), score))
    return dissolve(ranked(score, protected, order), offsets, M, D, protected, B, N_min)


@instead_of(dissolve, "CC-DISSOLVE")
def protection_by_a_high_score(
    score: Array, offsets: Array, M: Array, D: Array, protected: Array, B: int, N_min: int,
) -> Dissolution:
    """Protection is an infinite score, so that a small budget cuts into it."""
    sentinel = np.where(protected, np.inf, score)
    return dissolve(sentinel, offsets, M, D, np.zeros_like(protected), B, N_min)


@instead_of(dissolve, "CC-DISSOLVE")
def protected_first(
    score: Array, offsets: Array, M: Array, D: Array, protected: Array, B: int, N_min: int,
) -> Dissolution:
    """Kept positions are listed as Algorithm 1 collects them: protected trunks, then the others."""
    found = dissolve(score, offsets, M, D, protected, B, N_min)
    trunk = np.searchsorted(offsets, found.kept, side="right") - 1
    return replace(found, kept=found.kept[np.argsort(~protected[trunk], kind="stable")])


@instead_of(dissolve, "CC-DISSOLVE")
def nothing_when_nothing_goes(
    score: Array, offsets: Array, M: Array, D: Array, protected: Array, B: int, N_min: int,
) -> Dissolution:
    """With no cut nothing is returned, as in lines 3 to 5 of Algorithm 1."""
    found = dissolve(score, offsets, M, D, protected, B, N_min)
    return replace(found, kept=found.kept[:0]) if len(M) <= B else found


@instead_of(strongest_members, "CC-DISSOLVE")
def later_member_first(M: Array, k: int) -> Array:
    """Of equal M_i in a partial trunk the later position is kept."""
    return np.sort(np.lexsort((-np.arange(len(M)), -M))[:k])


@instead_of(strongest_members, "CC-DISSOLVE")
def first_members(M: Array, k: int) -> Array:
    """A partial trunk keeps its first tokens."""
    return np.arange(k)
