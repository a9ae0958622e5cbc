"""Decode at full size: activation, pulses, the Hebbian update, key norms, and the graph of a segment."""

from itertools import pairwise
from typing import Any

import numpy as np

from conformance.oracles.scale.stages import Columns, pair_weights, pairs
from spec.arrays import BoolVector, IntVector, Vector
from spec.parameters import CrystalCacheParameters

Rows = list[list[tuple[int, float]]]
Weights = tuple[IntVector, IntVector, Vector]


def inverse_norms(k: Any) -> Vector:
    """Return the mean inverse norms of CC-KEY-NORM."""
    lengths = np.sqrt((k.astype(np.float64) ** 2).sum(axis=2))
    with np.errstate(divide="ignore"):
        result: Vector = (1 / lengths).sum(axis=0) / len(k)
    return result


def activation(norms: Vector, offsets: IntVector, theta: float) -> BoolVector:
    """Return the active trunks by CC-ETA and CC-ACTIVATION. Members are counted by differences of exact sums."""
    finite = norms[np.isfinite(norms)]
    eta = np.where(np.isfinite(norms), norms / (finite.max() if len(finite) else 1.0), 1.0)
    above = np.concatenate([[0], np.cumsum(eta > theta)])
    result: BoolVector = 2 * (above[offsets[1:]] - above[offsets[:-1]]) > np.diff(offsets)
    return result


def rows_of(W: Weights) -> Rows:
    """Return neighbours and weights of each trunk."""
    indptr, indices, weights = W[0].tolist(), W[1].tolist(), W[2].tolist()
    return [list(zip(indices[a:b], weights[a:b], strict=True)) for a, b in pairwise(indptr)]


def pulses(source: int, rows: Rows, p: CrystalCacheParameters) -> dict[int, float]:
    """Return the pulses of CC-PULSE by trunk."""
    arrived, level = {source: 1.0}, {source: 1.0}
    for _ in range(p.max_hops):
        following: dict[int, float] = {}
        for g, pulse in level.items():
            for h, w in rows[g]:
                sent = pulse * w * p.gamma_hop
                if h not in arrived and sent >= p.tau_pulse and sent > following.get(h, -1.0):
                    following[h] = sent
        if not following:
            break
        arrived.update(following)
        level = following
    return arrived


def resonance(D: Vector, W: Weights, active: BoolVector, p: CrystalCacheParameters) -> Vector:
    """Return D after CC-RESONANCE of every active trunk in turn."""
    after, rows = D.tolist(), rows_of(W)
    for source in np.flatnonzero(active).tolist():
        for g, pulse in pulses(source, rows, p).items():
            after[g] = min(1.0, after[g] + p.alpha_res * pulse * (1.0 - after[g]))
    return np.array(after)


def hebbian(W: Weights, active: BoolVector, p: CrystalCacheParameters) -> Weights:
    """Return W after CC-HEBB."""
    indptr, indices, weights = W
    row = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    together = active[row] & active[indices]
    after = np.where(together, np.minimum(1.0, weights + p.eta_Hebb), p.gamma_decay * weights)
    stays = after > p.tau_edge
    number = np.bincount(row[stays], minlength=len(indptr) - 1)
    return np.concatenate([[0], np.cumsum(number)]).astype(np.int64), indices[stays], after[stays]


def segment_graph(
    E: Columns, bounds: IntVector, sizes: IntVector, W: Weights, p: CrystalCacheParameters,
) -> tuple[Weights, Vector]:
    """Return the graph of CC-SEGMENT-GRAPH as CSR, and the weight of every new pair before the prune.

    The weights before the prune are for pairs near tau_edge.
    """
    old, m = len(W[0]) - 1, len(sizes)
    result = pairs(E, bounds[:-1], old)
    w = pair_weights(result, sizes)
    stays = w > p.tau_edge
    a, b, fresh = result.a[stays], result.b[stays], w[stays]
    row = np.repeat(np.arange(old), np.diff(W[0]))
    rows, columns = np.concatenate([row, a, b]), np.concatenate([W[1], b, a])
    values = np.concatenate([W[2], fresh, fresh])
    order = np.lexsort((columns, rows))
    number = np.bincount(rows, minlength=m)
    return (np.concatenate([[0], np.cumsum(number)]).astype(np.int64), columns[order], values[order]), w
