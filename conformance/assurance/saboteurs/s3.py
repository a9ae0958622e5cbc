"""S3: wrong readings of counts, rarity and impact."""

import itertools

import numpy as np

from conformance.assurance.saboteurs.registry import Array, instead_of
from reference.crystalcache.impact import (
    impact,
    impact_without_rarity,
    rarity,
    token_counts,
    trunk_impact,
    uniform_impact,
)
from reference.ordered import left_to_right_sum
from spec.parameters import CrystalCacheParameters

__all__: list[str] = []


@instead_of(token_counts, "CC-COUNT")
def surrounding_context(token_ids: Array) -> Array:
    """The token itself does not count: "frequency in the surrounding context"."""
    return token_counts(token_ids) - 1


@instead_of(token_counts, "CC-COUNT")
def so_far(token_ids: Array) -> Array:
    """Only occurrences up to the token itself count."""
    same = token_ids[:, None] == token_ids[None, :]
    c: Array = np.tril(same).sum(axis=1).astype(np.int64)
    return c


@instead_of(token_counts, "CC-COUNT")
def repeats_in_a_row_once(token_ids: Array) -> Array:
    """A run of one id counts once."""
    starts = np.append(True, token_ids[1:] != token_ids[:-1])[: len(token_ids)]
    return np.array([int(starts[token_ids == i].sum()) for i in token_ids], dtype=np.int64)


@instead_of(rarity, "CC-RARITY")
def logarithm_to_base_2(c: Array) -> Array:
    """The logarithm is binary."""
    U: Array = 1.0 / (1.0 + np.log2(1.0 + c))
    return U


@instead_of(rarity, "CC-RARITY")
def logarithm_of_the_count(c: Array) -> Array:
    """The logarithm is that of c, not of 1 + c."""
    U: Array = 1.0 / (1.0 + np.log(np.maximum(c, 1).astype(np.float64)))
    return U


@instead_of(rarity, "CC-RARITY")
def table_of_the_paper(c: Array) -> Array:
    """U(10) is the paper's printed 0.295."""
    U: Array = np.where(c == 10, 0.295, rarity(c))
    return U


@instead_of(impact, "CC-IMPACT")
def multiplied_out(S: Array, U: Array, parameters: CrystalCacheParameters) -> Array:
    """0.5 S + 0.5 M_max U: the same real number, other bits."""
    M: Array = np.clip(0.5 * S + 0.5 * parameters.M_max * U, parameters.M_min, parameters.M_max)
    return M


@instead_of(impact, "CC-IMPACT")
def not_clipped(S: Array, U: Array, parameters: CrystalCacheParameters) -> Array:
    """The clip of Eq. 22 is left out."""
    M: Array = parameters.M_max * (0.5 * (S / parameters.M_max) + 0.5 * U)
    return M


@instead_of(impact_without_rarity, "CC-IMPACT")
def half_of_the_mixture(S: Array, U: Array, parameters: CrystalCacheParameters) -> Array:
    """No Von Restorff: the mixture without its second term, 0.5 S."""
    return 0.5 * S


@instead_of(uniform_impact, "CC-IMPACT")
def uniform_at_the_top(S: Array, U: Array, parameters: CrystalCacheParameters) -> Array:
    """Uniform M_i: every token has M_max."""
    return np.full_like(S, parameters.M_max)


@instead_of(trunk_impact, "CC-TRUNK-IMPACT")
def mean_of_all_members(M: Array, offsets: Array) -> Array:
    """The mean runs over all members."""
    return np.add.reduceat(M, offsets[:-1]) / np.diff(offsets)


@instead_of(trunk_impact, "CC-TRUNK-IMPACT")
def always_divided_by_three(M: Array, offsets: Array) -> Array:
    """The sum is divided by 3 in a trunk of one or two tokens too."""
    return trunk_impact(M, offsets) * np.minimum(3, np.diff(offsets)) / 3


@instead_of(trunk_impact, "CC-TRUNK-IMPACT")
def summed_from_the_least(M: Array, offsets: Array) -> Array:
    """The three largest are added from the least up."""
    groups = [np.sort(M[a:b])[-3:] for a, b in itertools.pairwise(offsets)]
    return np.array([left_to_right_sum(top) / len(top) for top in groups])
