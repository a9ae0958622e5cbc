"""Decode: edges between trunks that are active together grow, all others fade (Section 3.8(c))."""

import numpy as np

from spec.arrays import Bool, BoolVector
from spec.decode import TrunkWeights
from spec.parameters import CrystalCacheParameters

__all__ = ["hebbian", "static_graph"]


def hebbian(
    W: TrunkWeights, active: Bool[BoolVector, " m"], parameters: CrystalCacheParameters,
) -> TrunkWeights:
    """W with existing edges updated, then pruned as Eq. 25 prunes.

    Implements: CC-HEBB

    Source: Eq. 39 where both ends are active, Eq. 40 elsewhere. No edge is made.
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
    """W as it is: Table 10, "static graph".

    Implements: CC-HEBB
    """
    return W
