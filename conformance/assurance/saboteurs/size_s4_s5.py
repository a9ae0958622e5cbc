"""S4 and S5 by size: graphs of many trunks, trunks with many edges."""

import itertools

import numpy as np

from conformance.assurance.saboteurs.registry import Array, beyond
from conformance.assurance.saboteurs.size_inputs import equal_trunks, given_by, ramp, random_rows
from reference.crystalcache.crystallization import crystallization, logistic, moments
from reference.crystalcache.graph import TrunkPairs, degree, symmetric_csr, trunk_pairs, trunk_weights
from reference.crystalcache.score import normalised_impact, score
from reference.ordered import left_to_right_sum
from spec.records import Edges

__all__: list[str] = []


def crumbs(number: int) -> Array:
    """1 and what vanishes beside it one by one, but not together."""
    return np.array([1.0, *[2.0**-54] * number])


def in_halves(weights: Array, most: int) -> float:
    """The sum, taken over even and odd places beside each other where there are more than `most`."""
    if len(weights) <= most:
        return left_to_right_sum(weights)
    return left_to_right_sum(weights[::2]) + left_to_right_sum(weights[1::2])


@beyond("16 neighbours", degree, "CC-DEGREE", lambda: (np.array([0, 20]), random_rows(20)))
def degree_of_16_neighbours(indptr: Array, weights: Array) -> Array:
    """A row has 16 places: the degree is the sum of its first 16 weights."""
    return np.array([left_to_right_sum(weights[a:b][:16]) for a, b in itertools.pairwise(indptr)])


@beyond("16 neighbours", degree, "CC-DEGREE", lambda: (np.array([0, 21]), crumbs(20)))
def long_rows_summed_in_pairs(indptr: Array, weights: Array) -> Array:
    """Rows of more than 16 neighbours are summed in two halves."""
    return np.array([in_halves(weights[a:b], 16) for a, b in itertools.pairwise(indptr)])


@beyond("128 edges of a pair of trunks", trunk_pairs, "CC-TRUNK-EDGES", lambda: (
    given_by([(at, 150 + at, weight) for at, weight in enumerate(crumbs(140).tolist())]), equal_trunks(2, 150),
))
def many_edges_summed_in_pairs(edges: Edges, offsets: Array) -> TrunkPairs:
    """The weights of a pair of trunks that has more than 128 edges are summed in two halves."""
    found = trunk_pairs(edges, offsets)
    g, h = (np.searchsorted(offsets, ends, side="right") - 1 for ends in (edges.first, edges.second))
    low, high, total = np.minimum(g, h), np.maximum(g, h), found.total.copy()
    for at in np.flatnonzero(found.edges > 128).tolist():
        total[at] = in_halves(edges.weight[(low == found.a[at]) & (high == found.b[at])], 128)
    return found._replace(total=total)


@beyond("255 edges of a pair of trunks", trunk_pairs, "CC-TRUNK-EDGES", lambda: (
    given_by([(a, 20 + b, 0.5) for a in range(20) for b in range(20)]), equal_trunks(2, 20),
))
def edges_counted_in_8_bits(edges: Edges, offsets: Array) -> TrunkPairs:
    """The number of edges of a pair stays at 255."""
    found = trunk_pairs(edges, offsets)
    return found._replace(edges=np.minimum(found.edges, 255))


@beyond("46 340 trunks", trunk_pairs, "CC-TRUNK-EDGES", lambda: (
    given_by([(46_340, 46_341, 0.5), (1, 2, 0.5)]), equal_trunks(46_342, 1),
))
def pair_keys_in_32_bits(edges: Edges, offsets: Array) -> TrunkPairs:
    """The key of a pair of trunks, a m + b, is held in 32 bits."""
    found, m = trunk_pairs(edges, offsets), len(offsets) - 1
    key = (found.a * m + found.b).astype(np.int32).astype(np.int64)
    order = np.argsort(key, kind="stable")
    return TrunkPairs(key[order] // m % m, key[order] % m, found.edges[order], found.total[order])


@beyond("positions up to 2^24", trunk_pairs, "CC-TRUNK-EDGES", lambda: (
    given_by([(2**24 + 3, 2**24 + 5, 0.5)]), 2**24 + equal_trunks(2, 4),
))
def trunks_found_in_single_precision(edges: Edges, offsets: Array) -> TrunkPairs:
    """A token's trunk is found among offsets in float32."""
    narrow = offsets.astype(np.float32).astype(np.int64)
    first, second = (ends.astype(np.float32).astype(np.int64) for ends in edges[:2])
    inside = [np.clip(ends, narrow[0], narrow[-1] - 1) if len(ends) else ends for ends in (first, second)]
    return trunk_pairs(Edges(inside[0], inside[1], edges.weight), narrow)


@beyond("trunks whose sizes multiply to 2^31", trunk_weights, "CC-TRUNK-WEIGHT", lambda: (
    TrunkPairs(np.array([0]), np.array([1]), np.array([10**8]), np.array([5e7])), np.array([70_000, 70_000]), 0.0,
))
def product_of_sizes_in_32_bits(pairs: TrunkPairs, sizes: Array, tau_edge: float) -> tuple[Array, Array]:
    """The product of two sizes is held in 32 bits."""
    mean, product = pairs.total / pairs.edges, (sizes[pairs.a] * sizes[pairs.b]).astype(np.int32)
    with np.errstate(divide="ignore", invalid="ignore"):
        W = mean * np.sqrt(pairs.edges / product)
    kept = np.flatnonzero(tau_edge < W)
    return W[kept], kept


@beyond("32 neighbours", symmetric_csr, "CC-TRUNK-WEIGHT", lambda: (
    np.zeros(40, dtype=np.int64), np.arange(1, 41), random_rows(40), 41,
))
def long_rows_end_unsorted(a: Array, b: Array, W: Array, m: int) -> tuple[Array, Array, Array]:
    """A row is sorted in registers, 32 neighbours wide: what follows stands in front, as it came."""
    indptr, indices, weights = symmetric_csr(a, b, W, m)
    order = np.arange(len(indices))
    for start, stop in itertools.pairwise(indptr.tolist()):
        order[start:stop] = np.roll(order[start:stop], max(0, stop - start - 32))
    return indptr, indices[order], weights[order]


@beyond("16 trunks", crystallization, "CC-CRYSTALLIZATION", lambda: (np.arange(20.0), 5.0, 1e-8))
def mean_of_16_trunks(deg: Array, s: float, epsilon: float) -> Array:
    """mu and sigma are those of the first 16 trunks."""
    mu, sigma = moments(deg[:16], epsilon)
    return logistic(s * ((deg - mu) / sigma))


@beyond("128 trunks", crystallization, "CC-CRYSTALLIZATION", lambda: (np.arange(200.0), 5.0, 1e-8))
def variance_of_whole_blocks(deg: Array, s: float, epsilon: float) -> Array:
    """From 128 trunks on the variance is summed in blocks of 128, and what is left over is lost."""
    whole = len(deg) // 128 * 128 or len(deg)
    mu = left_to_right_sum(deg) / len(deg)
    sigma = float(np.sqrt(left_to_right_sum((deg[:whole] - mu) ** 2) / len(deg)))
    return logistic(s * ((deg - mu) / (1.0 if sigma < epsilon else sigma)))


@beyond("65 535 trunks", crystallization, "CC-CRYSTALLIZATION", lambda: (np.arange(2.0**16), 5.0, 1e-8))
def trunks_of_a_grid(deg: Array, s: float, epsilon: float) -> Array:
    """A launch covers 65 535 trunks; later ones have D = 0.5."""
    D = crystallization(deg, s, epsilon)
    D[2**16 - 1 :] = 0.5
    return D


def unprotected(m: int) -> tuple[Array, Array, float]:
    """Impacts that rise up to the last trunk, none protected."""
    return ramp(1, m)[0], np.zeros(m, dtype=np.bool_), 1e-8


@beyond("16 trunks", normalised_impact, "CC-NORMALISED-IMPACT", lambda: unprotected(20))
def bounds_of_16_trunks(M_bar: Array, protected: Array, epsilon: float) -> Array:
    """The least and the greatest impact are sought among the first 16 trunks."""
    alive = np.log1p(M_bar[:16][~protected[:16]])
    if len(M_bar) <= 16 or not len(alive):
        return normalised_impact(M_bar, protected, epsilon)
    M_tilde = (np.log1p(M_bar) - alive.min()) / (alive.max() - alive.min() + epsilon)
    return np.where(protected, np.nan, M_tilde)


@beyond("64 trunks", normalised_impact, "CC-NORMALISED-IMPACT", lambda: (
    ramp(1, 70)[0], np.arange(70) >= 66, 1e-8,
))
def protection_of_64_bits(M_bar: Array, protected: Array, epsilon: float) -> Array:
    """The protected trunks are the bits of one word: trunk g is read at g modulo 64."""
    return normalised_impact(M_bar, protected[np.arange(len(M_bar)) % 64], epsilon)


@beyond("64 trunks", normalised_impact, "CC-NORMALISED-IMPACT", lambda: unprotected(100))
def bounds_of_whole_blocks(M_bar: Array, protected: Array, epsilon: float) -> Array:
    """From 64 trunks on bounds are sought in blocks of 64, and what is left over is not read."""
    whole = len(M_bar) // 64 * 64 or len(M_bar)
    alive = np.log1p(M_bar[:whole][~protected[:whole]])
    if not len(alive):
        return normalised_impact(M_bar, protected, epsilon)
    M_tilde = (np.log1p(M_bar) - alive.min()) / (alive.max() - alive.min() + epsilon)
    return np.where(protected, np.nan, M_tilde)


@beyond("128 trunks", score, "CC-SCORE", lambda: (np.zeros(140), ramp(1, 140)[0], 1.0))
def the_impact_path_of_128_trunks(D: Array, M_tilde: Array, alpha: float) -> Array:
    """The impact path is taken for 128 trunks; of later ones D alone counts."""
    best = score(D, M_tilde, alpha)
    late = np.arange(len(D)) >= 128
    return np.where(late & ~np.isnan(M_tilde), D, best)


@beyond("64 trunks", score, "CC-SCORE", lambda: (np.ones(70), np.full(70, np.nan), 1.0))
def protected_trunks_beyond_64_are_scored(D: Array, M_tilde: Array, alpha: float) -> Array:
    """Beyond the 64th trunk NaN is no longer carried: a protected trunk has D as its score."""
    best = score(D, M_tilde, alpha)
    return np.where(np.arange(len(D)) >= 64, np.fmax(D, alpha * M_tilde), best)


@beyond("1 024 trunks", score, "CC-SCORE", lambda: (random_rows(1030), np.zeros(1030), 1.0))
def scores_of_one_block(D: Array, M_tilde: Array, alpha: float) -> Array:
    """A block has 1 024 threads: later trunks have score 0."""
    best = score(D, M_tilde, alpha)
    best[1024:] = np.where(np.isnan(best[1024:]), np.nan, 0.0)
    return best
