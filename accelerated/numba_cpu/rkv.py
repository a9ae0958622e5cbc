"""R-KV's score, in the precision of the keys but at least float32.

Each block of keys is multiplied by the earlier keys only. One compiled pass over the product finds the last similar key
of the rows and of the columns. A product has at most FLOATS numbers, or 16 rows.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from accelerated.numba_cpu.compiled import compiled
from accelerated.numba_cpu.threads import threads
from spec.arrays import Cube, Matrix, Vector
from spec.policy import LayerView

__all__ = ["SCORES"]

EPSILON = 1e-8
SIMILAR = np.float32(0.5)
FLOATS = 2**18  # numbers in a product: 1 MiB stays in the cache of a core


def rkv_score(view: LayerView, W: int, kernel: int, lam: float) -> Matrix:
    """Return R-KV's score, as `rkv_score` of the reference does."""
    k, q = np.asarray(view.k), np.asarray(view.q)[:, -W:]
    k = k.astype(np.promote_types(k.dtype, np.float32), copy=False)
    past = k.shape[1] - q.shape[1]
    result: Matrix = np.full((len(k), k.shape[1]), np.nan)
    if past:
        with threads() as pool:
            R = np.stack(list(pool.map(redundancy, k)))
        result[:, :past] = lam * importance(q.astype(k.dtype), k[:, :past], view, kernel) - (1 - lam) * R[:, :past]
    return result


def importance(q: Cube, past: Cube, view: LayerView, kernel: int) -> Matrix:
    """Return the pooled mean attention of the queries q (H, w, d) to the keys before the window, (H_kv, past)."""
    H_kv, n, d = past.shape
    S = np.matmul(q.reshape(H_kv, -1, d), past.transpose(0, 2, 1)).reshape(H_kv, -1, q.shape[1], n)
    S *= view.scaling
    if view.softcap is not None:
        S = view.softcap * np.tanh(S / view.softcap)
    sinks = None if view.sinks is None else np.asarray(view.sinks).reshape(H_kv, -1).max(axis=1)[:, None, None]
    A = softmax(S.max(axis=1), sinks).mean(axis=1)
    padded = np.pad(A, ((0, 0), (kernel // 2, kernel // 2)))
    pooled: Matrix = np.maximum.reduce([padded[:, i : i + n] for i in range(kernel)])
    return pooled


def softmax(S: Any, sinks: Any = None) -> Any:
    """Return the softmax of logits along the last axis. A sink is one more logit, without a column in the result."""
    top = S.max(axis=-1, keepdims=True)
    if sinks is not None:
        top = np.maximum(top, sinks.astype(S.dtype))
    E = np.exp(S - top)
    total = E.sum(axis=-1, keepdims=True)
    return E / (total if sinks is None else total + np.exp(sinks - top))


def redundancy(k: Matrix) -> Vector:
    """Return the softmax of each key's mean cosine with all different keys (n, d), less the excluded cosines.

    A sum of cosines is a product with the sum of the unit keys.
    """
    unit = k / (np.sqrt(np.einsum("nd,nd->n", k, k))[:, None] + k.dtype.type(EPSILON))
    column = last_similar(unit)
    excluded = np.where(column == np.arange(len(k)), 0.0, np.einsum("nd,nd->n", unit, unit[column]))
    total = unit @ unit.sum(axis=0, dtype=np.float64).astype(unit.dtype) - np.einsum("nd,nd->n", unit, unit)
    mean: Vector = (total - np.bincount(column, excluded, len(k))) / len(k)
    R: Vector = softmax(mean)
    return R


def last_similar(unit: Matrix) -> NDArray[np.int32]:
    """Return the index of the last different key with a cosine above 1/2, or 0 if there is none, for each key, (n,)."""
    n = len(unit)
    size = max(16, FLOATS // n)
    columns = np.ascontiguousarray(unit.T)  # faster in OpenBLAS than the transposed view
    last, product = np.zeros(n, np.int32), np.empty(size * n, unit.dtype)
    for first in range(0, n, size):
        rows, end = unit[first : first + size], min(n, first + size)
        C = np.matmul(rows, columns[:, :end], out=product[: len(rows) * end].reshape(len(rows), end))
        mark_similar(C, first, last)
    return last


@compiled(nogil=True)
def mark_similar(C: Matrix, first: int, last: NDArray[np.int32]) -> None:
    """Update the last similar key of each key. Row i of C has the cosines of key `first + i` with the earlier keys."""
    for i in range(len(C)):
        row, key, latest = C[i], np.int32(first + i), np.int32(0)
        for j in range(first + i):
            similar = np.float32(row[j]) > SIMILAR
            last[j] = key if similar else last[j]
            latest = max(latest, np.int32(j) if similar else np.int32(0))
        last[first + i] = latest


SCORES = {"rkv_score": rkv_score}
