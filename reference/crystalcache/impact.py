"""S3: impact M_i of each token, from salience and rarity (Section 3.4)."""

import numpy as np

from reference.sums import left_to_right_sum
from spec.arrays import Float64, Int64, IntVector, Vector
from spec.parameters import CrystalCacheParameters

__all__ = [
    "exponential_rarity", "impact", "impact_without_rarity", "rarity", "reciprocal_rarity", "token_counts",
    "trunk_impact", "uniform_impact", "unit_impact", "unit_trunk_impact",
]

K_MEMBERS = 3  # fixed by Eq. 23


def token_counts(token_ids: Int64[IntVector, " n"]) -> Int64[IntVector, " n"]:
    """Return c_i: how often the id of token i occurs among all ids, including token i itself.

    Implements: CC-COUNT

    Source: Eq. 20.
    """
    _, inverse, counts = np.unique(token_ids, return_inverse=True, return_counts=True)
    c: IntVector = counts[inverse].astype(np.int64)
    return c


def rarity(c: Int64[IntVector, " n"]) -> Float64[Vector, " n"]:
    """Return the Von Restorff rarity U_i = 1 / (1 + ln(1 + c_i)).

    Implements: CC-RARITY

    Source: Eq. 10 and 21.
    """
    U: Vector = 1.0 / (1.0 + np.log1p(c.astype(np.float64)))
    return U


def reciprocal_rarity(c: Int64[IntVector, " n"]) -> Float64[Vector, " n"]:
    """Return U_i = 1 / (1 + c_i). With increasing c_i, this U_i decreases faster than U_i of Eq. 21.

    Implements: CC-RARITY-FORMS

    Source: Section 8, F5.
    """
    U: Vector = 1.0 / (1.0 + c.astype(np.float64))
    return U


def exponential_rarity(c: Int64[IntVector, " n"]) -> Float64[Vector, " n"]:
    """Return U_i = exp(-c_i). U_i is near 0 if the id of token i occurs more than a few times.

    Implements: CC-RARITY-FORMS

    Source: Section 8, F5.
    """
    U: Vector = np.exp(-c.astype(np.float64))
    return U


def impact(
    S: Float64[Vector, " n"], U: Float64[Vector, " n"], parameters: CrystalCacheParameters,
) -> Float64[Vector, " n"]:
    """Return M_i = 0.5 S_i + 0.5 M_max U_i, clipped to [M_min, M_max].

    Implements: CC-IMPACT

    Source: Eq. 22.
    """
    S_tilde = S / parameters.M_max
    M: Vector = np.clip(parameters.M_max * (0.5 * S_tilde + 0.5 * U), parameters.M_min, parameters.M_max)
    return M


def impact_without_rarity(
    S: Float64[Vector, " n"], U: Float64[Vector, " n"], parameters: CrystalCacheParameters,
) -> Float64[Vector, " n"]:
    """Return M_i = S_i: the ablation "no Von Restorff" of Table 10. Eq. 11 has already clipped S_i to [M_min, M_max].

    Implements: CC-IMPACT
    """
    return S.copy()


def uniform_impact(
    S: Float64[Vector, " n"], U: Float64[Vector, " n"], parameters: CrystalCacheParameters,
) -> Float64[Vector, " n"]:
    """Return M_i = 1: the ablation "uniform M_i" of Table 10.

    Implements: CC-IMPACT
    """
    return np.ones_like(S)


def unit_impact(
    S: Float64[Vector, " n"], U: Float64[Vector, " n"], parameters: CrystalCacheParameters,
) -> Float64[Vector, " n"]:
    """Return M_i of the essay: 0.5 U_i + 0.5 S_i / max(S), with the largest S_i of the segment in the denominator.

    Implements: CC-UNIT-IMPACT

    Source: the essay, section 3. If all S_i are 0, M_i is 0.5 U_i.
    """
    peak = float(S.max())
    share: Vector = S / peak if peak > 0 else np.zeros_like(S)
    return 0.5 * share + 0.5 * U


def trunk_impact(M: Float64[Vector, " n"], offsets: Int64[IntVector, " m_and_one"]) -> Float64[Vector, " m"]:
    """Return the mean of the three largest M_i of each trunk. The three M_i are added in descending order.

    Implements: CC-TRUNK-IMPACT

    Source: Eq. 23. If a trunk has fewer than three tokens, the mean is over all tokens of the trunk.
    """
    M_bar = np.empty(len(offsets) - 1)
    for g in range(len(M_bar)):
        top = np.sort(M[offsets[g] : offsets[g + 1]])[::-1][:K_MEMBERS]
        M_bar[g] = left_to_right_sum(top) / len(top)
    return M_bar


def unit_trunk_impact(M_bar: Float64[Vector, " m"], epsilon: float) -> Float64[Vector, " m"]:
    """Return the trunk impacts Mbar, min-max normalised to [0, 1) over all trunks, including protected trunks.

    Implements: CC-UNIT-TRUNK-IMPACT

    Source: the essay, section 3. If all Mbar are equal, the result is 0 for each trunk.
    """
    low, high = float(M_bar.min()), float(M_bar.max())
    return (M_bar - low) / (high - low + epsilon)
