"""Stage S4: the trunk graph (Section 3.5)."""

import numpy as np

from accelerated.numba_cpu.compiled import compiled
from spec.arrays import IntMatrix, IntVector, Matrix, Vector
from spec.records import CoAttention

__all__ = ["trunk_graph"]


def trunk_graph(
    coattention: CoAttention, offsets: IntVector, tau_edge: float,
) -> tuple[IntVector, IntVector, Vector, Vector]:
    """Return the symmetric trunk graph in CSR form (indptr, indices, weights), and the degree of each trunk.

    Implements: CC-TRUNK-EDGES, CC-TRUNK-WEIGHT, CC-DEGREE
    """
    start = coattention.start
    trunk = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    rows, columns, W = surviving_pairs(
        trunk, np.diff(offsets), coattention.intra - start, coattention.intra_weight, coattention.cross - start,
        coattention.cross_weight, tau_edge,
    )
    graph: tuple[IntVector, IntVector, Vector, Vector] = symmetric_csr(rows, columns, W, len(offsets) - 1)
    return graph


@compiled()
def bucket_edges(trunk: IntVector, neighbours: IntMatrix, where: IntVector) -> None:
    """Write the number of edges whose lower trunk is g to element g + 1 of `where`."""
    for i in range(neighbours.shape[0]):
        for rank in range(neighbours.shape[1]):
            j = neighbours[i, rank]
            if j >= 0 and trunk[j] != trunk[i]:
                where[min(trunk[i], trunk[j]) + 1] += 1


@compiled()
def place_edges(
    trunk: IntVector, neighbours: IntMatrix, weights: Matrix, cursor: IntVector, other: IntVector, weight: Vector,
) -> None:
    """Write each edge into the bucket of its lower trunk, in the order of E."""
    for i in range(neighbours.shape[0]):
        for rank in range(neighbours.shape[1]):
            j = neighbours[i, rank]
            if j >= 0 and trunk[j] != trunk[i]:
                low = min(trunk[i], trunk[j])
                other[cursor[low]] = max(trunk[i], trunk[j])
                weight[cursor[low]] = weights[i, rank]
                cursor[low] += 1


@compiled()
def surviving_pairs(
    trunk: IntVector, sizes: IntVector, intra: IntMatrix, intra_weight: Matrix, cross: IntMatrix,
    cross_weight: Matrix, tau_edge: float,
) -> tuple[IntVector, IntVector, Vector]:
    """Return the pairs of trunks (a, b), a < b, whose weight exceeds tau_edge. A counting sort orders them by `a`."""
    m = len(sizes)
    where = np.zeros(m + 1, dtype=np.int64)
    bucket_edges(trunk, intra, where)
    bucket_edges(trunk, cross, where)
    where = np.cumsum(where)
    other = np.empty(where[m], dtype=np.int64)
    weight = np.empty(where[m])
    cursor = where[:m].copy()
    place_edges(trunk, intra, intra_weight, cursor, other, weight)
    place_edges(trunk, cross, cross_weight, cursor, other, weight)
    rows = np.empty(where[m], dtype=np.int64)
    columns = np.empty(where[m], dtype=np.int64)
    W = np.empty(where[m])
    total = np.zeros(m)
    number = np.zeros(m, dtype=np.int64)
    result = 0
    for a in range(m):
        touched = other[where[a] : where[a + 1]]
        for e in range(where[a], where[a + 1]):
            total[other[e]] += weight[e]
            number[other[e]] += 1
        for b in touched:
            if number[b]:
                w = total[b] / number[b] * np.sqrt(number[b] / (sizes[a] * sizes[b]))
                if w > tau_edge:
                    rows[result], columns[result], W[result] = a, b, w
                    result += 1
                total[b] = 0.0
                number[b] = 0
    return rows[:result], columns[:result], W[:result]


@compiled()
def symmetric_csr(
    a: IntVector, b: IntVector, W: Vector, m: int,
) -> tuple[IntVector, IntVector, Vector, Vector]:
    """Return the symmetric CSR matrix with ascending columns, and the row sums (added in the order of the columns)."""
    indptr = np.zeros(m + 1, dtype=np.int64)
    for e in range(len(W)):
        indptr[a[e] + 1] += 1
        indptr[b[e] + 1] += 1
    indptr = np.cumsum(indptr)
    indices = np.empty(2 * len(W), dtype=np.int64)
    weights = np.empty(2 * len(W))
    degree = np.zeros(m)
    cursor = indptr[:m].copy()
    for e in range(len(W)):
        for row, column in ((a[e], b[e]), (b[e], a[e])):
            indices[cursor[row]] = column
            weights[cursor[row]] = W[e]
            cursor[row] += 1
    for g in range(m):
        low, high = indptr[g], indptr[g + 1]
        order = np.argsort(indices[low:high])
        indices[low:high] = indices[low:high][order]
        weights[low:high] = weights[low:high][order]
        for e in range(low, high):
            degree[g] += weights[e]
    return indptr, indices, weights, degree
