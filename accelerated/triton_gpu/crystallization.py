# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""S4: D, the crystallization of a trunk (Section 3.5)."""

import numpy as np
import torch
import triton
import triton.language as tl

from accelerated.triton_gpu.device import download, upload
from accelerated.triton_gpu.launch import FLOAT64, LANES
from spec.arrays import Vector

__all__ = ["crystallization"]


@triton.jit
def moments(DEGREE, EPSILON, MOMENTS, m):
    """Write mu and sigma of the degrees, summed in ascending order of the trunks. A sigma below epsilon becomes 1.

    Implements: CC-CRYSTALLIZATION
    """
    epsilon = tl.load(EPSILON)
    total = epsilon * 0.0
    for g in range(m):
        total += tl.load(DEGREE + g)
    count = tl.cast(m, tl.float64)
    mu = total / count
    square = epsilon * 0.0
    for g in range(m):
        away = tl.load(DEGREE + g) - mu
        square += away * away
    sigma = tl.sqrt(square / count)
    tl.store(MOMENTS, mu)
    tl.store(MOMENTS + 1, tl.where(sigma < epsilon, 1.0, sigma))


@triton.jit
def logistic(DEGREE, MOMENTS, STEEPNESS, D, m, LANES: tl.constexpr):
    """Write D: the logistic function of s times the standardised degree, without overflow.

    Implements: CC-CRYSTALLIZATION
    """
    g = tl.program_id(0) * LANES + tl.arange(0, LANES)
    away = tl.load(DEGREE + g, mask=g < m, other=0.0) - tl.load(MOMENTS)
    x = tl.load(STEEPNESS) * (away / tl.load(MOMENTS + 1))
    shrunk = tl.exp(-tl.abs(x))
    tl.store(D + g, tl.where(x >= 0, 1.0, shrunk) / (1.0 + shrunk), mask=g < m)


def crystallization(degree: Vector, s: float, epsilon: float) -> Vector:
    """Return D (m,) from the degrees (m,)."""
    m = len(degree)
    deg = upload(degree, np.float64)
    found = torch.empty(2, dtype=torch.float64, device=deg.device)
    D = torch.empty_like(deg)
    moments[(1,)](deg, upload(np.array([epsilon]), np.float64), found, m, **FLOAT64)
    steepness = upload(np.array([s]), np.float64)
    logistic[triton.cdiv(m, LANES),](deg, found, steepness, D, m, LANES=LANES, **FLOAT64)
    result: Vector = download(D, np.float64)
    return result
