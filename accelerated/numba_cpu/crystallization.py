"""Stage S4: the crystallization D of each trunk (Section 3.5)."""

import math

import numpy as np

from accelerated.numba_cpu.compiled import compiled
from spec.arrays import Vector

__all__ = ["crystallization"]


@compiled()
def crystallization(degree: Vector, s: float, epsilon: float) -> Vector:
    """Return D, the logistic function of s times the standardised degree. A sigma below epsilon is set to 1.

    Implements: CC-CRYSTALLIZATION
    """
    m = len(degree)
    mu = 0.0
    for g in range(m):
        mu += degree[g]
    mu /= m
    variance = 0.0
    for g in range(m):
        variance += (degree[g] - mu) * (degree[g] - mu)
    sigma = math.sqrt(variance / m)
    if sigma < epsilon:
        sigma = 1.0
    D = np.empty(m)
    for g in range(m):
        x = s * ((degree[g] - mu) / sigma)
        shrunk = math.exp(-abs(x))
        D[g] = (1.0 if x >= 0 else shrunk) / (1.0 + shrunk)
    return D
