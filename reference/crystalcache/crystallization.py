"""S4: D, the crystallization of a trunk (Section 3.5)."""

import numpy as np

from reference.ordered import left_to_right_sum
from spec.arrays import Float64, Vector

__all__ = ["crystallization", "logistic", "moments"]


def moments(degree: Float64[Vector, " m"], epsilon: float) -> tuple[float, float]:
    """mu and the population sigma of the degrees; sigma is 1 where it is below epsilon."""
    m = len(degree)
    mu = left_to_right_sum(degree) / m
    sigma = float(np.sqrt(left_to_right_sum((degree - mu) ** 2) / m))
    return mu, (1.0 if sigma < epsilon else sigma)


def logistic(x: Float64[Vector, " m"]) -> Float64[Vector, " m"]:
    """1 / (1 + exp(-x)) without overflow."""
    shrunk = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, shrunk) / (1.0 + shrunk)


def crystallization(degree: Float64[Vector, " m"], s: float, epsilon: float) -> Float64[Vector, " m"]:
    """D: the logistic of the standardised degree.

    Implements: CC-CRYSTALLIZATION

    Source: Eq. 27, with the fallback that its text gives (sigma = 1), not max(sigma, epsilon).
    """
    mu, sigma = moments(degree, epsilon)
    return logistic(s * ((degree - mu) / sigma))
