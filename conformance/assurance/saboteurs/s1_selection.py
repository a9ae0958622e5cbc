"""S1, choice: wrong readings of Eq. 13 to 15."""

from collections.abc import Callable

import numpy as np

from conformance.assurance.saboteurs.registry import Array, instead_of, method_instead_of
from reference.crystalcache.coattention import cross_neighbours, intra_neighbours, strongest
from spec.parameters import CrystalCacheParameters
from spec.records import CoAttention, Edges

__all__: list[str] = []

Chosen = tuple[Array, Array]
Choice = Callable[[Array, int, float], Chosen]


def choose(weights: Array, order: Array, passes: Array, k: int) -> Chosen:
    """The first k columns in `order` of those that pass; `passes` is by column."""
    index = np.full((len(weights), k), -1, dtype=np.int64)
    weight = np.zeros((len(weights), k))
    for row, (columns, good) in enumerate(zip(order, passes, strict=True)):
        best = [j for j in columns.tolist() if good[j]][:k]
        index[row, : len(best)], weight[row, : len(best)] = best, weights[row, best]
    return index, weight


def in_full_precision(weights: Array, k: int, tau: float) -> Chosen:
    return choose(weights, np.argsort(-weights, axis=1, kind="stable"), weights > tau, k)


def weakly(weights: Array, k: int, tau: float) -> Chosen:
    key = weights.astype(np.float32)
    return choose(weights, np.argsort(-key, axis=1, kind="stable"), (key >= np.float32(tau)) & (key > 0), k)


def later_first(weights: Array, k: int, tau: float) -> Chosen:
    key = weights.astype(np.float32)
    order = np.argsort(key, axis=1, kind="stable")[:, ::-1]
    return choose(weights, order, key > np.float32(tau), k)


def rounded(weights: Array, k: int, tau: float) -> Chosen:
    return strongest(weights.astype(np.float32).astype(np.float64), k, tau)


def between_tokens(rows: Array, parameters: CrystalCacheParameters, choice: Choice) -> Chosen:
    cosine = np.matmul(rows, rows.T)
    np.fill_diagonal(cosine, -1.0)
    return choice(cosine, parameters.k_intra, parameters.tau_intra)


@instead_of(intra_neighbours, "CC-INTRA")
def self_among_the_candidates(rows: Array, parameters: CrystalCacheParameters) -> Chosen:
    """The token itself takes one of the k places and is left out afterwards."""
    cosine = np.matmul(rows, rows.T)
    index, weight = strongest(cosine, parameters.k_intra, parameters.tau_intra)
    itself = index == np.arange(len(rows))[:, None]
    order = np.argsort(itself, axis=1, kind="stable")
    index, weight = np.where(itself, -1, index), np.where(itself, 0.0, weight)
    return np.take_along_axis(index, order, axis=1), np.take_along_axis(weight, order, axis=1)


@instead_of(intra_neighbours, "CC-INTRA")
def compared_in_full_precision(rows: Array, parameters: CrystalCacheParameters) -> Chosen:
    """Cosines are compared as they are, so that their last bits decide."""
    return between_tokens(rows, parameters, in_full_precision)


@instead_of(intra_neighbours, "CC-INTRA")
def at_the_threshold(rows: Array, parameters: CrystalCacheParameters) -> Chosen:
    """A cosine equal to tau_intra is an edge."""
    return between_tokens(rows, parameters, weakly)


@instead_of(intra_neighbours, "CC-INTRA")
def later_neighbour_first(rows: Array, parameters: CrystalCacheParameters) -> Chosen:
    """Of equal cosines the higher index is chosen."""
    return between_tokens(rows, parameters, later_first)


@instead_of(intra_neighbours, "CC-INTRA")
def earlier_neighbours_alone(rows: Array, parameters: CrystalCacheParameters) -> Chosen:
    """Neighbours lie before the token only."""
    cosine = np.where(np.tri(len(rows), k=-1, dtype=np.bool_), np.matmul(rows, rows.T), -1.0)
    return strongest(cosine, parameters.k_intra, parameters.tau_intra)


@instead_of(intra_neighbours, "CC-INTRA")
def rounded_weight(rows: Array, parameters: CrystalCacheParameters) -> Chosen:
    """The edge stores the cosine as float32."""
    return between_tokens(rows, parameters, rounded)


@instead_of(cross_neighbours, "CC-CROSS")
def read_in_full_precision(earlier: Array, parameters: CrystalCacheParameters) -> Chosen:
    """Head means are compared as they are."""
    return in_full_precision(earlier, parameters.k_cross, parameters.tau_cross)


@instead_of(cross_neighbours, "CC-CROSS")
def equal_to_the_threshold(earlier: Array, parameters: CrystalCacheParameters) -> Chosen:
    """A weight equal to tau_cross is an edge."""
    return weakly(earlier, parameters.k_cross, parameters.tau_cross)


@instead_of(cross_neighbours, "CC-CROSS")
def later_source_first(earlier: Array, parameters: CrystalCacheParameters) -> Chosen:
    """Of equal weights the later source is chosen."""
    return later_first(earlier, parameters.k_cross, parameters.tau_cross)


@instead_of(cross_neighbours, "CC-CROSS")
def threshold_not_rounded(earlier: Array, parameters: CrystalCacheParameters) -> Chosen:
    """A weight as float32 is held against tau_cross as float64."""
    key = earlier.astype(np.float32)
    order = np.argsort(-key, axis=1, kind="stable")
    return choose(earlier, order, key.astype(np.float64) > parameters.tau_cross, parameters.k_cross)


@instead_of(cross_neighbours, "CC-CROSS")
def rounded_share(earlier: Array, parameters: CrystalCacheParameters) -> Chosen:
    """The edge stores the head mean as float32."""
    return rounded(earlier, parameters.k_cross, parameters.tau_cross)


def columns(found: CoAttention) -> tuple[Edges, Edges]:
    """The intra and the cross part of E."""
    owner, rank = np.nonzero(found.intra >= 0)
    late, late_rank = np.nonzero(found.cross >= 0)
    return (
        Edges(owner + found.start, found.intra[owner, rank], found.intra_weight[owner, rank]),
        Edges(found.cross[late, late_rank], late + found.start, found.cross_weight[late, late_rank]),
    )


def joined(a: Edges, b: Edges) -> Edges:
    return Edges(
        np.concatenate([a.first, b.first]), np.concatenate([a.second, b.second]),
        np.concatenate([a.weight, b.weight]),
    )


@method_instead_of(CoAttention, "edges", "CC-EDGES")
def pairs_without_direction(self: CoAttention) -> Edges:
    """E holds undirected pairs: two tokens that chose each other give one edge."""
    every = joined(*columns(self))
    low, high = np.minimum(every.first, every.second), np.maximum(every.first, every.second)
    _, once = np.unique(np.stack([low, high]), axis=1, return_index=True)
    kept = np.sort(once)
    return Edges(every.first[kept], every.second[kept], every.weight[kept])


@method_instead_of(CoAttention, "edges", "CC-EDGES")
def cross_edges_by_owner(self: CoAttention) -> Edges:
    """A cross edge is stored (owner, source), as an intra edge is."""
    intra, cross = columns(self)
    return joined(intra, Edges(cross.second, cross.first, cross.weight))


@method_instead_of(CoAttention, "edges", "CC-EDGES")
def intra_edges_by_position(self: CoAttention) -> Edges:
    """An intra edge is stored (earlier, later), as a cross edge is."""
    intra, cross = columns(self)
    low, high = np.minimum(intra.first, intra.second), np.maximum(intra.first, intra.second)
    return joined(Edges(low, high, intra.weight), cross)


@method_instead_of(CoAttention, "edges", "CC-EDGES")
def cross_edges_first(self: CoAttention) -> Edges:
    """Cross edges stand before intra edges."""
    intra, cross = columns(self)
    return joined(cross, intra)


@method_instead_of(CoAttention, "edges", "CC-EDGES")
def owners_in_the_segment(self: CoAttention) -> Edges:
    """Owners are counted from the segment's first token, not from position 0."""
    intra, cross = columns(self)
    return joined(
        Edges(intra.first - self.start, intra.second, intra.weight),
        Edges(cross.first, cross.second - self.start, cross.weight),
    )
