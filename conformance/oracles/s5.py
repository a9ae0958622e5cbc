"""S5 by brute force: the score (Section 3.6)."""

import math
from collections.abc import Sequence

from spec.parameters import CrystalCacheParameters


def normalised_impact(M_bar: Sequence[float], alive: Sequence[int], epsilon: float) -> dict[int, float]:
    """Return the normalised impact of the unprotected trunks (Eq. 28)."""
    ell = {g: math.log1p(M_bar[g]) for g in alive}
    if not ell:
        return {}
    low, high = min(ell.values()), max(ell.values())
    return {g: (ell[g] - low) / (high - low + epsilon) for g in alive}


def score(
    D: Sequence[float], M_bar: Sequence[float], alive: Sequence[int], p: CrystalCacheParameters,
) -> dict[int, float]:
    """Return the score of each unprotected trunk (Eq. 29)."""
    M_tilde = normalised_impact(M_bar, alive, p.epsilon)
    return {g: max(D[g], p.alpha * M_tilde[g]) for g in alive}
