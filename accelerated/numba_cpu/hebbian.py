"""Hebbian update: edges between two active trunks gain weight, and all other edges decay (Section 3.8(c))."""

import numpy as np

from accelerated.numba_cpu.compiled import compiled
from spec.arrays import BoolVector, IntVector, Vector

__all__ = ["hebbian"]


@compiled()
def hebbian(
    indptr: IntVector, indices: IntVector, weights: Vector, active: BoolVector, eta_Hebb: float, gamma_decay: float,
    tau_edge: float,
) -> tuple[IntVector, IntVector, Vector]:
    """Return W after the update of all edges and the removal of each edge whose weight is at most tau_edge.

    Implements: CC-HEBB
    """
    m = len(active)
    rows = np.zeros(m + 1, dtype=np.int64)
    columns, after = np.empty_like(indices), np.empty_like(weights)
    result = 0
    for g in range(m):
        for e in range(indptr[g], indptr[g + 1]):
            together = active[g] and active[indices[e]]
            w = min(1.0, weights[e] + eta_Hebb) if together else gamma_decay * weights[e]
            if w > tau_edge:
                columns[result], after[result] = indices[e], w
                result += 1
        rows[g + 1] = result
    return rows, columns[:result].copy(), after[:result].copy()
