"""Resonance: pulses from active trunks raise D along the trunk graph (Section 3.8(b))."""

import numpy as np
from numba import njit

from accelerated.numba_cpu.compiled import compiled
from spec.arrays import BoolVector, IntVector, Vector

__all__ = ["resonance"]


@compiled()
def resonance(
    D: Vector, indptr: IntVector, indices: IntVector, weights: Vector, active: BoolVector, max_hops: int,
    gamma_hop: float, tau_pulse: float, alpha_res: float,
) -> Vector:
    """Return D of each trunk after all active trunks, in ascending order, have sent a pulse.

    Implements: CC-PULSE, CC-RAISE, CC-RESONANCE

    `queue` contains the reached trunks hop by hop. `search` contains the last search that reached each trunk, so a
    search raises D of a trunk only once. `best` collects the strongest pulse that reaches each trunk, so the loop over
    the edges of a hop has no branch. Trunk numbers are unsigned, so Numba omits the check for negative indices.
    """
    m = len(D)
    after = D.copy()
    columns = indices.astype(np.uint32)
    pulse, best, search = np.zeros(m), np.full(m, -1.0), np.full(m, -1, dtype=np.int64)
    hops = min(max_hops, m)
    queue, touched = np.empty(m, dtype=np.uint32), np.empty(m + 1, dtype=np.uint32)
    for source in range(m):
        if not active[source]:
            continue
        queue[0], pulse[source], search[source] = source, 1.0, source
        after[source] = raised(after[source], 1.0, alpha_res)
        head, end = 0, 1
        for hop in range(hops):
            level, number = end, np.uint64(0)
            for at in range(head, level):
                g = queue[at]
                held = pulse[g]
                for e in range(np.uint64(indptr[g]), np.uint64(indptr[g + 1])):
                    h, sent = columns[e], held * weights[e] * gamma_hop
                    strongest = best[h]
                    touched[number] = h
                    number += np.uint64(strongest < 0.0)
                    best[h] = sent if sent > strongest else strongest
            head = level
            for h in touched[:number]:
                arrives = search[h] != source and best[h] >= tau_pulse
                after[h] = raised(after[h], best[h] if arrives else 0.0, alpha_res)
                if arrives and hop + 1 < hops:
                    queue[end], pulse[h], search[h] = h, best[h], source
                    end += 1
                best[h] = -1.0
    return after


@njit(inline="always")
def raised(D: float, pulse: float, alpha_res: float) -> float:
    """Return D of one trunk after one pulse."""
    after = D + alpha_res * pulse * (1.0 - D)
    return after if after < 1.0 else 1.0
