# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""S6: branch dissolution (Section 3.7, Algorithm 1)."""

import numpy as np
import torch
import triton
import triton.language as tl

from accelerated.triton_gpu.compaction import positions_of
from accelerated.triton_gpu.device import download, upload
from accelerated.triton_gpu.launch import FLOAT64, LANES, SCAN
from spec.arrays import BoolVector, IntVector, Vector

__all__ = ["dissolve", "kept_tokens"]


@triton.jit
def kept_tokens(size, before, c_0, N_min):
    """Return the number of tokens that a trunk keeps, by Eq. 32 and 33 in closed form.

    `before` is the number of tokens of the trunks with lower scores. In the loop of Eq. 32 the remaining cut is
    c_0 - before while positive, because only the last step overshoots.
    """
    rest = before + size - c_0
    partial = tl.where(rest >= tl.maximum(N_min, 1), rest, 0)
    return tl.where(before >= c_0, size, partial)


@triton.jit
def allocate(SIZE, ORDER, KEPT, alive, B_avail, N_min, SCAN: tl.constexpr):
    """Write KEPT[g] of the trunks in ORDER (ascending scores), from a prefix sum of the sizes. One program.

    Implements: CC-CUT, CC-ALLOCATE, CC-KEEP-COUNT
    """
    T_alive = tl.zeros([1], tl.int64)
    for start in range(0, alive, SCAN):
        rank = start + tl.arange(0, SCAN)
        g = tl.load(ORDER + rank, mask=rank < alive, other=0)
        T_alive += tl.sum(tl.load(SIZE + g, mask=rank < alive, other=0), 0)
    c_0 = tl.minimum(tl.maximum(T_alive - B_avail, 0), T_alive)
    before = tl.zeros([1], tl.int64)
    for start in range(0, alive, SCAN):
        rank = start + tl.arange(0, SCAN)
        g = tl.load(ORDER + rank, mask=rank < alive, other=0)
        size = tl.load(SIZE + g, mask=rank < alive, other=0)
        below = before + tl.cumsum(size, 0) - size
        tl.store(KEPT + g, kept_tokens(size, below, c_0, N_min), mask=rank < alive)
        before += tl.sum(size, 0)


@triton.jit
def keep_members(TRUNK, OFFSETS, KEPT, M, KEEP, n, LANES: tl.constexpr):
    """Write KEEP[i]: 1 if the trunk keeps token i. The largest M_i are kept; of equal M_i, the earlier token.

    Implements: CC-DISSOLVE

    A token's rank in its trunk is a count; only the partial trunk, of which there is at most one, needs it.
    """
    i = tl.program_id(0) * LANES + tl.arange(0, LANES)
    g = tl.load(TRUNK + i, mask=i < n, other=0)
    first = tl.load(OFFSETS + g)
    size = tl.load(OFFSETS + g + 1) - first
    k = tl.load(KEPT + g)
    mine = tl.load(M + i, mask=i < n, other=0.0)
    ahead = tl.zeros([LANES], tl.int64)
    for member in range(tl.max(tl.where((k > 0) & (k < size), size, 0), 0)):
        other = tl.load(M + first + member, mask=member < size, other=float("-inf"))
        ahead += ((other > mine) | ((other == mine) & (first + member < i))).to(tl.int64)
    tl.store(KEEP + i, ((k == size) | (ahead < k)).to(tl.int32), mask=i < n)


@triton.jit
def weaken(D, KEPT, SIZE, RATIO, D_AFTER, m, LANES: tl.constexpr):
    """Write the kept ratio r, and D after the eviction, which is D times r.

    Implements: CC-DISSOLVE-D
    """
    g = tl.program_id(0) * LANES + tl.arange(0, LANES)
    size = tl.load(SIZE + g, mask=g < m, other=1)
    r = tl.load(KEPT + g, mask=g < m, other=1).to(tl.float64) / size.to(tl.float64)
    tl.store(RATIO + g, r, mask=g < m)
    tl.store(D_AFTER + g, r * tl.load(D + g, mask=g < m, other=0.0), mask=g < m)


def dissolve(
    score: Vector, offsets: IntVector, M: Vector, D: Vector, protected: BoolVector, B: int, N_min: int,
) -> tuple[IntVector, Vector, Vector]:
    """Return kept positions, r and D after the eviction."""
    m, first = len(offsets) - 1, int(offsets[0])
    sizes = np.diff(offsets)
    size = upload(sizes, np.int64)
    kept = size.clone()
    alive = upload(np.flatnonzero(~protected), np.int64)
    if len(alive):
        order = alive[torch.sort(upload(score[~protected], np.float64), stable=True).indices]
        B_avail = B - int(sizes[protected].sum())
        allocate[(1,)](size, order, kept, len(order), B_avail, N_min, SCAN=SCAN)
    keep = torch.empty(len(M), dtype=torch.int32, device=size.device)
    trunk = torch.repeat_interleave(torch.arange(m, device=size.device), size)
    keep_members[triton.cdiv(len(M), LANES),](
        trunk, upload(offsets - first, np.int64), kept, upload(M, np.float64), keep, len(M), LANES=LANES
    )
    ratio, D_after = (torch.empty(m, dtype=torch.float64, device=size.device) for _ in range(2))
    D_before = upload(D, np.float64)
    weaken[triton.cdiv(m, LANES),](D_before, kept, size, ratio, D_after, m, LANES=LANES, **FLOAT64)
    return first + positions_of(keep), download(ratio, np.float64), download(D_after, np.float64)
