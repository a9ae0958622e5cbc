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

    `queue` holds the reached trunks hop by hop; a trunk is visited in a search if `visit` names its source.
    """
    m = len(D)
    after = D.copy()
    pulse, visit, hops = np.zeros(m), np.full(m, -1, dtype=np.int64), np.zeros(m, dtype=np.int64)
    queue = np.empty(m, dtype=np.int64)
    for source in range(m):
        if not active[source]:
            continue
        queue[0], pulse[source], visit[source], hops[source] = source, 1.0, source, 0
        head, end = 0, 1
        while head < end:
            g = queue[head]
            head += 1
            # What is reached first is final here: the whole hop before it has been read.
            after[g] = min(1.0, after[g] + alpha_res * pulse[g] * (1.0 - after[g]))
            if hops[g] == max_hops:
                continue
            for e in range(indptr[g], indptr[g + 1]):
                h = indices[e]
                sent = pulse[g] * weights[e] * gamma_hop
                if sent < tau_pulse:
                    continue
                if visit[h] != source:
                    queue[end], pulse[h], visit[h], hops[h] = h, sent, source, hops[g] + 1
                    end += 1
                elif hops[h] == hops[g] + 1:
                    pulse[h] = max(pulse[h], sent)
    return after
