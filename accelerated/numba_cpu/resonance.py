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

    `queue` holds the reached trunks hop by hop. `reached` says in which search and at which hop a trunk was reached
    last, as one rising number: below `first` it was in an earlier search.
    """
    m = len(D)
    after = D.copy()
    pulse, reached = np.zeros(m), np.full(m, -1, dtype=np.int64)
    queue = np.empty(m, dtype=np.int64)
    hops = min(max_hops, m)
    for source in range(m):
        if not active[source]:
            continue
        first = source * (hops + 1)
        queue[0], pulse[source], reached[source] = source, 1.0, first
        head, end = 0, 1
        for hop in range(first + 1, first + hops + 1):
            level = end
            while head < level:
                g = queue[head]
                head += 1
                strength = pulse[g]
                for e in range(indptr[g], indptr[g + 1]):
                    h = indices[e]
                    if first <= reached[h] < hop:
                        continue
                    sent = strength * weights[e] * gamma_hop
                    if sent < tau_pulse:
                        continue
                    if reached[h] < first:
                        queue[end], reached[h], pulse[h] = h, hop, sent
                        end += 1
                    elif sent > pulse[h]:
                        pulse[h] = sent
        for at in range(end):
            g = queue[at]
            after[g] = min(1.0, after[g] + alpha_res * pulse[g] * (1.0 - after[g]))
    return after
