"""Direct renewal of D at a breath (the essay, section 6)."""

import numpy as np

from spec.arrays import Bool, BoolVector, Float64, Vector

__all__ = ["renewed_D"]


def renewed_D(
    D: Float64[Vector, " m"], active: Bool[BoolVector, " m"], renewal: float,
) -> Float64[Vector, " m"]:
    """D after direct renewal: an active trunk regains its share of what it lacks; before resonance.

    Implements: CC-RENEWAL

    Source: the essay, section 6, breath cycle, step 2. With renewal 0, the paper, D is returned to the bit.
    """
    return np.where(active, D + renewal * (1.0 - D), D)
