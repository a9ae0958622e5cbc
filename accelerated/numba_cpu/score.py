"""Stage S5: the two-path score of a trunk (Section 3.6)."""

import math

import numpy as np

from accelerated.numba_cpu.compiled import compiled
from spec.arrays import BoolVector, Vector

__all__ = ["score"]


@compiled()
def score(D: Vector, M_bar: Vector, protected: BoolVector, alpha: float, epsilon: float) -> Vector:
    """Return the larger of D and (alpha times the min-max normalised log impact), or NaN for a protected trunk.

    Implements: CC-NORMALISED-IMPACT, CC-SCORE
    """
    m = len(D)
    low, high = np.inf, -np.inf
    path = np.empty(m)
    for g in range(m):
        path[g] = math.log1p(M_bar[g])
        if not protected[g]:
            low, high = min(low, path[g]), max(high, path[g])
    for g in range(m):
        path[g] = np.nan if protected[g] else max(D[g], alpha * ((path[g] - low) / (high - low + epsilon)))
    return path
