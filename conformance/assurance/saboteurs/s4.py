"""S4: wrong readings of edges between trunks, their weight, degree and D."""

import itertools

import numpy as np

from conformance.assurance.saboteurs.registry import Array, instead_of
from reference.crystalcache.crystallization import crystallization, logistic, moments
from reference.crystalcache.graph import TrunkPairs, degree, trunk_pairs, trunk_weights
from spec.records import Edges

__all__: list[str] = []


def trunks_of(edges: Edges, offsets: Array) -> tuple[Array, Array]:
    """The trunks of both endpoints."""
    g = np.searchsorted(offsets, edges.first, side="right") - 1
    h = np.searchsorted(offsets, edges.second, side="right") - 1
    return g, h


def restricted(edges: Edges, kept: Array) -> Edges:
    return Edges(edges.first[kept], edges.second[kept], edges.weight[kept])


def first_of_each(*keys: Array) -> Array:
    """The index of the first row of each distinct key, ascending."""
    _, index = np.unique(np.stack(keys), axis=1, return_index=True)
    kept: Array = np.sort(index)
    return kept


@instead_of(trunk_pairs, "CC-TRUNK-EDGES")
def a_mutual_pair_once(edges: Edges, offsets: Array) -> TrunkPairs:
    """The union is the maximum of multisets: a mutual pair counts once."""
    low, high = np.minimum(edges.first, edges.second), np.maximum(edges.first, edges.second)
    return trunk_pairs(restricted(edges, first_of_each(low, high)), offsets)


@instead_of(trunk_pairs, "CC-TRUNK-EDGES")
def a_set_of_values(edges: Edges, offsets: Array) -> TrunkPairs:
    """W_ab is a set: equal weights of different pairs collapse."""
    g, h = trunks_of(edges, offsets)
    once = first_of_each(np.minimum(g, h), np.maximum(g, h), edges.weight)
    return trunk_pairs(restricted(edges, once), offsets)


@instead_of(trunk_pairs, "CC-TRUNK-EDGES")
def forward_edges_alone(edges: Edges, offsets: Array) -> TrunkPairs:
    """Only edges from the earlier trunk to the later one count."""
    return trunk_pairs(restricted(edges, edges.first < edges.second), offsets)


@instead_of(trunk_pairs, "CC-TRUNK-EDGES")
def summed_backwards(edges: Edges, offsets: Array) -> TrunkPairs:
    """Weights are added in the reverse of E's order."""
    return trunk_pairs(Edges(edges.first[::-1], edges.second[::-1], edges.weight[::-1]), offsets)


def pruned(W: Array, kept: Array) -> tuple[Array, Array]:
    index = np.flatnonzero(kept)
    return W[index], index


def unpruned(pairs: TrunkPairs, sizes: Array) -> Array:
    W: Array = pairs.total / pairs.edges * np.sqrt(pairs.edges / (sizes[pairs.a] * sizes[pairs.b]))
    return W


@instead_of(trunk_weights, "CC-TRUNK-WEIGHT")
def tau_edge_survives(pairs: TrunkPairs, sizes: Array, tau_edge: float) -> tuple[Array, Array]:
    """A weight equal to tau_edge is kept."""
    W = unpruned(pairs, sizes)
    return pruned(W, tau_edge <= W)


@instead_of(trunk_weights, "CC-TRUNK-WEIGHT")
def density_without_root(pairs: TrunkPairs, sizes: Array, tau_edge: float) -> tuple[Array, Array]:
    """The density enters as it is, without its square root."""
    W = pairs.total / (sizes[pairs.a] * sizes[pairs.b])
    return pruned(W, tau_edge < W)


@instead_of(trunk_weights, "CC-TRUNK-WEIGHT")
def mean_alone_pruned(pairs: TrunkPairs, sizes: Array, tau_edge: float) -> tuple[Array, Array]:
    """tau_edge bounds the mean weight, before the density."""
    return pruned(unpruned(pairs, sizes), tau_edge < pairs.total / pairs.edges)


@instead_of(trunk_weights, "CC-TRUNK-WEIGHT")
def weight_at_most_one(pairs: TrunkPairs, sizes: Array, tau_edge: float) -> tuple[Array, Array]:
    """The weight is held to 1."""
    W = np.minimum(unpruned(pairs, sizes), 1.0)
    return pruned(W, tau_edge < W)


@instead_of(trunk_weights, "CC-TRUNK-WEIGHT")
def density_of_ordered_pairs(pairs: TrunkPairs, sizes: Array, tau_edge: float) -> tuple[Array, Array]:
    """The density counts both orientations as possible: |W_ab| / (2 |g_a| |g_b|)."""
    W = unpruned(pairs, sizes) * np.sqrt(0.5)
    return pruned(W, tau_edge < W)


@instead_of(degree, "CC-DEGREE")
def neighbours_counted(indptr: Array, weights: Array) -> Array:
    """The degree is the number of neighbours."""
    return np.diff(indptr).astype(np.float64)


@instead_of(degree, "CC-DEGREE")
def mean_weight(indptr: Array, weights: Array) -> Array:
    """The degree is the mean weight of the trunk's edges."""
    return degree(indptr, weights) / np.maximum(1, np.diff(indptr))


@instead_of(degree, "CC-DEGREE")
def from_the_last_neighbour(indptr: Array, weights: Array) -> Array:
    """Weights are added by descending neighbour."""
    backwards = [weights[a:b][::-1] for a, b in itertools.pairwise(indptr)]
    return degree(indptr, np.concatenate([np.empty(0), *backwards]))


@instead_of(crystallization, "CC-CRYSTALLIZATION")
def sample_deviation(deg: Array, s: float, epsilon: float) -> Array:
    """sigma is the sample standard deviation; 1 for one trunk."""
    mu, sigma = moments(deg, 0.0)
    sigma *= np.sqrt(len(deg) / max(1, len(deg) - 1))
    return logistic(s * ((deg - mu) / (sigma if sigma >= epsilon else 1.0)))


@instead_of(crystallization, "CC-CRYSTALLIZATION")
def at_least_epsilon(deg: Array, s: float, epsilon: float) -> Array:
    """sigma is max(sigma, epsilon), as Eq. 27 prints it."""
    mu, sigma = moments(deg, 0.0)
    return logistic(s * ((deg - mu) / max(sigma, epsilon)))


@instead_of(crystallization, "CC-CRYSTALLIZATION")
def epsilon_added(deg: Array, s: float, epsilon: float) -> Array:
    """Epsilon is added to sigma."""
    mu, sigma = moments(deg, 0.0)
    return logistic(s * ((deg - mu) / (sigma + epsilon)))


@instead_of(crystallization, "CC-CRYSTALLIZATION")
def in_single_precision(deg: Array, s: float, epsilon: float) -> Array:
    """D is float32, where it saturates to 1 early."""
    return crystallization(deg, s, epsilon).astype(np.float32).astype(np.float64)


@instead_of(crystallization, "CC-CRYSTALLIZATION")
def essay_steepness(deg: Array, s: float, epsilon: float) -> Array:
    """s is 2, as in the author's essay."""
    return crystallization(deg, 2.0, epsilon)


@instead_of(crystallization, "CC-CRYSTALLIZATION")
def centred_on_the_median(deg: Array, s: float, epsilon: float) -> Array:
    """Degrees are centred on their median."""
    return logistic(s * ((deg - np.median(deg)) / moments(deg, epsilon)[1]))


@instead_of(logistic, "CC-CRYSTALLIZATION")
def exponential_that_overflows(x: Array) -> Array:
    """The logistic as Eq. 27 prints it, whose exponential overflows far below the mean."""
    with np.errstate(over="ignore"):
        return 1.0 / (1.0 + np.exp(-x))
