"""Decay of D at every decode step (Section 3.8)."""

import math

import numpy as np

from accelerated.numba_cpu.compiled import compiled
from spec.arrays import Vector

__all__ = ["decay"]


@compiled()
def decay(D: Vector, trunk_impact: Vector, beta_0: float, D_c: float) -> Vector:
    """Return D of each trunk after one decode step.

    Implements: CC-DECAY
    """
    after = np.empty_like(D)
    for g in range(len(D)):
        rho = beta_0 * math.exp(-(D[g] * trunk_impact[g] / D_c))
        after[g] = D[g] - rho * D[g]  # never below 0, because rho <= beta_0 <= 1
    return after
