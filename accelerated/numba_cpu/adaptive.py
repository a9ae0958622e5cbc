"""Adaptive merge threshold of stage S2: the median strength between neighbouring sentences (the paper's F4)."""

from dataclasses import replace

import numpy as np

from accelerated.numba_cpu.compiled import compiled
from accelerated.numba_cpu.trunks import interface_sum
from spec.arrays import BoolVector, IntMatrix, Matrix
from spec.parameters import CrystalCacheParameters
from spec.records import CoAttention

__all__ = ["adapted"]


def adapted(
    coattention: CoAttention, ends: BoolVector, parameters: CrystalCacheParameters,
) -> CrystalCacheParameters:
    """Return a copy of the parameters in which tau_merge is the adaptive threshold of this segment.

    Implements: CC-ADAPTIVE-MERGE
    """
    if parameters.merge == "fixed":
        return parameters
    return replace(parameters, tau_merge=float(median_strength(
        ends, coattention.intra - coattention.start, coattention.intra_weight,
        coattention.cross - coattention.start, coattention.cross_weight, float(parameters.tau_merge),
    )))


@compiled()
def median_strength(
    ends: BoolVector, intra: IntMatrix, intra_weight: Matrix, cross: IntMatrix, cross_weight: Matrix,
    tau_merge: float,
) -> float:
    """Return the lower median of the strengths between neighbouring sentences, or tau_merge for one sentence."""
    n = len(ends)
    strengths = np.empty(n)
    number = 0
    start = stop = 0
    for i in range(n):
        if not (ends[i] or i == n - 1):
            continue
        if stop > start:
            strengths[number] = strength(start, stop, i + 1, intra, intra_weight, cross, cross_weight)
            number += 1
            start = stop
        stop = i + 1
    if number == 0:
        return tau_merge
    return np.sort(strengths[:number])[(number - 1) // 2]  # type: ignore[no-any-return]


@compiled()
def strength(
    start: int, stop: int, next_stop: int, intra: IntMatrix, intra_weight: Matrix, cross: IntMatrix,
    cross_weight: Matrix,
) -> float:
    """Return the mean weight of an interface, or the next float if CC-MERGE would merge at the mean by rounding."""
    total, k = interface_sum(start, stop, next_stop, intra, intra_weight, cross, cross_weight)
    if k == 0:
        return 0.0
    mean = total / k
    return mean if total - mean * k <= 0 else float(np.nextafter(mean, np.inf))
