# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""S5: the two-path score (Section 3.6)."""

import numpy as np
import torch
import triton
import triton.language as tl

from accelerated.triton_gpu.device import download, upload
from accelerated.triton_gpu.launch import FLOAT64, SCAN
from spec.arrays import BoolVector, Vector

__all__ = ["score"]


@triton.jit
def log1p(x):
    """Return ln(1 + x) with an error of at most 4 ulp. The rounding error of 1 + x cancels in the quotient."""
    y = 1.0 + x
    moved = y - 1.0
    return tl.where(moved == 0.0, x, tl.log(y) * (x / tl.where(moved == 0.0, 1.0, moved)))


@triton.jit
def two_paths(D, M_BAR, PROTECTED, NUMBERS, SCORE, m, SCAN: tl.constexpr):
    """Write the larger of D and alpha times the normalised log impact; NaN for protected trunks. One program.

    Implements: CC-NORMALISED-IMPACT, CC-SCORE
    """
    alpha, epsilon = tl.load(NUMBERS), tl.load(NUMBERS + 1)
    low = epsilon * 0.0 + float("inf")
    high = -low
    for start in range(0, m, SCAN):
        g = start + tl.arange(0, SCAN)
        path = log1p(tl.load(M_BAR + g, mask=g < m, other=0.0))
        alive = tl.load(PROTECTED + g, mask=g < m, other=1) == 0
        low = tl.minimum(low, tl.min(tl.where(alive, path, float("inf")), 0))
        high = tl.maximum(high, tl.max(tl.where(alive, path, float("-inf")), 0))
    for start in range(0, m, SCAN):
        g = start + tl.arange(0, SCAN)
        path = log1p(tl.load(M_BAR + g, mask=g < m, other=0.0))
        alive = tl.load(PROTECTED + g, mask=g < m, other=1) == 0
        share = (tl.where(alive, path, low) - low) / (high - low + epsilon)
        best = tl.maximum(tl.load(D + g, mask=g < m, other=0.0), alpha * share)
        tl.store(SCORE + g, tl.where(alive, best, float("nan")), mask=g < m)


def score(D: Vector, M_bar: Vector, protected: BoolVector, alpha: float, epsilon: float) -> Vector:
    """Return the score (m,). NaN if protected."""
    if protected.all():
        return np.full(len(D), np.nan)
    path = upload(D, np.float64)
    best = torch.empty_like(path)
    two_paths[(1,)](
        path, upload(M_bar, np.float64), upload(protected, np.int32),
        upload(np.array([alpha, epsilon]), np.float64), best, len(D), SCAN=SCAN, **FLOAT64,
    )
    found: Vector = download(best, np.float64)
    return found
