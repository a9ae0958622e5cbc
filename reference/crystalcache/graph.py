"""S4: the trunk graph (Section 3.5)."""

from typing import NamedTuple

import numpy as np

from spec.arrays import Float64, Int64, IntVector, Vector
from spec.records import Edges

__all__ = ["TrunkPairs", "degree", "symmetric_csr", "trunk_pairs", "trunk_weights"]


class TrunkPairs(NamedTuple):
    """Number and sum of the edge weights between two trunks a and b (the multiset W_ab of Eq. 24).

    A pair of trunks a < b has one row if at least one edge is between them. Rows are sorted by (a, b).
    """

    a: IntVector
    b: IntVector
    edges: IntVector
    total: Vector


def trunk_pairs(edges: Edges, offsets: Int64[IntVector, " m_and_one"]) -> TrunkPairs:
    """Return the number of edges between each pair of trunks, and the sum of the weights of these edges.

    Implements: CC-TRUNK-EDGES

    Source: Eq. 24. If two tokens are neighbours of each other, both edges count. The weights of a pair of trunks are
    added in the order of the edges E.
    """
    g = np.searchsorted(offsets, edges.first, side="right") - 1
    h = np.searchsorted(offsets, edges.second, side="right") - 1
    between = g != h
    m = len(offsets) - 1
    key = np.minimum(g, h)[between] * m + np.maximum(g, h)[between]
    pair, inverse = np.unique(key, return_inverse=True)
    number = np.bincount(inverse, minlength=len(pair)).astype(np.int64)
    total: Vector = np.bincount(inverse, weights=edges.weight[between], minlength=len(pair)).astype(np.float64)
    return TrunkPairs(pair // m, pair % m, number, total)


def trunk_weights(
    pairs: TrunkPairs, sizes: Int64[IntVector, " m"], tau_edge: float,
) -> tuple[Float64[Vector, " pairs"], IntVector]:
    """Return the trunk weights W(g_a, g_b) above tau_edge, and the index of each returned pair in `pairs`.

    Implements: CC-TRUNK-WEIGHT

    Source: Eq. 25. W is the mean edge weight, multiplied by the square root of the edge density. The edge density is
    the number of edges divided by the product of the sizes of both trunks.
    """
    mean = pairs.total / pairs.edges
    W: Vector = mean * np.sqrt(pairs.edges / (sizes[pairs.a] * sizes[pairs.b]))
    kept = np.flatnonzero(tau_edge < W)
    return W[kept], kept


def symmetric_csr(
    a: IntVector, b: IntVector, W: Float64[Vector, " pairs"], m: int,
) -> tuple[IntVector, IntVector, Vector]:
    """Return the symmetric trunk graph in CSR form (indptr, indices, weights), with ascending columns in each row."""
    row, column, weight = np.concatenate([a, b]), np.concatenate([b, a]), np.concatenate([W, W])
    order = np.lexsort((column, row))
    indptr = np.searchsorted(row[order], np.arange(m + 1)).astype(np.int64)
    return indptr, column[order], weight[order]


def degree(indptr: Int64[IntVector, " m_and_one"], weights: Float64[Vector, " edges"]) -> Float64[Vector, " m"]:
    """Return the weighted degree of each trunk: the trunk's edge weights, added in ascending order of neighbours.

    Implements: CC-DEGREE

    Source: Eq. 26. Protected trunks also have a degree, and count as neighbours.
    """
    m = len(indptr) - 1
    row = np.repeat(np.arange(m), np.diff(indptr))
    deg: Vector = np.bincount(row, weights=weights, minlength=m).astype(np.float64)
    return deg
