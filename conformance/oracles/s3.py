"""S3 by brute force: counts, rarity and encoding impact (Section 3.4)."""

import math
from collections.abc import Sequence

from conformance.oracles import added
from conformance.oracles.s2 import Trunk
from spec.parameters import CrystalCacheParameters


def counts(token_ids: Sequence[int]) -> list[int]:
    """Eq. 20."""
    return [sum(other == own for other in token_ids) for own in token_ids]


def rarity(c: int) -> float:
    """Eq. 10 and 21."""
    return 1 / (1 + math.log(1 + c))


def rarity_of(c: int, p: CrystalCacheParameters) -> float:
    """Eq. 21, or one of the two other forms that F5 names."""
    if p.rarity == "reciprocal":
        return 1 / (1 + c)
    return math.exp(-c) if p.rarity == "exponential" else rarity(c)


def token_impact(S: float, U: float, p: CrystalCacheParameters, peak: float = 0.0) -> float:
    """Eq. 22, or the form of it that an ablation of Table 10 or the essay asks for; `peak` is the largest S."""
    if p.impact == "unit":
        return 0.5 * (S / peak if peak else 0.0) + 0.5 * U
    if p.impact == "uniform":
        return 1.0
    if p.impact == "salience":
        return S
    S_tilde = S / p.M_max
    return min(max(p.M_max * (0.5 * S_tilde + 0.5 * U), p.M_min), p.M_max)


def impact(S: Sequence[float], ids: Sequence[int], p: CrystalCacheParameters) -> list[float]:
    """M_i of every token."""
    return [token_impact(S_i, rarity_of(c_i, p), p, max(S)) for S_i, c_i in zip(S, counts(ids), strict=True)]


def trunk_impact(M: Sequence[float], g: Trunk) -> float:
    """Eq. 23: the mean of the three largest members, added from the largest down."""
    top = sorted((M[i] for i in g), reverse=True)[:3]
    return added(top) / min(3, len(g))


def unit_trunk_impact(M_bar: Sequence[float], p: CrystalCacheParameters) -> list[float]:
    """The essay's: between the least and the greatest of all trunks; Eq. 23 as it is where the paper is followed."""
    low, high = min(M_bar), max(M_bar)
    return [(x - low) / (high - low + p.epsilon) for x in M_bar] if p.trunk_impact == "unit" else list(M_bar)
