"""S6 by size: budgets, dissolution and compaction of long prompts."""

from dataclasses import replace

import numpy as np

from conformance.assurance.saboteurs.registry import Array, beyond
from conformance.assurance.saboteurs.size_inputs import equal_trunks, random_rows, tied_eviction
from reference.crystalcache.compaction import compact
from reference.crystalcache.coverage import evenly_spaced
from reference.crystalcache.dissolution import (
    Allocation,
    allocate,
    carried_out,
    dissolve,
    dissolved_D,
    keep_count,
    strongest_members,
)
from reference.crystalcache.protection import cut, effective_budget, protected_trunks
from reference.crystalcache.tiers import least_shift, tier_counts
from spec.budget import Budget
from spec.records import Dissolution

__all__: list[str] = []


@beyond("16 tokens of a trunk", strongest_members, "CC-DISSOLVE", lambda: (np.arange(20.0), 4))
def members_among_the_first_16(M: Array, k: int) -> Array:
    """A partial trunk's strongest members are sought among its first 16, and then taken as they come."""
    if len(M) <= 16:
        return strongest_members(M, k)
    best = np.argsort(-M[:16], kind="stable")
    chosen: Array = np.sort(np.concatenate([best, np.arange(16, len(M))])[:k])
    return chosen


@beyond("16 tokens of a trunk", strongest_members, "CC-DISSOLVE", lambda: (np.ones(20), 4))
def late_members_first_above_16(M: Array, k: int) -> Array:
    """Above 16 members the sort is not stable: of equal ones the later stays."""
    if len(M) <= 16:
        return strongest_members(M, k)
    chosen: Array = np.sort(len(M) - 1 - np.argsort(-M[::-1], kind="stable")[:k])
    return chosen


def with_three_equal(m: int) -> tuple[object, ...]:
    return allocate, *tied_eviction(m, 3, 3 * m - 3)


@beyond("16 trunks", carried_out, "CC-DISSOLVE", lambda: with_three_equal(20))
def late_trunks_first_above_16(
    allocation: Allocation, score: Array, offsets: Array, M: Array, D: Array, protected: Array, B: int, N_min: int,
) -> Dissolution:
    """Above 16 trunks the sort is not stable: of equal scores the later trunk goes first."""
    if np.count_nonzero(~protected) > 16:
        order = np.lexsort((-np.arange(len(score)), score))
        score = np.where(protected, np.nan, np.argsort(order).astype(np.float64))
    return carried_out(allocation, score, offsets, M, D, protected, B, N_min)


@beyond("16 trunks", dissolve, "CC-DISSOLVE", lambda: (
    np.arange(20.0), equal_trunks(20, 9), random_rows(180), np.ones(20), np.zeros(20, dtype=np.bool_), 5 + 9 * 2, 3,
))
def a_partial_trunk_beyond_16_goes(
    score: Array, offsets: Array, M: Array, D: Array, protected: Array, B: int, N_min: int,
) -> Dissolution:
    """A trunk that is cut in part is looked for among the first 16 in the order; beyond, it goes whole."""
    found = dissolve(score, offsets, M, D, protected, B, N_min)
    order = np.argsort(np.where(protected, np.inf, score), kind="stable")
    late = np.isin(np.arange(len(score)), order[16:]) & (found.ratio < 1) & ~protected
    if not late.any():
        return found
    trunk = np.searchsorted(offsets, found.kept, side="right") - 1
    ratio = np.where(late, 0.0, found.ratio)
    return Dissolution(found.kept[~late[trunk]], ratio, dissolved_D(D, ratio))


@beyond("40 kept tokens", dissolve, "CC-DISSOLVE", lambda: tied_eviction(30, 3, 60))
def forty_kept_tokens(
    score: Array, offsets: Array, M: Array, D: Array, protected: Array, B: int, N_min: int,
) -> Dissolution:
    """The list of kept positions has 40 places."""
    found = dissolve(score, offsets, M, D, protected, B, N_min)
    return replace(found, kept=found.kept[:40])


@beyond("65 535 tokens", dissolve, "CC-DISSOLVE", lambda: tied_eviction(10, 7000, 69_000))
def kept_positions_in_16_bits(
    score: Array, offsets: Array, M: Array, D: Array, protected: Array, B: int, N_min: int,
) -> Dissolution:
    """Kept positions are held in 16 bits, from the first trunk on."""
    found = dissolve(score, offsets, M, D, protected, B, N_min)
    return replace(found, kept=np.unique((found.kept - offsets[0]) % 2**16 + offsets[0]))


@beyond("40 kept tokens", compact, "CC-COMPACT", lambda: (
    random_rows(1, 99, 2), random_rows(1, 99, 2), np.arange(9, 99),
))
def slots_beyond_40_gathered_early(K: Array, V: Array, R: Array) -> tuple[Array, Array]:
    """Keys and values beyond the 40th slot are those one position before."""
    return compact(K, V, np.concatenate([R[:40], np.maximum(0, R[40:] - 1)]))


@beyond("4 096 kept tokens", compact, "CC-COMPACT", lambda: (
    random_rows(1, 4200, 1), random_rows(1, 4200, 1), np.arange(4200),
))
def values_beyond_4096_are_not_moved(K: Array, V: Array, R: Array) -> tuple[Array, Array]:
    """Values are gathered in one block of 4 096 slots; later ones are zeros."""
    keys, values = compact(K, V, R)
    if len(R) > 4096:
        values = values.copy()
        values[:, 4096:] = 0.0
    return keys, values


@beyond("budgets of 2^24", effective_budget, "CC-BUDGET", lambda: (Budget(count=2**24 + 1), 2**25, 4, 128))
def budget_in_single_precision(budget: Budget, n: int, N_sink: int, W_recent: int) -> int:
    """B is held as float32."""
    return int(np.float32(effective_budget(budget, n, N_sink, W_recent)))


@beyond("2^24 tokens", cut, "CC-CUT", lambda: (np.array([2**24, 2**10 + 1]), np.zeros(2, dtype=np.bool_), 7))
def cut_in_single_precision(sizes: Array, protected: Array, B: int) -> int:
    """Sizes are added as float32."""
    B_prot = float(sizes[protected].sum())
    T_alive = np.float32(sizes[~protected].sum())
    return int(min(max(np.float32(0), T_alive - np.float32(B - B_prot)), T_alive))


@beyond("64 trunks", protected_trunks, "CC-PROTECTED", lambda: (equal_trunks(100, 1), 100, 4, 90))
def a_window_of_64_trunks(offsets: Array, n: int, N_sink: int, W_recent: int) -> Array:
    """Trunks of the recent window are looked for among the last 64."""
    protected, m = protected_trunks(offsets, n, N_sink, W_recent), len(offsets) - 1
    return protected & ((np.arange(m) >= m - 64) | (offsets[:-1] < N_sink))


@beyond("64 trunks", allocate, "CC-ALLOCATE", lambda: (np.full(80, 3), 220, 3))
def allocation_of_64_trunks(sizes: Array, c_0: int, N_min: int) -> Array:
    """The pass over trunks ends after 64: later ones stay whole."""
    r = allocate(sizes, c_0, N_min)
    r[64:] = 1.0
    return r


@beyond("trunks of 1 024 tokens", keep_count, "CC-KEEP-COUNT", lambda: (3000 / 4001, 4001, 3))
def ratio_in_half_precision(r: float, size: int, N_min: int) -> int:
    """Above 1 024 tokens r is held as float16."""
    return keep_count(float(np.float16(r)) if size > 1024 else r, size, N_min)


@beyond("128 trunks", dissolved_D, "CC-DISSOLVE-D", lambda: (np.ones(140), np.full(140, 0.5)))
def D_of_128_trunks(D: Array, r: Array) -> Array:
    """D of the trunks beyond the 128th is left as it was, unless they go."""
    late = (np.arange(len(D)) >= 128) & (r > 0)
    return np.where(late, D, dissolved_D(D, r))


@beyond("64 trunks", least_shift, "CC-TIERS", lambda: (np.full(200, 30), 5900, 3))
def shifts_up_to_64(sizes: Array, B_avail: int, N_min: int) -> int:
    """The boundaries of the tiers move by at most 64 ranks."""
    shifts = range(-min(64, len(sizes)), min(64, len(sizes)))
    return next((t for t in shifts if tier_counts(sizes, t, N_min).sum() >= B_avail), min(64, len(sizes)))


@beyond("64 trunks", tier_counts, "CC-TIER-COUNT", lambda: (np.full(200, 30), 0, 3))
def a_middle_tier_of_64(sizes: Array, t: int, N_min: int) -> Array:
    """The middle tier has steps for 64 ranks; below, trunks keep what the last of these keeps."""
    kept = tier_counts(sizes, t, N_min)
    middle = np.flatnonzero((kept > 0) & (kept < sizes))
    kept[middle[64:]] = np.minimum(sizes[middle[64:]], np.maximum(N_min, (7 * sizes[middle[64:]] + 5) // 10))
    return kept


@beyond("32 768 evicted tokens", evenly_spaced, "CC-COVERAGE", lambda: (np.arange(50_000), 25_000))
def spacing_in_32_bits(candidates: Array, k: int) -> Array:
    """The product of a part's number and the candidates' is held in 32 bits."""
    e = len(candidates)
    if e <= k:
        return candidates
    at = ((2 * np.arange(k) + 1) * e).astype(np.int32).astype(np.int64) // (2 * k)
    return np.sort(candidates[at % e])
