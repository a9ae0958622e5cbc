"""Decode: the weights of edges between two active trunks grow, and all other edge weights decay (Section 3.8(c))."""

import numpy as np

from spec.arrays import Bool, BoolVector
from spec.decode import TrunkWeights
from spec.parameters import CrystalCacheParameters

__all__ = ["hebbian", "static_graph"]


def hebbian(
    W: TrunkWeights, active: Bool[BoolVector, " m"], parameters: CrystalCacheParameters,
) -> TrunkWeights:
    """Return W after the Hebbian update of existing edges. Edges with weight <= tau_edge are then removed (Eq. 25).

    Implements: CC-HEBB

    Source: Eq. 39 for edges between two active trunks, Eq. 40 for all other edges. The Hebbian update adds no edge,
    because Section 3.8(c) reinforces the weights of edges, and two trunks without an edge have no weight.
    """
    m = len(active)
    row = np.repeat(np.arange(m), np.diff(W.indptr))
    together = active[row] & active[W.indices]
    grown, faded = np.minimum(1.0, W.weights + parameters.eta_Hebb), parameters.gamma_decay * W.weights
    weights = np.where(together, grown, faded)
    stays = parameters.tau_edge < weights
    degree = np.bincount(row[stays], minlength=m)
    indptr = np.concatenate([[0], np.cumsum(degree)]).astype(np.int64)
    return TrunkWeights(indptr, W.indices[stays], weights[stays])


def static_graph(
    W: TrunkWeights, active: Bool[BoolVector, " m"], parameters: CrystalCacheParameters,
) -> TrunkWeights:
    """Return W unchanged: the ablation "static graph".

    Implements: CC-HEBB

    Source: Section 6.4.
    """
    return W
