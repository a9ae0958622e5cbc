"""Functions that compute attention weights on keys. Several scorers of this package use these functions."""

from collections.abc import Iterator

import numpy as np

from reference.crystalcache.coattention import attention
from spec.arrays import Cube, Float64, Int64, IntVector, Matrix, Vector
from spec.policy import DeviceArray, LayerView

__all__ = [
    "ROWS", "accumulated_attention", "average_pool", "group_maximum", "group_mean", "group_sum", "largest_attention",
    "max_pool", "mean_rotation", "observed_attention", "received_attention", "softmax", "tables", "turned_back",
    "unrotated", "wide", "wide_sinks",
]


ROWS = 32  # queries at a time, so that the weights of one step fit in the CPU cache


def wide(array: DeviceArray) -> Float64[Cube, "H n d"]:
    """Return an array or a tensor as a float64 array in CPU memory."""
    cube: Cube = np.asarray(array.double().cpu() if hasattr(array, "cpu") else array, dtype=np.float64)
    return cube


def wide_sinks(sinks: DeviceArray | None) -> Float64[Vector, " H"] | None:
    """Return a layer's sink logits as a float64 array in CPU memory, or None if the layer has no sink logits."""
    return None if sinks is None else wide(sinks[:, None, None]).ravel()


def observed_attention(view: LayerView, W: int) -> Float64[Cube, "H w n"]:
    """Return the softmax weights of the last w = min(W, n) queries on all n keys. Attention is causal.

    Implements: PO-OBSERVED-ATTENTION

    Source: SnapKV, Section 4 (the observation window). The softmax denominator includes the keys of the window.
    """
    k = wide(view.k)
    n = k.shape[1]
    q = wide(view.q)[:, -min(W, n) :]
    positions = np.arange(n)
    return attention(q, k, positions[n - q.shape[1] :], positions, view.scaling, view.softcap, wide_sinks(view.sinks))


def accumulated_attention(view: LayerView) -> Float64[Matrix, "H n"]:
    """Return the attention that each key receives from each query head, summed over all captured queries.

    Implements: PO-OBSERVED-ATTENTION

    Source: Section 4 of H2O, and Eq. 5 of CrystalCache. Earlier keys receive attention from more queries. The sum is
    not corrected for the number of queries.
    """
    total = np.zeros((view.q.shape[0], view.k.shape[1]))
    for _, visible, A in _blocks(view):
        total[:, visible] += A.sum(axis=1)
    return total


def _blocks(view: LayerView) -> Iterator[tuple[slice, slice, Float64[Cube, "H rows visible"]]]:
    """Split the queries into runs. For each run, yield the queries' slice, the attended keys' slice and the weights."""
    q, k, sinks = wide(view.q), wide(view.k), wide_sinks(view.sinks)
    positions, before = np.arange(k.shape[1]), k.shape[1] - q.shape[1]
    for first in range(0, q.shape[1], ROWS):
        rows = slice(first, first + ROWS)
        asked = positions[before:][rows]
        visible = slice(int(asked[-1]) + 1)
        yield rows, visible, attention(
            q[:, rows], k[:, visible], asked, positions[visible], view.scaling, view.softcap, sinks
        )


def received_attention(
    q: DeviceArray, k: DeviceArray, scaling: float, softcap: float | None, sinks: DeviceArray | None = None,
) -> Float64[Matrix, "H_kv n"]:
    """Return the attention that each key of each KV head receives, summed over all queries and query heads.

    This function is the reference of the backend stage `received_attention`.

    Implements: PO-OBSERVED-ATTENTION
    """
    return group_sum(accumulated_attention(LayerView(q, k, None, scaling, softcap, sinks=sinks)), len(k))


def largest_attention(
    q: DeviceArray, k: DeviceArray, norms: Float64[Vector, " m"], scaling: float, softcap: float | None,
    sinks: DeviceArray | None = None,
) -> Float64[Matrix, "H n"]:
    """Divide each query's attention weights by the query's norm, and return the largest quotient of each key.

    `norms` has one number per query. This function is the reference of the backend stage `largest_attention`.

    Implements: PO-KVZIP, PO-KVZIP-PLUS
    """
    largest = np.zeros((q.shape[0], k.shape[1]))
    for rows, visible, A in _blocks(LayerView(q, k, None, scaling, softcap, sinks=sinks)):
        largest_visible = largest[:, visible]
        np.maximum(largest_visible, (A / norms[rows, None]).max(axis=1), out=largest_visible)
    return largest


def softmax(
    x: Float64[Matrix, "rows n"], sinks: Float64[Vector, " rows"] | None = None,
) -> Float64[Matrix, "rows n"]:
    """Return the softmax along each row. A sink logit adds one term to the denominator of a row."""
    logits = x if sinks is None else np.column_stack([x, sinks])
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    weights: Matrix = (powers / powers.sum(axis=1, keepdims=True))[:, : x.shape[1]]
    return weights


def group_sum(X: Float64[Matrix, "H n"], H_kv: int) -> Float64[Matrix, "H_kv n"]:
    """Return the sum of X over the query heads of each KV head."""
    total: Matrix = X.reshape(H_kv, len(X) // H_kv, X.shape[1]).sum(axis=1)
    return total


def group_mean(X: Float64[Matrix, "H n"], H_kv: int) -> Float64[Matrix, "H_kv n"]:
    """Return the mean of X over the query heads of each KV head."""
    return group_sum(X, H_kv) / (len(X) // H_kv)


def group_maximum(X: Float64[Cube, "H w n"], H_kv: int) -> Float64[Cube, "H_kv w n"]:
    """Return the elementwise maximum of X over the query heads of each KV head."""
    largest: Cube = X.reshape(H_kv, len(X) // H_kv, *X.shape[1:]).max(axis=1)
    return largest


def max_pool(x: Float64[Matrix, "rows n"], kernel: int) -> Float64[Matrix, "rows n"]:
    """Replace each entry of a row by the maximum of the `kernel` entries centred on this entry.

    Positions beyond the ends of a row are ignored.

    Implements: PO-POOL

    Source: SnapKV, Section 4 (clustering by pooling). `kernel` is odd.
    """
    largest: Matrix = _around(x, kernel, -np.inf).max(axis=2)
    return largest


def average_pool(x: Float64[Matrix, "rows n"], kernel: int) -> Float64[Matrix, "rows n"]:
    """Replace each entry of a row by the sum of the `kernel` entries centred on this entry, divided by `kernel`.

    Positions beyond the ends of a row count as 0.

    Implements: PO-POOL

    Source: SnapKV, Section 4. `kernel` is odd.
    """
    total: Matrix = _around(x, kernel, 0.0).sum(axis=2)
    return total / kernel


def _around(x: Float64[Matrix, "rows n"], kernel: int, outside: float) -> Float64[Cube, "rows n kernel"]:
    padded = np.pad(x, ((0, 0), (kernel // 2, kernel // 2)), constant_values=outside)
    around: Cube = np.stack([padded[:, at : at + x.shape[1]] for at in range(kernel)], axis=2)
    return around


def tables(
    positions: Int64[IntVector, " n"], inv_freq: Float64[Vector, " half"],
) -> tuple[Float64[Matrix, "n half"], Float64[Matrix, "n half"]]:
    """Return the cosines and sines of the RoPE angles at the given positions."""
    angle = positions[:, None] * inv_freq
    return np.cos(angle), np.sin(angle)


def turned_back(
    x: Float64[Cube, "H n d"], cos: Float64[Matrix, "n half"], sin: Float64[Matrix, "n half"],
) -> Float64[Cube, "H n d"]:
    """Return the vectors x after undoing the RoPE rotation of each token."""
    first, second = np.split(x, 2, axis=2)
    back: Cube = np.concatenate([first * cos + second * sin, second * cos - first * sin], axis=2)
    return back


def unrotated(
    x: Float64[Cube, "H n d"], positions: Int64[IntVector, " n"], inv_freq: Float64[Vector, " half"], factor: float,
) -> Float64[Cube, "H n d"]:
    """Return the vectors x before RoPE: undo the rotation of each token, then divide by the attention factor."""
    return turned_back(x, *tables(positions, inv_freq)) / factor


def mean_rotation(
    positions: Int64[IntVector, " m"], inv_freq: Float64[Vector, " half"], factor: float,
) -> Float64[Matrix, "d d"]:
    """Return the mean of the RoPE rotation matrices over the given positions, multiplied by the attention factor."""
    angle = positions[:, None] * inv_freq
    cos, sin = factor * np.cos(angle).mean(axis=0), factor * np.sin(angle).mean(axis=0)
    R: Matrix = np.block([[np.diag(cos), np.diag(-sin)], [np.diag(sin), np.diag(cos)]])
    return R
