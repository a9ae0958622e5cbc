"""Selection of the best tokens of many sets. The score threshold of a set is found without a sort."""

import numpy as np

from accelerated.numba_cpu.compiled import compiled
from spec.arrays import BoolMatrix, IntVector, Matrix, Vector
from spec.policy import Selection

__all__ = ["best_tokens"]

FEW = 8  # up to this number of evicted tokens, one pass finds the threshold


def best_tokens(values: Matrix, shares: IntVector, pinned: BoolMatrix) -> Selection:
    """Select in each row the pinned tokens, then the tokens with the highest values, up to the share of the row.

    If two values are equal, the lower index is selected first. NaN ranks below every value.

    Implements: PO-TOP-UNITS
    """
    return Selection(*kept_tokens(values, shares, pinned))


@compiled(nogil=True)
def kept_tokens(values: Matrix, shares: IntVector, pinned: BoolMatrix) -> tuple[IntVector, IntVector]:
    """Return the positions of the tokens that each row keeps, and the offsets of the rows."""
    groups, n = values.shape
    positions, offsets = np.empty(groups * n, np.int64), np.zeros(groups + 1, np.int64)
    candidates, at = np.empty(n), 0
    for g in range(groups):
        row, protected, held, scored = values[g], pinned[g], 0, 0
        for j in range(n):
            if protected[j]:
                held += 1
            elif not np.isnan(row[j]):
                candidates[scored] = row[j]
                scored += 1
        free = max(0, shares[g] - held)
        least, ties = threshold(candidates[:scored], min(free, scored))
        unscored = max(0, free - scored)
        for j in range(n):
            if protected[j] or row[j] > least:
                keep = True
            elif row[j] == least:
                keep = ties > 0
                ties -= 1
            else:
                keep = np.isnan(row[j]) and unscored > 0
                unscored -= np.isnan(row[j])
            if keep:
                positions[at] = j
                at += 1
        offsets[g + 1] = at
    return positions[:at].copy(), offsets


@compiled(nogil=True)
def lowest(candidates: Vector, k: int) -> float:
    """Return the k-th lowest candidate."""
    result = np.full(k, np.inf)
    for x in candidates:
        if x < result[k - 1]:
            place = k - 1
            while place > 0 and result[place - 1] > x:
                result[place] = result[place - 1]
                place -= 1
            result[place] = x
    least: float = result[k - 1]
    return least


@compiled(nogil=True)
def threshold(candidates: Vector, free: int) -> tuple[float, int]:
    """Return the smallest of the `free` highest candidates, and the number of highest candidates with this value."""
    if free == 0:
        return np.inf, 0
    worse = len(candidates) - free
    least = lowest(candidates, worse + 1) if worse < FEW else np.partition(candidates, worse)[worse]
    above = 0
    for x in candidates:
        if x > least:
            above += 1
    return least, free - above
