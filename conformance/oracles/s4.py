"""S4 by brute force: the trunk graph and D (Section 3.5)."""

import math
from collections.abc import Sequence

from conformance.oracles import added
from conformance.oracles.s1 import Edge
from conformance.oracles.s2 import Trunk
from spec.parameters import CrystalCacheParameters


def cross_weights(E: Sequence[Edge], g_a: Trunk, g_b: Trunk) -> list[float]:
    """Return the multiset W_ab of Eq. 24 over both orientations, in the order of E."""
    return [w for i, j, w in E if (i in g_a and j in g_b) or (i in g_b and j in g_a)]


def unpruned_weight(W_ab: Sequence[float], size_a: int, size_b: int) -> float:
    """Return the weight of Eq. 25 before the prune: the mean weight times the root of the density."""
    if not W_ab:
        return 0.0
    return added(W_ab) / len(W_ab) * math.sqrt(len(W_ab) / (size_a * size_b))


def trunk_weight(W_ab: Sequence[float], size_a: int, size_b: int, tau_edge: float) -> float:
    """Return the weight of Eq. 25 after the prune."""
    W = unpruned_weight(W_ab, size_a, size_b)
    return W if tau_edge < W else 0.0


def weight_matrix(E: Sequence[Edge], trunks: Sequence[Trunk], p: CrystalCacheParameters) -> list[list[float]]:
    """Return W between every two trunks, with 0 on the diagonal."""
    return [
        [
            0.0 if a == b else trunk_weight(cross_weights(E, g_a, g_b), len(g_a), len(g_b), p.tau_edge)
            for b, g_b in enumerate(trunks)
        ]
        for a, g_a in enumerate(trunks)
    ]


def degree(W: Sequence[Sequence[float]]) -> list[float]:
    """Return the degrees of Eq. 26, summed by ascending neighbour."""
    return [added(row) for row in W]


def crystallization(deg: Sequence[float], p: CrystalCacheParameters) -> list[float]:
    """Return D by Eq. 27 with the population standard deviation and the fallback sigma = 1, or the ablation D = 0."""
    if p.graph == "zero":
        return [0.0] * len(deg)
    m = len(deg)
    mu = math.fsum(deg) / m
    sigma = math.sqrt(math.fsum((x - mu) ** 2 for x in deg) / m)
    if sigma < p.epsilon:
        sigma = 1.0
    return [_logistic(p.s * (x - mu) / sigma) for x in deg]


def _logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
