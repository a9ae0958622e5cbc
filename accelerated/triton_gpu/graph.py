# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""S4: the trunk graph (Section 3.5). torch sorts the edges. Each sum is computed by one lane, from left to right."""

import numpy as np
import torch
import triton
import triton.language as tl

from accelerated.triton_gpu.device import download, upload
from accelerated.triton_gpu.launch import FLOAT64, LANES
from spec.arrays import IntVector, Vector
from spec.records import CoAttention

__all__ = ["trunk_graph"]

Tensor = torch.Tensor


@triton.jit
def pair_keys(INDEX, TRUNK, KEY, slots, k, m, LANES: tl.constexpr):
    """Write KEY: low * m + high for the two trunks that an edge joins, or m * m for an entry without an edge.

    Implements: CC-TRUNK-EDGES
    """
    slot = tl.program_id(0) * LANES + tl.arange(0, LANES)
    live = slot < slots
    j = tl.load(INDEX + slot, mask=live, other=-1)
    a = tl.load(TRUNK + slot // k, mask=live, other=0)
    b = tl.load(TRUNK + j, mask=live & (j >= 0), other=0)
    joins = (j >= 0) & (a != b)
    tl.store(KEY + slot, tl.where(joins, tl.minimum(a, b) * m + tl.maximum(a, b), m * m), mask=live)


@triton.jit
def sum_of_runs(VALUE, ORDER, START, TOTAL, runs, LANES: tl.constexpr):
    """Write TOTAL[r]: the sum of the values at ORDER[START[r]] to ORDER[START[r + 1]], added in this order by one lane.

    Implements: CC-DEGREE

    A lane that is done goes on adding 0, which changes no bit.
    """
    r = tl.program_id(0) * LANES + tl.arange(0, LANES)
    start = tl.load(START + r, mask=r < runs, other=0)
    length = tl.load(START + r + 1, mask=r < runs, other=0) - start
    total = tl.zeros([LANES], tl.float64)
    for e in range(tl.max(length, 0)):
        at = tl.load(ORDER + start + e, mask=e < length, other=0)
        total += tl.load(VALUE + at, mask=e < length, other=0.0)
    tl.store(TOTAL + r, total, mask=r < runs)


@triton.jit
def pair_weights(KEY, TOTAL, START, SIZE, TAU, W, SURVIVES, pairs, m, LANES: tl.constexpr):
    """Write W of each pair, the mean weight times the square root of the density, and 1 if W exceeds tau_edge.

    Implements: CC-TRUNK-WEIGHT
    """
    e = tl.program_id(0) * LANES + tl.arange(0, LANES)
    live = e < pairs
    key = tl.load(KEY + e, mask=live, other=0)
    number = tl.load(START + e + 1, mask=live, other=1) - tl.load(START + e, mask=live, other=0)
    area = tl.load(SIZE + key // m, mask=live, other=1) * tl.load(SIZE + key % m, mask=live, other=1)
    number_real = number.to(tl.float64)
    mean = tl.load(TOTAL + e, mask=live, other=0.0) / number_real
    weight = mean * tl.sqrt(number_real / area.to(tl.float64))
    tl.store(W + e, weight, mask=live)
    tl.store(SURVIVES + e, (weight > tl.load(TAU)).to(tl.int32), mask=live)


def trunk_graph(
    coattention: CoAttention, offsets: IntVector, tau_edge: float,
) -> tuple[IntVector, IntVector, Vector, Vector]:
    """Return the symmetric graph in CSR form (indptr, indices, weights), and the degrees."""
    size = upload(np.diff(offsets), np.int64)
    m = len(size)
    key, weight = _edges(coattention, size, m)
    low, high, W = _surviving_pairs(key, weight, size, tau_edge)
    row, column = torch.cat([low, high]), torch.cat([high, low])
    order = torch.argsort(row * m + column)
    indptr = torch.searchsorted(row[order], torch.arange(m + 1, device=row.device))
    weights = torch.cat([W, W])
    degree = _sums(weights, order, indptr)
    return (
        download(indptr, np.int64), download(column[order], np.int64), download(weights[order], np.float64),
        download(degree, np.float64),
    )


def _edges(coattention: CoAttention, size: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """Return the pair and the weight of every list entry, in the order of E. The key of an empty entry is m * m."""
    trunk = torch.repeat_interleave(torch.arange(m, device=size.device), size)
    keys = []
    for neighbours in (coattention.intra, coattention.cross):
        index = upload(np.where(neighbours >= 0, neighbours - coattention.start, -1), np.int64)
        key = torch.empty(index.numel(), dtype=torch.int64, device=size.device)
        if len(key):
            grid = (triton.cdiv(len(key), LANES),)
            pair_keys[grid](index, trunk, key, len(key), index.shape[1], m, LANES=LANES)
        keys.append(key)
    weights = [upload(w, np.float64).flatten() for w in (coattention.intra_weight, coattention.cross_weight)]
    return torch.cat(keys), torch.cat(weights)


def _surviving_pairs(
    key: Tensor, weight: Tensor, size: Tensor, tau_edge: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the pairs a < b whose W exceeds tau_edge, sorted by (a, b), and the W of these pairs."""
    m = len(size)
    ordered, order = torch.sort(key, stable=True)
    pair, number = torch.unique_consecutive(ordered, return_counts=True)
    joins = pair < m * m  # the last run, if any, holds the places that join none
    pair, number = pair[joins], number[joins]
    start = torch.cat([number.new_zeros(1), torch.cumsum(number, 0)])
    total = _sums(weight, order, start)
    W = torch.empty_like(total)
    survives = torch.empty(len(pair), dtype=torch.int32, device=key.device)
    if len(pair):
        pair_weights[triton.cdiv(len(pair), LANES),](
            pair, total, start, size, upload(np.array([tau_edge]), np.float64), W, survives, len(pair), m,
            LANES=LANES, **FLOAT64,
        )
    kept = survives == 1
    return pair[kept] // m, pair[kept] % m, W[kept]


def _sums(value: Tensor, order: Tensor, start: Tensor) -> Tensor:
    runs = len(start) - 1
    total = torch.empty(runs, dtype=torch.float64, device=value.device)
    if runs:
        sum_of_runs[triton.cdiv(runs, LANES),](value, order, start, total, runs, LANES=LANES, **FLOAT64)
    return total
