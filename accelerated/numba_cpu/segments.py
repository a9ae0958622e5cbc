"""Stage S4 for a later segment. An edge of a later segment can reach an older trunk."""

import numpy as np

from accelerated.numba_cpu.compiled import compiled
from accelerated.numba_cpu.crystallization import crystallization
from accelerated.numba_cpu.graph import surviving_pairs, symmetric_csr
from spec.arrays import IntMatrix, IntVector, Matrix, Vector
from spec.decode import TrunkWeights
from spec.parameters import CrystalCacheParameters
from spec.records import CoAttention

__all__ = ["segment_crystallization", "segment_graph"]


def segment_graph(
    coattention: CoAttention, bounds: IntVector, sizes: IntVector, W: TrunkWeights, tau_edge: float,
) -> TrunkWeights:
    """Return the weights W of the old and the new trunks. The weights between two old trunks are unchanged.

    Implements: CC-SEGMENT-GRAPH

    The weights of a new trunk are computed from the edges of the segment. The kernel of S4 runs on a list of nodes:
    first the old trunks, then the tokens of the segment.
    """
    old = len(W.indptr) - 1
    node_trunk = np.concatenate([np.arange(old), old + np.repeat(np.arange(len(sizes) - old), np.diff(bounds[old:]))])
    nodes = [to_nodes(neighbours, bounds, old) for neighbours in (coattention.intra, coattention.cross)]
    new_a, new_b, new_W = surviving_pairs(
        node_trunk, sizes, nodes[0], without_owner(coattention.intra_weight, old), nodes[1],
        without_owner(coattention.cross_weight, old), tau_edge,
    )
    row = np.repeat(np.arange(old), np.diff(W.indptr))
    once = row < W.indices
    indptr, indices, weights, _ = symmetric_csr(
        np.concatenate([row[once], new_a]), np.concatenate([W.indices[once], new_b]),
        np.concatenate([W.weights[once], new_W]), len(sizes),
    )
    return TrunkWeights(indptr, indices, weights)


def segment_crystallization(degree: Vector, old: int, parameters: CrystalCacheParameters) -> Vector:
    """Return D of all trunks except the first `old` trunks. mu and sigma are computed over all trunks.

    Implements: CC-SEGMENT-D
    """
    if parameters.graph == "zero":
        return np.zeros(len(degree) - old)
    D: Vector = crystallization(degree, float(parameters.s), float(parameters.epsilon))
    return D[old:]


@compiled()
def to_nodes(neighbours: IntMatrix, bounds: IntVector, old: int) -> IntMatrix:
    """Return the node index for each absolute position. The first `old` rows, for old trunks, have no neighbours."""
    n, k = neighbours.shape
    nodes = np.full((old + n, k), -1, dtype=np.int64)
    start = bounds[old]
    for i in range(n):
        for rank in range(k):
            j = neighbours[i, rank]
            if j >= start:
                nodes[old + i, rank] = old + j - start
            elif j >= 0:
                nodes[old + i, rank] = np.searchsorted(bounds, j, side="right") - 1
    return nodes


def without_owner(weights: Matrix, old: int) -> Matrix:
    """Return the weights (n, k) after `old` rows of zeros for the old trunks."""
    padded: Matrix = np.zeros((old + weights.shape[0], weights.shape[1]))
    padded[old:] = weights
    return padded
