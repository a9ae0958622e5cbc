"""S3 by brute force: counts, rarity and encoding impact (Section 3.4)."""

import math
from collections.abc import Sequence

from conformance.oracles import added
from conformance.oracles.s2 import Trunk
from spec.parameters import CrystalCacheParameters


def counts(token_ids: Sequence[int]) -> list[int]:
    """Return the count of each token's id (Eq. 20)."""
    return [sum(other == token_id for other in token_ids) for token_id in token_ids]


def rarity(c: int) -> float:
    """Return the rarity of a count (Eq. 10 and 21)."""
    return 1 / (1 + math.log(1 + c))


def rarity_of(c: int, p: CrystalCacheParameters) -> float:
    """Return the rarity by Eq. 21, or by one of the two other forms of F5."""
    if p.rarity == "reciprocal":
        return 1 / (1 + c)
    return math.exp(-c) if p.rarity == "exponential" else rarity(c)


def token_impact(S: float, U: float, p: CrystalCacheParameters, peak: float = 0.0) -> float:
    """Return the impact by Eq. 22, or by the form of an ablation of Table 10 or of the essay.

    `peak` is the largest S.
    """
    if p.impact == "unit":
        return 0.5 * (S / peak if peak else 0.0) + 0.5 * U
    if p.impact == "uniform":
        return 1.0
    if p.impact == "salience":
        return S
    S_tilde = S / p.M_max
    return min(max(p.M_max * (0.5 * S_tilde + 0.5 * U), p.M_min), p.M_max)


def impact(S: Sequence[float], ids: Sequence[int], p: CrystalCacheParameters) -> list[float]:
    """Return M_i of every token."""
    return [token_impact(S_i, rarity_of(c_i, p), p, max(S)) for S_i, c_i in zip(S, counts(ids), strict=True)]


def trunk_impact(M: Sequence[float], g: Trunk) -> float:
    """Return the mean of the three largest members, added from the largest down (Eq. 23)."""
    top = sorted((M[i] for i in g), reverse=True)[:3]
    return added(top) / min(3, len(g))


def unit_trunk_impact(M_bar: Sequence[float], p: CrystalCacheParameters) -> list[float]:
    """Return the essay's trunk impact, scaled from the least to the greatest of all trunks.

    In the paper's form, return Eq. 23 unchanged.
    """
    low, high = min(M_bar), max(M_bar)
    return [(x - low) / (high - low + p.epsilon) for x in M_bar] if p.trunk_impact == "unit" else list(M_bar)
