"""S5: wrong readings of the normalised impact and of the score."""

import numpy as np

from conformance.assurance.saboteurs.registry import Array, instead_of
from reference.crystalcache.score import normalised_impact, score

__all__: list[str] = []


@instead_of(normalised_impact, "CC-NORMALISED-IMPACT")
def range_of_all_trunks(M_bar: Array, protected: Array, epsilon: float) -> Array:
    """Minimum and maximum run over protected trunks too."""
    everywhere = normalised_impact(M_bar, np.zeros_like(protected), epsilon)
    return np.where(protected, np.nan, everywhere)


@instead_of(normalised_impact, "CC-NORMALISED-IMPACT")
def without_the_logarithm(M_bar: Array, protected: Array, epsilon: float) -> Array:
    """The impact is normalised as it is, without the logarithm."""
    return normalised_impact(np.expm1(M_bar), protected, epsilon)


@instead_of(normalised_impact, "CC-NORMALISED-IMPACT")
def equal_impacts_are_best(M_bar: Array, protected: Array, epsilon: float) -> Array:
    """Where all impacts are equal, each is 1."""
    found = normalised_impact(M_bar, protected, epsilon)
    alive = M_bar[~protected]
    equal = len(alive) > 0 and alive.min() == alive.max()
    return np.where(protected, np.nan, 1.0) if equal else found


@instead_of(normalised_impact, "CC-NORMALISED-IMPACT")
def share_of_the_largest(M_bar: Array, protected: Array, epsilon: float) -> Array:
    """Impacts are divided by the largest, without taking the least away."""
    M_tilde = np.full(len(M_bar), np.nan)
    alive = np.log1p(M_bar[~protected])
    M_tilde[~protected] = alive / (alive.max(initial=0.0) + epsilon)
    return M_tilde


@instead_of(normalised_impact, "CC-NORMALISED-IMPACT")
def in_single_precision(M_bar: Array, protected: Array, epsilon: float) -> Array:
    """The value is float32, where epsilon vanishes and the best trunk has exactly 1."""
    return normalised_impact(M_bar, protected, epsilon).astype(np.float32).astype(np.float64)


@instead_of(score, "CC-SCORE")
def sum_of_both_paths(D: Array, M_tilde: Array, alpha: float) -> Array:
    """The paths are added."""
    return D + alpha * M_tilde


@instead_of(score, "CC-SCORE")
def alpha_on_both_paths(D: Array, M_tilde: Array, alpha: float) -> Array:
    """alpha scales D too."""
    return alpha * score(D, M_tilde, 1.0)


@instead_of(score, "CC-SCORE")
def protected_trunks_scored(D: Array, M_tilde: Array, alpha: float) -> Array:
    """A protected trunk scores its D: NaN is ignored by the maximum."""
    best: Array = np.fmax(D, alpha * M_tilde)
    return best


@instead_of(score, "CC-SCORE")
def held_to_one(D: Array, M_tilde: Array, alpha: float) -> Array:
    """The score is held to 1."""
    return np.minimum(score(D, M_tilde, alpha), 1.0)
