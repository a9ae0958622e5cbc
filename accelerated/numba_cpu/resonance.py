"""Decode: pulses from active trunks raise D along the trunk graph (Section 3.8(b))."""

import numpy as np
from numba import njit

from spec.arrays import BoolVector, IntVector, Vector

__all__ = ["resonance"]


@njit(cache=True)
def resonance(
    D: Vector, indptr: IntVector, indices: IntVector, weights: Vector, active: BoolVector, max_hops: int,
    gamma_hop: float, tau_pulse: float, alpha_res: float,
) -> Vector:
    """D after every active trunk has sent its pulse, by ascending trunk.

    Implements: CC-PULSE, CC-RAISE, CC-RESONANCE

    `queue` holds the reached trunks hop by hop, `search` the search that reached a trunk last. A hop is read without
    a branch: `best` takes the strongest pulse of every trunk that it touches, and the rest is decided per trunk.
    """
    m = len(D)
    after = D.copy()
    pulse, best, search = np.zeros(m), np.full(m, -1.0), np.full(m, -1, dtype=np.int64)
    queue, touched = np.empty(m, dtype=np.int64), np.empty(m + 1, dtype=np.int64)
    for source in range(m):
        if not active[source]:
            continue
        queue[0], pulse[source], search[source] = source, 1.0, source
        head, end = 0, 1
        for _ in range(min(max_hops, m)):
            level, number = end, 0
            for at in range(head, level):
                g = queue[at]
                for e in range(indptr[g], indptr[g + 1]):
                    h = indices[e]
                    touched[number] = h
                    number += best[h] < 0.0
                    best[h] = max(best[h], pulse[g] * weights[e] * gamma_hop)
            head = level
            for h in touched[:number]:
                if search[h] != source and best[h] >= tau_pulse:
                    queue[end], pulse[h], search[h] = h, best[h], source
                    end += 1
                best[h] = -1.0
        for g in queue[:end]:
            after[g] = min(1.0, after[g] + alpha_res * pulse[g] * (1.0 - after[g]))
    return after
