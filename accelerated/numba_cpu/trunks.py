"""Stage S2: trunks, the contiguous units of eviction (Section 3.3)."""

import numpy as np

from accelerated.numba_cpu.compiled import compiled
from spec.arrays import BoolVector, IntMatrix, IntVector, Matrix
from spec.parameters import CrystalCacheParameters
from spec.records import CoAttention

__all__ = ["interface_sum", "trunk_offsets"]

WINDOW = 5  # Eq. 16 fixes it


def trunk_offsets(coattention: CoAttention, ends: BoolVector, parameters: CrystalCacheParameters) -> IntVector:
    """Return the offsets of the segment's trunks, as absolute positions.

    Implements: CC-SENTENCES, CC-INTERFACE, CC-INTERFACE-EDGES, CC-MERGE, CC-SPLIT, CC-TRUNKS
    """
    local: IntVector = build(
        ends, coattention.intra - coattention.start, coattention.intra_weight,
        coattention.cross - coattention.start, coattention.cross_weight,
        float(parameters.tau_merge), parameters.T_max,
    )
    return local + coattention.start


@compiled()
def build(
    ends: BoolVector, intra: IntMatrix, intra_weight: Matrix, cross: IntMatrix, cross_weight: Matrix,
    tau_merge: float, T_max: int,
) -> IntVector:
    """Merge neighbouring sentences and split long trunks in one pass, and return the trunk offsets."""
    n = len(ends)
    offsets = np.empty(n + 1, dtype=np.int64)
    offsets[0] = 0
    m = 0
    start = stop = 0
    sentence = 0
    for i in range(n):
        if not (ends[i] or i == n - 1):
            continue
        joined = stop > start and i + 1 - start <= T_max and strong(
            start, stop, i + 1, intra, intra_weight, cross, cross_weight, tau_merge
        )
        if stop > start and not joined:
            m = split(offsets, m, start, stop, T_max)
            start = sentence
        stop = sentence = i + 1
    m = split(offsets, m, start, stop, T_max)
    return offsets[: m + 1].copy()


@compiled()
def interface_sum(
    start: int, stop: int, next_stop: int, intra: IntMatrix, intra_weight: Matrix, cross: IntMatrix,
    cross_weight: Matrix,
) -> tuple[float, int]:
    """Return sum and number of the edge weights across `stop`. Weights are added by first, then second endpoint."""
    total = 0.0
    k = 0
    for a in range(max(start, stop - WINDOW), stop):
        for b in range(stop, min(next_stop, stop + WINDOW)):
            for rank in range(intra.shape[1]):
                if intra[a, rank] == b:
                    total += intra_weight[a, rank]
                    k += 1
            for rank in range(cross.shape[1]):
                if cross[b, rank] == a:
                    total += cross_weight[b, rank]
                    k += 1
    return total, k


@compiled()
def strong(
    start: int, stop: int, next_stop: int, intra: IntMatrix, intra_weight: Matrix, cross: IntMatrix,
    cross_weight: Matrix, tau_merge: float,
) -> bool:
    """Return True if sum(w) - tau k > 0 for the weights w of the k edges of an interface."""
    total, k = interface_sum(start, stop, next_stop, intra, intra_weight, cross, cross_weight)
    joined: bool = total - tau_merge * k > 0
    return joined


@compiled()
def split(offsets: IntVector, m: int, start: int, stop: int, T_max: int) -> int:
    """Append the pieces of one merged trunk, the larger pieces first, and return the new number of trunks."""
    size = stop - start
    pieces = (size + T_max - 1) // T_max
    small, larger = size // pieces, size % pieces
    for piece in range(pieces):
        start += small + (1 if piece < larger else 0)
        m += 1
        offsets[m] = start
    return m
