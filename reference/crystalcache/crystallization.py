"""S4: D, the crystallization of a trunk (Section 3.5)."""

import numpy as np

from reference.sums import left_to_right_sum
from spec.arrays import Float64, Vector

__all__ = ["crystallization", "logistic", "moments"]


def moments(degree: Float64[Vector, " m"], epsilon: float) -> tuple[float, float]:
    """Return mean mu and population standard deviation sigma of the degrees. A sigma below epsilon is replaced by 1."""
    m = len(degree)
    mu = left_to_right_sum(degree) / m
    sigma = float(np.sqrt(left_to_right_sum((degree - mu) ** 2) / m))
    return mu, (1.0 if sigma < epsilon else sigma)


def logistic(x: Float64[Vector, " m"]) -> Float64[Vector, " m"]:
    """Return 1 / (1 + exp(-x)) without overflow."""
    shrunk = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, shrunk) / (1.0 + shrunk)


def crystallization(degree: Float64[Vector, " m"], s: float, epsilon: float) -> Float64[Vector, " m"]:
    """Return D = 1 / (1 + exp(-s (degree - mu) / sigma)) of each trunk.

    Implements: CC-CRYSTALLIZATION

    Source: Eq. 27. A sigma below epsilon is replaced by 1, as in the text of the paper, not by epsilon.
    """
    mu, sigma = moments(degree, epsilon)
    return logistic(s * ((degree - mu) / sigma))
