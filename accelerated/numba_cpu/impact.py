"""Stage S3: impact M_i of each token, from salience and rarity (Section 3.4)."""

import numpy as np

from accelerated.numba_cpu.compiled import compiled
from spec.arrays import IntVector, Vector
from spec.parameters import CrystalCacheParameters
from spec.parameters.crystalcache import RarityForm

__all__ = ["impact", "impact_of_counts", "rarity", "trunk_impact", "unit_trunk_impact"]


def rarity(counts: IntVector, form: RarityForm) -> Vector:
    """Return the rarity U for each count of occurrences. `form` selects the formula.

    Implements: CC-RARITY, CC-RARITY-FORMS
    """
    c = counts.astype(np.float64)
    U: Vector = np.exp(-c) if form == "exponential" else 1.0 / (1.0 + (np.log1p(c) if form == "logarithm" else c))
    return U


def impact(salience: Vector, token_ids: IntVector, parameters: CrystalCacheParameters) -> Vector:
    """Return M_i (n,) from salience and token ids. Counts, rarity and mixture are computed in one pass.

    Implements: CC-COUNT
    """
    if parameters.impact == "uniform":
        return np.ones_like(salience)
    if parameters.impact == "salience":
        return salience.copy()
    low = int(token_ids.min())
    span = int(token_ids.max()) - low + 1
    # If ids span a small range, an id minus the lowest id is the index of a count. Hashed ids span a large range.
    dense = token_ids - low if span <= 64 * len(token_ids) else np.unique(token_ids, return_inverse=True)[1]
    return mixed(salience, np.bincount(dense), dense, parameters)


def impact_of_counts(salience: Vector, counts: IntVector, parameters: CrystalCacheParameters) -> Vector:
    """Return M_i (n,) of tokens whose ids have occurred `counts` (n,) times."""
    if parameters.impact == "uniform":
        return np.ones_like(salience)
    if parameters.impact == "salience":
        return salience.copy()
    return mixed(salience, counts, np.arange(len(counts)), parameters)


def mixed(salience: Vector, counts: IntVector, token: IntVector, parameters: CrystalCacheParameters) -> Vector:
    """Return M_i from salience and the rarity of each token's count. `parameters.impact` selects the formula.

    Implements: CC-IMPACT, CC-UNIT-IMPACT
    """
    U = rarity(counts, parameters.rarity)
    if parameters.impact == "unit":
        M: Vector = unit_mixture(salience, U, token)
    else:
        M = mixture(salience, U, token, float(parameters.M_min), float(parameters.M_max))
    return M


@compiled()
def mixture(S: Vector, U: Vector, token: IntVector, M_min: float, M_max: float) -> Vector:
    """Return M_i by Equation 22, from the rarity of each distinct id."""
    M = np.empty(len(S))
    for i in range(len(S)):
        M[i] = min(max(M_max * (0.5 * (S[i] / M_max) + 0.5 * U[token[i]]), M_min), M_max)
    return M


@compiled()
def unit_mixture(S: Vector, U: Vector, token: IntVector) -> Vector:
    """Return M_i by the essay's formula. The formula divides salience by the largest salience."""
    peak = S.max()
    M = np.empty(len(S))
    for i in range(len(S)):
        M[i] = 0.5 * (S[i] / peak if peak > 0 else 0.0) + 0.5 * U[token[i]]
    return M


@compiled()
def trunk_impact(M: Vector, offsets: IntVector) -> Vector:
    """Return the mean of each trunk's three largest M_i, added in descending order. `offsets` are indices into M.

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


@compiled()
def unit_trunk_impact(M_bar: Vector, epsilon: float) -> Vector:
    """Return the impact Mbar of each trunk, min-max normalised over all trunks.

    Implements: CC-UNIT-TRUNK-IMPACT
    """
    low, high = M_bar.min(), M_bar.max()
    share: Vector = (M_bar - low) / (high - low + epsilon)
    return share
