"""S6 by brute force: Algorithm 1, and the closed form of its loop as a second opinion (Section 3.7)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from conformance.oracles.s2 import Trunk

__all__ = ["Eviction", "allocate", "closed_form", "dissolve", "effective_budget", "keep_count", "protected"]


@dataclass(frozen=True)
class Eviction:
    """What Algorithm 1 leaves: R ascending, r and D of every trunk, and the cut that no trunk could give."""

    kept: list[int]
    ratio: list[Fraction]
    D: list[float]
    c: int


def effective_budget(share: Fraction | int, n: int, N_sink: int, W_recent: int) -> int:
    """Eq. 30; the ceiling by exact integers."""
    tokens = share if isinstance(share, int) else -((-share.numerator * n) // share.denominator)
    return max(N_sink + W_recent, tokens)


def protected(trunks: Sequence[Trunk], n: int, N_sink: int, W_recent: int) -> list[bool]:
    """Whether a member position lies in the sink or in the recent window."""
    return [any(i < N_sink or i >= n - W_recent for i in g) for g in trunks]


def allocate(sizes: Sequence[int], c_0: int, N_min: int) -> tuple[list[Fraction], int]:
    """Eq. 32 in sorted order: r of each trunk, and the c that is left."""
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
    """Tokens kept per trunk from the exclusive prefix sum alone: no state runs through the loop."""
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
    """Eq. 33; `round` of a Fraction is exact and half to even."""
    return min(size, max(N_min, round(r * size)))


def dissolve(
    trunks: Sequence[Trunk], score: Mapping[int, float], M: Sequence[float], D: Sequence[float],
    is_protected: Sequence[bool], B: int, N_min: int,
) -> Eviction:
    """Algorithm 1, line by line, from given scores."""
    alive = [g for g in range(len(trunks)) if not is_protected[g]]
    B_prot = sum(len(trunks[g]) for g in range(len(trunks)) if is_protected[g])
    T_alive = sum(len(trunks[g]) for g in alive)
    c_0 = max(0, T_alive - (B - B_prot))
    order = sorted(alive, key=lambda g: (score[g], g))
    in_order, c = allocate([len(trunks[g]) for g in order], c_0, N_min)
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
