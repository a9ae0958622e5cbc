"""Wrong readings of the essay's forms and of the extensions beyond the paper."""

import numpy as np

from conformance.assurance.saboteurs.registry import Array, instead_of
from reference.crystalcache.coattention import mean_salience, salience
from reference.crystalcache.coverage import backfill, coverage_reserve, evenly_spaced
from reference.crystalcache.dissolution import allocate, carried_out
from reference.crystalcache.impact import exponential_rarity, reciprocal_rarity, unit_impact, unit_trunk_impact
from reference.crystalcache.renewal import renewed_D
from reference.crystalcache.tiers import dissolve_in_tiers, least_shift, tier_allocate, tier_bounds, tier_counts
from reference.crystalcache.trunks import median_strength
from spec.parameters import CrystalCacheParameters
from spec.records import Dissolution

__all__: list[str] = []


@instead_of(mean_salience, "CC-MEAN-SALIENCE")
def of_three_always(own: Array, parameters: CrystalCacheParameters) -> Array:
    """The sum of the best heads is divided by k_heads, however many heads there are."""
    total = np.sort(own.sum(axis=1), axis=0)[::-1][: parameters.k_heads].sum(axis=0)
    return np.asarray(np.clip(total / max(1, parameters.k_heads), parameters.M_min, parameters.M_max))


@instead_of(mean_salience, "CC-MEAN-SALIENCE")
def clipped_before_the_mean(own: Array, parameters: CrystalCacheParameters) -> Array:
    """The paper's clipped sum is divided."""
    return np.asarray(salience(own, parameters) / max(1, min(parameters.k_heads, len(own))))


@instead_of(unit_impact, "CC-UNIT-IMPACT")
def share_of_M_max(S: Array, U: Array, parameters: CrystalCacheParameters) -> Array:
    """Salience is a share of M_max."""
    return np.asarray(0.5 * (S / parameters.M_max) + 0.5 * U)


@instead_of(unit_impact, "CC-UNIT-IMPACT")
def between_least_and_greatest(S: Array, U: Array, parameters: CrystalCacheParameters) -> Array:
    """Salience is normalised from its minimum."""
    return unit_impact(S - S.min(), U, parameters)


@instead_of(unit_trunk_impact, "CC-UNIT-TRUNK-IMPACT")
def over_the_greatest(M_bar: Array, epsilon: float) -> Array:
    """Division by the greatest alone."""
    return np.asarray(M_bar / (M_bar.max() + epsilon))


@instead_of(unit_trunk_impact, "CC-UNIT-TRUNK-IMPACT")
def as_it_is(M_bar: Array, epsilon: float) -> Array:
    """Trunk impact is not normalised."""
    return M_bar


@instead_of(tier_counts, "CC-TIER-COUNT")
def half_to_even(sizes: Array, t: int, N_min: int) -> Array:
    """A middle trunk rounds half to even, as Eq. 33 does."""
    a, b = tier_bounds(len(sizes), t)
    kept = tier_counts(sizes, t, N_min).copy()
    for rank in range(a, b):
        ratio = 0.8 - 0.3 * (rank - a) / max(1, b - a - 1)
        kept[rank] = min(int(sizes[rank]), max(N_min, round(ratio * int(sizes[rank]))))
    return kept


@instead_of(tier_counts, "CC-TIER-COUNT")
def floats_for_the_ratio(sizes: Array, t: int, N_min: int) -> Array:
    """The ratio is a float before it meets the size."""
    a, b = tier_bounds(len(sizes), t)
    kept = tier_counts(sizes, t, N_min).copy()
    for rank in range(a, b):
        ratio = 0.8 - 0.3 * (rank - a) / max(1, b - a - 1)
        kept[rank] = min(int(sizes[rank]), max(N_min, int(ratio * int(sizes[rank]) + 0.5)))
    return kept


@instead_of(tier_bounds, "CC-TIER-COUNT")
def only_the_lower_boundary_moves(m: int, t: int) -> tuple[int, int]:
    """The first 30 % stay whole until the middle is used up."""
    b = min(max(7 * m // 10 + t, 0), m)
    return min(3 * m // 10, b), b


@instead_of(tier_counts, "CC-TIER-COUNT")
def fragments_are_evicted(sizes: Array, t: int, N_min: int) -> Array:
    """A trunk smaller than N_min is evicted, as the essay's unreachable line has it."""
    kept = tier_counts(sizes, t, N_min)
    return np.where((sizes < N_min) & (np.arange(len(sizes)) >= tier_bounds(len(sizes), t)[0]), 0, kept)


@instead_of(least_shift, "CC-TIERS")
def one_tier_too_far(sizes: Array, B_avail: int, N_min: int) -> int:
    """The shift goes one beyond the least."""
    return least_shift(sizes, B_avail, N_min) + 1


@instead_of(least_shift, "CC-TIERS")
def never_above_the_budget(sizes: Array, B_avail: int, N_min: int) -> int:
    """The greatest shift that keeps no more than the budget."""
    shifts = range(-len(sizes), len(sizes) + 1)
    return max(t for t in shifts if tier_counts(sizes, t, N_min).sum() <= B_avail)


@instead_of(tier_allocate, "CC-TIERS")
def excess_stays(sizes: Array, c_0: int, N_min: int) -> Array:
    """Nothing is cut after the tiers: the budget is met about."""
    best_first = sizes[::-1]
    t = least_shift(best_first, int(sizes.sum()) - c_0, N_min)
    return np.asarray(tier_counts(best_first, t, N_min)[::-1] / sizes)


@instead_of(dissolve_in_tiers, "CC-TIERS")
def no_tiers(
    score: Array, offsets: Array, M: Array, D: Array, protected: Array, B: int, N_min: int,
) -> Dissolution:
    """The paper's allocation, whatever is asked for."""
    return carried_out(allocate, score, offsets, M, D, protected, B, N_min)


@instead_of(renewed_D, "CC-RENEWAL")
def share_of_D(D: Array, active: Array, renewal: float) -> Array:
    """An active trunk gains a share of what it has."""
    return np.where(active, np.minimum(1.0, D + renewal * D), D)


@instead_of(renewed_D, "CC-RENEWAL")
def everyone(D: Array, active: Array, renewal: float) -> Array:
    """Trunks that are not active are renewed too."""
    return np.asarray(D + renewal * (1.0 - D))


@instead_of(renewed_D, "CC-RENEWAL")
def weighted_mean(D: Array, active: Array, renewal: float) -> Array:
    """(1 - renewal) D + renewal: the same real number, other bits."""
    return np.where(active, (1.0 - renewal) * D + renewal, D)


@instead_of(reciprocal_rarity, "CC-RARITY-FORMS")
def without_the_one(c: Array) -> Array:
    """1 / c, which is 1 for a token that occurs once."""
    return np.asarray(1.0 / c)


@instead_of(exponential_rarity, "CC-RARITY-FORMS")
def other_mentions_only(c: Array) -> Array:
    """exp(1 - c): the token itself does not count."""
    return np.exp(1.0 - c)


@instead_of(exponential_rarity, "CC-RARITY-FORMS")
def power_of_two(c: Array) -> Array:
    """2 to the minus c."""
    return np.exp2(-c.astype(np.float64))


@instead_of(median_strength, "CC-ADAPTIVE-MERGE")
def upper_median(sentences: Array, edges: dict[tuple[int, int], float], tau_merge: float) -> float:
    """Of an even number of strengths, the upper one of the middle two."""
    single = [median_strength(sentences[i : i + 3], edges, tau_merge) for i in range(len(sentences) - 2)]
    return sorted(single)[len(single) // 2] if single else tau_merge


@instead_of(median_strength, "CC-ADAPTIVE-MERGE")
def edges_only(sentences: Array, edges: dict[tuple[int, int], float], tau_merge: float) -> float:
    """Interfaces without an edge do not count."""
    single = [median_strength(sentences[i : i + 3], edges, tau_merge) for i in range(len(sentences) - 2)]
    some = sorted(x for x in single if x > 0)
    return some[(len(some) - 1) // 2] if some else 0.0 if single else tau_merge


@instead_of(median_strength, "CC-ADAPTIVE-MERGE")
def fixed_after_all(sentences: Array, edges: dict[tuple[int, int], float], tau_merge: float) -> float:
    """The smaller of the median and tau_merge."""
    return min(tau_merge, median_strength(sentences, edges, tau_merge))


@instead_of(coverage_reserve, "CC-COVERAGE")
def share_of_all_of_B(sizes: Array, protected: Array, B: int, coverage: float) -> int:
    """The share is of B, protected tokens included."""
    return coverage_reserve(sizes, np.zeros_like(protected), B, coverage)


@instead_of(coverage_reserve, "CC-COVERAGE")
def binary_share(sizes: Array, protected: Array, B: int, coverage: float) -> int:
    """The share is multiplied as a float, so that 0.29 of 100 are 28."""
    everything = coverage_reserve(sizes, protected, B, 1.0)
    return int(coverage * everything)


@instead_of(evenly_spaced, "CC-COVERAGE")
def from_the_first(candidates: Array, k: int) -> Array:
    """The first token of each part."""
    return candidates if len(candidates) <= k else candidates[np.arange(k) * len(candidates) // max(1, k)]


@instead_of(evenly_spaced, "CC-COVERAGE")
def the_newest(candidates: Array, k: int) -> Array:
    """The last evicted tokens, not evenly spaced ones."""
    return candidates[len(candidates) - min(k, len(candidates)) :]


@instead_of(backfill, "CC-COVERAGE")
def dead_with_tokens(found: Dissolution, offsets: Array, D: Array, reserve: int) -> Dissolution:
    """An evicted trunk that keeps coverage tokens stays at r = 0 and D = 0."""
    return Dissolution(backfill(found, offsets, D, reserve).kept, found.ratio, found.D)
