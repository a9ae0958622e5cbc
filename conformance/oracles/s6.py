"""S6 by brute force: Algorithm 1, and the closed form of its loop as a second oracle (Section 3.7)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from conformance.oracles.s2 import Trunk
from spec.parameters import CrystalCacheParameters


@dataclass(frozen=True)
class Eviction:
    """Result of Algorithm 1: R ascending, r and D of every trunk, and the rest c of the cut."""

    kept: list[int]
    ratio: list[Fraction]
    D: list[float]
    c: int


def tokens(budget: float | int | str, seen: int) -> int:
    """Return the smallest number of tokens that is at least the written share, or a written count (CC-BUDGET-FORMS)."""
    text = repr(budget) if isinstance(budget, float) else str(budget)
    if not isinstance(budget, float) and "." not in text and "%" not in text:
        return int(text)
    share = Fraction(Decimal(text.rstrip("%"))) / (100 if "%" in text else 1)
    return next(kept for kept in range(seen + 1) if Fraction(kept) >= share * seen)


def effective_budget(share: Fraction | int, n: int, N_sink: int, W_recent: int) -> int:
    """Return the budget of Eq. 30. The ceiling is computed with exact integers."""
    tokens = share if isinstance(share, int) else -((-share.numerator * n) // share.denominator)
    return max(N_sink + W_recent, tokens)


def protected(trunks: Sequence[Trunk], n: int, N_sink: int, W_recent: int) -> list[bool]:
    """Return True for each trunk with a member position in the sink or in the recent window."""
    return [any(i < N_sink or i >= n - W_recent for i in g) for g in trunks]


def allocate(sizes: Sequence[int], c_0: int, N_min: int) -> tuple[list[Fraction], int]:
    """Apply Eq. 32 in sorted order, and return r of each trunk and the rest c."""
    r = [Fraction(1)] * len(sizes)
    c = c_0
    for g, size in enumerate(sizes):
        if c <= 0:
            break
        if size <= c:
            r[g], c = Fraction(0), c - size
        elif size - c >= N_min:
            r[g], c = Fraction(size - c, size), 0
        else:
            r[g], c = Fraction(0), c - size
    return r, c


def closed_form(sizes: Sequence[int], c_0: int, N_min: int) -> list[int]:
    """Return the number of kept tokens per trunk from the exclusive prefix sum, without the loop of Eq. 32."""
    kept = []
    for g, size in enumerate(sizes):
        before = sum(sizes[:g])
        remnant = before + size - c_0
        if before >= c_0:
            kept.append(size)
        else:
            kept.append(remnant if remnant >= max(N_min, 1) else 0)
    return kept


def keep_count(r: Fraction, size: int, N_min: int) -> int:
    """Return the number of kept tokens by Eq. 33. `round` of a Fraction is exact, and rounds half to even."""
    return min(size, max(N_min, round(r * size)))


def dissolve(
    trunks: Sequence[Trunk], score: Mapping[int, float], M: Sequence[float], D: Sequence[float],
    is_protected: Sequence[bool], B: int, N_min: int, allocation: str = "cut",
) -> Eviction:
    """Apply Algorithm 1 line by line with given scores. Stage 1 is the paper's, or the essay's tiers."""
    alive = [g for g in range(len(trunks)) if not is_protected[g]]
    B_prot = sum(len(trunks[g]) for g in range(len(trunks)) if is_protected[g])
    T_alive = sum(len(trunks[g]) for g in alive)
    c_0 = max(0, T_alive - (B - B_prot))
    order = sorted(alive, key=lambda g: (score[g], g))
    stage_1 = {"cut": allocate, "tiers": tier_allocate}[allocation]
    in_order, c = stage_1([len(trunks[g]) for g in order], c_0, N_min)
    r = [Fraction(1)] * len(trunks)
    for g, r_g in zip(order, in_order, strict=True):
        r[g] = r_g
    R: set[int] = set()
    for g, members in enumerate(trunks):
        if r[g] == 1:
            R |= set(members)
        elif r[g] > 0:
            k_g = keep_count(r[g], len(members), N_min)
            R |= set(sorted(members, key=lambda i: (-M[i], i))[:k_g])
    return Eviction(sorted(R), r, [float(r_g) * D_g for r_g, D_g in zip(r, D, strict=True)], c)


def tier_counts(sizes: Sequence[int], t: int, N_min: int) -> list[int]:
    """Return the number of kept tokens of each trunk, best first, by the essay's tiers at shift t."""
    m = len(sizes)
    a = min(max(math.floor(Fraction(3, 10) * m) + t, 0), m)
    b = min(max(math.floor(Fraction(7, 10) * m) + t, a), m)
    kept = []
    for rank, size in enumerate(sizes):
        if rank < a:
            kept.append(size)
        elif rank >= b:
            kept.append(0)
        else:
            w, j = b - a, rank - a
            ratio = Fraction(8, 10) - (Fraction(3, 10) * j / (w - 1) if w > 1 else 0)
            kept.append(min(size, max(N_min, math.floor(ratio * size + Fraction(1, 2)))))
    return kept


def tier_allocate(sizes: Sequence[int], c_0: int, N_min: int) -> tuple[list[Fraction], int]:
    """Return r from the lowest score up, and the rest c.

    Every shift is tried from below. The loop removes the rest.
    """
    B_avail = max(0, sum(sizes) - c_0)
    best_first = list(reversed(sizes))
    t = -len(sizes)
    while sum(tier_counts(best_first, t, N_min)) < B_avail:
        t += 1
    kept = list(reversed(tier_counts(best_first, t, N_min)))
    c = sum(kept) - B_avail
    for g, k in enumerate(kept):
        if c <= 0:
            break
        if k <= c:
            kept[g], c = 0, c - k
        elif k - c >= N_min:
            kept[g], c = k - c, 0
        else:
            kept[g], c = 0, c - k
    return [Fraction(k, size) for k, size in zip(kept, sizes, strict=True)], c


def reserve(n: int, B: int, B_prot: int, share: Fraction) -> int:
    """Return the number of tokens of F3: a share of B after the protected trunks, rounded down.

    Without eviction, it is 0.
    """
    return 0 if n <= B else math.floor(share * max(0, B - B_prot))


def backfill(result: Eviction, trunks: Sequence[Trunk], D: Sequence[float], k: int) -> Eviction:
    """Add the tokens of F3.

    The tokens of evicted trunks are split into k runs of nearly equal length. The middle token of each run is kept.
    """
    gone = [i for g, members in enumerate(trunks) if result.ratio[g] == 0 for i in members]
    k = min(k, len(gone))
    middle = [Fraction((2 * i + 1) * len(gone), 2 * k) for i in range(k)]
    added = {gone[math.floor(x)] for x in middle}
    ratio = [
        Fraction(len(added & set(members)), len(members)) if r == 0 else r
        for r, members in zip(result.ratio, trunks, strict=True)
    ]
    D_after = [float(r) * D_g for r, D_g in zip(ratio, D, strict=True)]
    return Eviction(sorted([*result.kept, *added]), ratio, D_after, result.c)


def evict(
    trunks: Sequence[Trunk], score: Mapping[int, float], M: Sequence[float], D: Sequence[float],
    is_protected: Sequence[bool], B: int, p: CrystalCacheParameters,
) -> Eviction:
    """Apply Algorithm 1 in the form that the parameters select, then the backfill."""
    B_prot = sum(len(g) for g, shut in zip(trunks, is_protected, strict=True) if shut)
    k = reserve(sum(map(len, trunks)), B, B_prot, Fraction(repr(float(p.coverage))))
    result = dissolve(trunks, score, M, D, is_protected, B - k, p.N_min, p.allocation)
    return backfill(result, trunks, D, k)
