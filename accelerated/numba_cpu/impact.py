"""S3: how distinctly each token entered the cache (Section 3.4)."""

import numpy as np
from numba import njit

from spec.arrays import IntVector, Vector
from spec.parameters import CrystalCacheParameters

__all__ = ["impact", "impact_of_counts", "trunk_impact"]


def impact(salience: Vector, token_ids: IntVector, parameters: CrystalCacheParameters) -> Vector:
    """M_i (n,): counts, rarity and mixture in one pass.

    Implements: CC-COUNT, CC-RARITY, CC-IMPACT
    """
    if parameters.impact == "uniform":
        return np.ones_like(salience)
    if parameters.impact == "salience":
        return salience.copy()
    low = int(token_ids.min())
    span = int(token_ids.max()) - low + 1
    # Ids of a real vocabulary are dense enough to count in place; hashed ids are not.
    dense = token_ids - low if span <= 64 * len(token_ids) else np.unique(token_ids, return_inverse=True)[1]
    counts = np.bincount(dense)
    U = 1.0 / (1.0 + np.log1p(counts.astype(np.float64)))
    M: Vector = mixture(salience, U, dense, float(parameters.M_min), float(parameters.M_max))
    return M


def impact_of_counts(salience: Vector, counts: IntVector, parameters: CrystalCacheParameters) -> Vector:
    """M_i (n,) of tokens whose ids were seen `counts` (n,) times.

    Implements: CC-RARITY, CC-IMPACT
    """
    if parameters.impact == "uniform":
        return np.ones_like(salience)
    if parameters.impact == "salience":
        return salience.copy()
    U = 1.0 / (1.0 + np.log1p(counts.astype(np.float64)))
    each = np.arange(len(counts))
    M: Vector = mixture(salience, U, each, float(parameters.M_min), float(parameters.M_max))
    return M


@njit(cache=True)
def mixture(S: Vector, U: Vector, token: IntVector, M_min: float, M_max: float) -> Vector:
    """Eq. 22 from the rarity of each distinct id."""
    M = np.empty(len(S))
    for i in range(len(S)):
        M[i] = min(max(M_max * (0.5 * (S[i] / M_max) + 0.5 * U[token[i]]), M_min), M_max)
    return M


@njit(cache=True)
def trunk_impact(M: Vector, offsets: IntVector) -> Vector:
    """Mean of each trunk's three largest M_i, summed from the largest down; `offsets` index M.

    Implements: CC-TRUNK-IMPACT
    """
    M_bar = np.empty(len(offsets) - 1)
    for g in range(len(M_bar)):
        first = second = third = -np.inf
        for i in range(offsets[g], offsets[g + 1]):
            if M[i] > first:
                first, second, third = M[i], first, second
            elif M[i] > second:
                second, third = M[i], second
            elif M[i] > third:
                third = M[i]
        size = offsets[g + 1] - offsets[g]
        total = first
        if size > 1:
            total += second
        if size > 2:
            total += third
        M_bar[g] = total / min(size, 3)
    return M_bar
