"""S5: the two-path score of each trunk (Section 3.6)."""

import numpy as np

from spec.arrays import Bool, BoolVector, Float64, Vector

__all__ = ["normalised_impact", "score"]


def normalised_impact(
    M_bar: Float64[Vector, " m"], protected: Bool[BoolVector, " m"], epsilon: float,
) -> Float64[Vector, " m"]:
    """Return log(1 + trunk impact), min-max normalised over the unprotected trunks.

    Implements: CC-NORMALISED-IMPACT

    Source: Eq. 28. If all unprotected trunks have the same impact, the result is 0 for these trunks. The result is NaN
    for protected trunks.
    """
    M_tilde = np.full(len(M_bar), np.nan)
    alive = np.log1p(M_bar[~protected])
    if len(alive):
        low, high = alive.min(), alive.max()
        M_tilde[~protected] = (alive - low) / (high - low + epsilon)
    return M_tilde


def score(D: Float64[Vector, " m"], M_tilde: Float64[Vector, " m"], alpha: float) -> Float64[Vector, " m"]:
    """Return the score of each trunk: the maximum of D and alpha M_tilde. The score of a protected trunk is NaN.

    Implements: CC-SCORE

    Source: Eq. 29.
    """
    best: Vector = np.maximum(D, alpha * M_tilde)
    return best
