# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""S2: trunks, the contiguous units of eviction (Section 3.3).

The strength between the current trunk and the next sentence depends on at most five last tokens of the trunk. So one
kernel computes the decision for each number of last tokens in parallel, and the merge pass reads a table of decisions.
"""

import numpy as np
import torch
import triton
import triton.language as tl

from accelerated.triton_gpu.compaction import places
from accelerated.triton_gpu.device import download, upload
from accelerated.triton_gpu.launch import FLOAT64, LANES
from spec.arrays import BoolVector, IntVector
from spec.parameters import CrystalCacheParameters
from spec.records import CoAttention

__all__ = ["sentence_offsets", "trunk_offsets"]

WINDOW: tl.constexpr = tl.constexpr(5)  # Eq. 16 fixes it
LENGTHS: tl.constexpr = tl.constexpr(8)  # a power of two above WINDOW: one row of the table


@triton.jit
def weigh(INDEX, WEIGHT, owner, other, live, k, K: tl.constexpr):
    """Return the weight of the edge from each owner to `other`, and 1 if the edge exists. At most one entry matches."""
    rank = tl.arange(0, K)[None, :]
    at = owner[:, None] * k + rank
    mine = live[:, None] & (rank < k)
    match = mine & (tl.load(INDEX + at, mask=mine, other=-1) == other[:, None])
    weight = tl.where(match, tl.load(WEIGHT + at, mask=mine, other=0.0), 0.0)
    return tl.sum(weight, 1), tl.max(match.to(tl.int32), 1)


@triton.jit
def interfaces(
    SENTENCES, INTRA, INTRA_WEIGHT, CROSS, CROSS_WEIGHT, TAU, STRONG, boundaries, k_intra, k_cross,
    K_INTRA: tl.constexpr, K_CROSS: tl.constexpr, LANES: tl.constexpr,
):
    """Write STRONG[s, w]: 1 if sentence s + 1 would join a trunk of w tokens that ends where sentence s ends.

    Implements: CC-INTERFACE, CC-INTERFACE-EDGES, CC-MERGE

    An absent edge adds 0 to a sum that begins at 0, which changes no bit. So each sum runs over the same 25 pairs, by
    first endpoint and then by second endpoint.
    """
    s = tl.program_id(0) * LANES + tl.arange(0, LANES)
    live = s < boundaries
    stop = tl.load(SENTENCES + s + 1, mask=live, other=0)
    next_stop = tl.load(SENTENCES + s + 2, mask=live, other=0)
    length = tl.arange(0, LENGTHS)[None, :]
    total = tl.zeros([LANES, LENGTHS], tl.float64)
    number = tl.zeros([LANES, LENGTHS], tl.int32)
    for x in range(WINDOW):
        for y in range(WINDOW):
            a, b = stop - WINDOW + x, stop + y
            real = live & (a >= 0) & (b < next_stop)
            near, has_near = weigh(INTRA, INTRA_WEIGHT, a, b, real, k_intra, K_INTRA)
            far, has_far = weigh(CROSS, CROSS_WEIGHT, b, a, real, k_cross, K_CROSS)
            reached = length >= WINDOW - x
            total += tl.where(reached, (near + far)[:, None], 0.0)
            number += tl.where(reached, (has_near + has_far)[:, None], 0)
    strong = total - tl.load(TAU) * number.to(tl.float64) > 0
    tl.store(STRONG + s[:, None] * LENGTHS + length, strong.to(tl.int32), mask=live[:, None])


@triton.jit
def split(OFFSETS, m, start, stop, T_max):
    """Append the pieces of one merged trunk, larger pieces first, and return the new number of trunks.

    Implements: CC-SPLIT
    """
    size = stop - start
    pieces = (size + T_max - 1) // T_max
    small, larger = size // pieces, size % pieces
    for piece in range(1, pieces + 1):
        tl.store(OFFSETS + m + piece, start + small * piece + tl.minimum(larger, piece))
    return m + pieces


@triton.jit
def merge(SENTENCES, STRONG, OFFSETS, COUNT, sentences, T_max):
    """Merge and split the sentences in one pass from left to right, in one program.

    Implements: CC-TRUNKS
    """
    start = tl.load(SENTENCES)
    stop = tl.load(SENTENCES + 1)
    m = start * 0
    tl.store(OFFSETS, start)
    for s in range(1, sentences):
        next_stop = tl.load(SENTENCES + s + 1)
        strong = tl.load(STRONG + (s - 1) * LENGTHS + tl.minimum(stop - start, WINDOW))
        if (strong == 0) | (next_stop - start > T_max):
            m = split(OFFSETS, m, start, stop, T_max)
            start = stop
        stop = next_stop
    m = split(OFFSETS, m, start, stop, T_max)
    tl.store(COUNT, m)


def sentence_offsets(ends: BoolVector) -> torch.Tensor:
    """Return the sentence offsets on the device: sentence i holds the tokens offsets[i] to offsets[i + 1] - 1.

    Implements: CC-SENTENCES
    """
    starts = np.append(True, ends[:-1])  # the first token, and every token after an end
    first = places(upload(starts, np.int32))
    return torch.cat([first, first.new_tensor([len(ends)])])


def trunk_offsets(
    coattention: CoAttention, ends: BoolVector, parameters: CrystalCacheParameters,
) -> IntVector:
    """Return the trunk offsets of the segment, in absolute positions."""
    start, p = coattention.start, parameters
    sentences = sentence_offsets(ends)
    number = len(sentences) - 1
    device = sentences.device
    strong = torch.empty((number, LENGTHS.value), dtype=torch.int32, device=device)
    if number > 1:
        k_intra, k_cross = coattention.intra.shape[1], coattention.cross.shape[1]
        interfaces[triton.cdiv(number - 1, LANES),](
            sentences,
            upload(coattention.intra - start, np.int64), upload(coattention.intra_weight, np.float64),
            upload(coattention.cross - start, np.int64), upload(coattention.cross_weight, np.float64),
            upload(np.array([p.tau_merge]), np.float64), strong, number - 1, k_intra, k_cross,
            K_INTRA=triton.next_power_of_2(max(1, k_intra)), K_CROSS=triton.next_power_of_2(max(1, k_cross)),
            LANES=LANES, **FLOAT64,
        )
    offsets = torch.empty(len(ends) + 1, dtype=torch.int64, device=device)
    count = torch.empty(1, dtype=torch.int64, device=device)
    merge[(1,)](sentences, strong, offsets, count, number, p.T_max, **FLOAT64)
    local: IntVector = download(offsets[: int(count) + 1], np.int64)
    return local + start
