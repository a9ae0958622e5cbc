"""Direct renewal of D in a breath, the decode-time eviction (the essay, section 6)."""

import numpy as np

from spec.arrays import Bool, BoolVector, Float64, Vector

__all__ = ["renewed_D"]


def renewed_D(
    D: Float64[Vector, " m"], active: Bool[BoolVector, " m"], renewal: float,
) -> Float64[Vector, " m"]:
    """Return D after direct renewal, which adds `renewal` * (1 - D) to D of each active trunk.

    Implements: CC-RENEWAL

    Source: the essay, section 6, breath cycle, step 2. Direct renewal is applied before resonance. With renewal = 0, as
    in the paper, D is unchanged bit for bit.
    """
    return np.where(active, D + renewal * (1.0 - D), D)
