# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""S3: impact M_i of each token, from salience and rarity (Section 3.4)."""

import numpy as np
import torch
import triton
import triton.language as tl

from accelerated.triton_gpu.device import download, upload
from accelerated.triton_gpu.launch import FLOAT64, LANES
from spec.arrays import IntVector, Vector
from spec.parameters import CrystalCacheParameters

__all__ = ["impact", "trunk_impact"]


@triton.jit
def token_counts(TOKEN, COUNT, n, LANES: tl.constexpr):
    """Write COUNT[t]: the number of occurrences of token t. The atomic sums are integers, so the order is irrelevant.

    Implements: CC-COUNT
    """
    i = tl.program_id(0) * LANES + tl.arange(0, LANES)
    token = tl.load(TOKEN + i, mask=i < n, other=0)
    tl.atomic_add(COUNT + token, 1, mask=i < n)


@triton.jit
def mixture(S, TOKEN, COUNT, BOUNDS, M, n, LANES: tl.constexpr):
    """Write M_i from salience and rarity. BOUNDS contains M_min and M_max.

    Implements: CC-RARITY, CC-IMPACT
    """
    i = tl.program_id(0) * LANES + tl.arange(0, LANES)
    live = i < n
    count = tl.load(COUNT + tl.load(TOKEN + i, mask=live, other=0), mask=live, other=1)
    M_min, M_max = tl.load(BOUNDS), tl.load(BOUNDS + 1)
    U = 1.0 / (1.0 + tl.log((count + 1).to(tl.float64)))
    mixed = M_max * (0.5 * (tl.load(S + i, mask=live, other=0.0) / M_max) + 0.5 * U)
    tl.store(M + i, tl.minimum(tl.maximum(mixed, M_min), M_max), mask=live)


@triton.jit
def three_largest(M, OFFSETS, M_BAR, m, LANES: tl.constexpr):
    """Write the mean of each trunk's three largest M_i, added in descending order.

    Implements: CC-TRUNK-IMPACT
    """
    g = tl.program_id(0) * LANES + tl.arange(0, LANES)
    start = tl.load(OFFSETS + g, mask=g < m, other=0)
    size = tl.load(OFFSETS + g + 1, mask=g < m, other=0) - start
    first = tl.full([LANES], float("-inf"), tl.float64)
    second, third = first, first
    for member in range(tl.max(size, 0)):
        x = tl.load(M + start + member, mask=member < size, other=float("-inf"))
        third = tl.maximum(third, tl.minimum(second, x))
        second = tl.maximum(second, tl.minimum(first, x))
        first = tl.maximum(first, x)
    total = tl.where(size > 1, first + tl.where(size > 1, second, 0.0), first)
    total = tl.where(size > 2, total + tl.where(size > 2, third, 0.0), total)
    tl.store(M_BAR + g, total / tl.maximum(tl.minimum(size, 3), 1).to(tl.float64), mask=g < m)


def impact(salience: Vector, token_ids: IntVector, parameters: CrystalCacheParameters) -> Vector:
    """Return M_i (n,) from salience and token ids."""
    if parameters.impact == "uniform":
        return np.ones_like(salience)
    if parameters.impact == "salience":
        return salience.copy()
    n = len(salience)
    names, token = torch.unique(upload(token_ids, np.int64), return_inverse=True)
    count = torch.zeros(len(names), dtype=torch.int64, device=token.device)
    M = torch.empty(n, dtype=torch.float64, device=token.device)
    grid = (triton.cdiv(n, LANES),)
    token_counts[grid](token, count, n, LANES=LANES)
    bounds = upload(np.array([parameters.M_min, parameters.M_max]), np.float64)
    mixture[grid](upload(salience, np.float64), token, count, bounds, M, n, LANES=LANES, **FLOAT64)
    found: Vector = download(M, np.float64)
    return found


def trunk_impact(M: Vector, offsets: IntVector) -> Vector:
    """Return Mbar (m,). `offsets` index M."""
    m = len(offsets) - 1
    where = upload(offsets, np.int64)
    M_bar = torch.empty(m, dtype=torch.float64, device=where.device)
    three_largest[triton.cdiv(m, LANES),](upload(M, np.float64), where, M_bar, m, LANES=LANES, **FLOAT64)
    found: Vector = download(M_bar, np.float64)
    return found
