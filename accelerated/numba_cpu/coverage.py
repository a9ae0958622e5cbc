"""Coverage backfill: evenly spaced tokens of evicted trunks (the paper's F3)."""

from fractions import Fraction

import numpy as np

from accelerated.numba_cpu.compiled import compiled
from spec.arrays import BoolVector, IntVector, Vector

__all__ = ["backfill", "coverage_reserve"]


def coverage_reserve(offsets: IntVector, protected: BoolVector, B: int, coverage: float) -> int:
    """Return the number of tokens of the budget that are reserved for the coverage backfill."""
    n = int(offsets[-1] - offsets[0])
    if not coverage or n <= B:
        return 0
    return int(Fraction(str(coverage)) * max(0, B - int(np.diff(offsets)[protected].sum())))


@compiled()
def backfill(
    kept: IntVector, ratio: Vector, offsets: IntVector, D: Vector, reserve: int,
) -> tuple[IntVector, Vector, Vector]:
    """Return kept positions, and the kept ratio r and D of each trunk, after the backfill of `reserve` tokens.

    Implements: CC-COVERAGE
    """
    evicted = 0
    for g in range(len(ratio)):
        if ratio[g] == 0:
            evicted += offsets[g + 1] - offsets[g]
    k = min(reserve, evicted)
    added = np.empty(k, dtype=np.int64)
    r = ratio.copy()
    i = before = 0
    for g in range(len(ratio)):
        if ratio[g] > 0:
            continue
        size = offsets[g + 1] - offsets[g]
        taken = 0
        while i < k and (2 * i + 1) * evicted // (2 * k) < before + size:
            added[i] = offsets[g] + (2 * i + 1) * evicted // (2 * k) - before
            taken += 1
            i += 1
        r[g] = taken / size
        before += size
    return np.sort(np.concatenate((kept, added))), r, r * D
