"""Attention that keys receive (H2O, TOVA, KVzip), in float32. A block of queries needs one product and one pass.

No (n, n) array is made, because the logits of a block have at most FLOATS entries, or one row per head. Sums inside a
block are float32, and sums over blocks are float64. The blocks are always added in PARTS separate sums, so the bits of
the result do not depend on the number of threads.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np
from numba import njit
from numpy.typing import NDArray

from accelerated.numba_cpu.compiled import compiled
from accelerated.numba_cpu.kernels import FAST, LOWEST, exp2, largest
from accelerated.numba_cpu.threads import plain, threads
from spec.arrays import Cube, IntVector, Matrix, Vector

__all__ = ["base_2", "largest_attention", "received_attention"]

Floats = NDArray[np.float32]
f32 = np.float32
LOG2_E = math.log2(math.e)
FLOATS = 2**20  # logits in a block (4 MiB per thread); with fewer logits, products of a long prompt have too few rows
MOST = 64  # queries in a block; each query is one term of a float32 sum
PARTS = 8  # separate sums of blocks for one head
FEW = 16  # up to this number of rows, the transposed product is faster


@dataclass(frozen=True)
class _Head:
    """Keys (n, d) of one KV head, and scaled queries (G, m, d) of the group's heads for the last m of the n tokens."""

    q: Floats
    k: Floats
    softcap: float | None
    sinks: Floats
    """Base-2 logits (G,) of the attention sinks of the group's heads, or the lowest float if there are no sinks."""

    def sums(self, first: int) -> Vector:
        """Return the attention that each key receives, (n,), from block `first` and every PARTS-th later block."""
        total = np.zeros(len(self.k))
        for _, reach, S in self._blocks(first):
            column = np.zeros(reach[-1], f32)
            add_weights(S, reach, self.sinks, column)
            total[: reach[-1]] += column
        return total

    def maxima(self, first: int, shares: Floats) -> Floats:
        """Return the maximum of (attention weight x query share) on each key, (G, n), over the blocks of `sums`."""
        most = np.zeros((len(self.q), len(self.k)), f32)
        for rows, reach, S in self._blocks(first):
            raise_weights(S, reach, self.sinks, shares[rows], most)
        return most

    def _blocks(self, first: int) -> Iterator[tuple[slice, IntVector, Floats]]:
        """Yield each block's rows, the number of keys that each query attends to, and all G heads' base-2 logits."""
        G, m, d = self.q.shape
        n = len(self.k)
        size = min(max(FLOATS // (G * n), 1), MOST)
        for row in range(first * size, m, PARTS * size):
            reach = np.arange(n - m + row + 1, n - m + min(row + size, m) + 1)
            S = np.matmul(self.q[:, row : row + size].reshape(-1, d), self.k[: reach[-1]].T)
            yield slice(row, row + size), reach, _capped(S, self.softcap)


def received_attention(
    q: NDArray[np.floating], k: NDArray[np.floating], scaling: float, softcap: float | None,
    sinks: NDArray[np.floating] | None = None,
) -> Matrix:
    """Return the attention (H_kv, n) that each key of k (H_kv, n, d) receives from the last m queries q (H, m, d).

    Implements: PO-OBSERVED-ATTENTION
    """
    grouped = _grouped(q, k, scaling, softcap)
    if grouped.shape[1] * grouped.shape[2] <= FEW:
        return _from_few(grouped, k, softcap, base_2(sinks, *grouped.shape[:2]))
    summed: Cube = np.stack(_parts(_Head.sums, grouped, k, softcap, sinks)).reshape(len(k), PARTS, -1)
    received: Matrix = summed.sum(axis=1)
    return received


def largest_attention(
    q: NDArray[np.floating], k: NDArray[np.floating], norms: Vector, scaling: float, softcap: float | None,
    sinks: NDArray[np.floating] | None = None,
) -> Matrix:
    """Divide each attention weight by the norm of the query, and return each key's largest quotient, (H, n).

    The keys are k (H_kv, n, d), and the queries q (H, m, d). `norms` (m,) contains the norm of each query.

    Implements: PO-KVZIP, PO-KVZIP-PLUS
    """
    least = norms.min()
    most = partial(_Head.maxima, shares=(least / norms).astype(f32))
    parts: Floats = np.stack(_parts(most, _grouped(q, k, scaling, softcap), k, softcap, sinks))
    largest: Matrix = parts.reshape(len(k), PARTS, -1, k.shape[1]).max(axis=1).reshape(len(q), -1) / least
    return largest


def _grouped(q: NDArray[np.floating], k: NDArray[np.floating], scaling: float, softcap: float | None) -> Floats:
    """Return the scaled queries (H_kv, G, m, d), grouped by KV head."""
    factor = scaling / softcap if softcap else scaling * LOG2_E
    scaled: Floats = np.multiply(q, f32(factor), dtype=f32, casting="same_kind")
    return scaled.reshape(len(k), -1, *q.shape[1:])


def base_2(sinks: NDArray[np.floating] | None, H_kv: int, G: int) -> Floats:
    """Return the sinks (H_kv, G) as base-2 logits. If there are no sinks, all logits are the lowest float."""
    return np.full((H_kv, G), LOWEST) if sinks is None else (sinks * LOG2_E).astype(f32).reshape(H_kv, G)


def _parts(
    of: Callable[[_Head, int], NDArray[np.floating]], grouped: Floats, k: NDArray[np.floating], softcap: float | None,
    sinks: NDArray[np.floating] | None,
) -> list[NDArray[np.floating]]:
    """Call `of` for all parts of all heads in a thread pool, and return the results."""
    beside = base_2(sinks, *grouped.shape[:2])
    heads = [_Head(queries, plain(keys), softcap, s) for queries, keys, s in zip(grouped, k, beside, strict=True)]
    with threads() as pool:
        return list(pool.map(lambda task: of(*task), product(heads, range(PARTS))))


def _from_few(q: Floats, k: NDArray[np.floating], softcap: float | None, sinks: Floats) -> Matrix:
    """Return the attention received from few queries. The products of keys and queries cover all heads at once."""
    H_kv, G, m, d = q.shape
    n = k.shape[1]
    S = np.matmul(k.astype(f32, copy=False), q.reshape(H_kv, G * m, d).transpose(0, 2, 1)).transpose(0, 2, 1)
    columns = np.zeros((H_kv, n), f32)
    add_weights_by_head(_capped(np.ascontiguousarray(S), softcap), np.arange(n - m + 1, n + 1), sinks, columns)
    return columns.astype(np.float64)


def _capped(S: Floats, softcap: float | None) -> Floats:
    """Return base-2 logits. If a soft cap is given, the function applies the soft cap to S in place."""
    if softcap:
        np.tanh(S, out=S)
        S *= f32(softcap * LOG2_E)
    return S


@njit(nogil=True, fastmath=FAST, inline="always")
def raise_to_powers(s: Floats, bits: NDArray[np.int32], width: int, sink: np.float32) -> np.float32:
    """Replace the first `width` logits of a row by powers of 2, and return the sum of the powers and the sink's power.

    First the maximum of the row's logits and the sink is subtracted from all logits. The largest power is then 1.
    """
    top = max(largest(bits, 0, width), sink)
    total: np.float32 = exp2(sink - top)
    for j in range(width):
        s[j] = exp2(s[j] - top)
        total += s[j]
    return total


@compiled(nogil=True, fastmath=FAST)
def add_weights(S: Floats, reach: IntVector, sinks: Floats, column: Floats) -> None:
    """Add the softmax of each row of S (heads x queries, keys) to `column` (keys,). S is overwritten by powers of 2.

    Row r attends to the first reach[r % queries] keys (at least 1) and to the sink of the row's head.
    """
    bits = S.view(np.int32)
    for r in range(len(S)):
        head, row = divmod(r, len(reach))
        width = reach[row]
        s = S[r]
        share = f32(1.0) / raise_to_powers(s, bits[r], width, sinks[head])
        for j in range(width):
            column[j] += s[j] * share


@compiled(nogil=True, fastmath=FAST)
def raise_weights(S: Floats, reach: IntVector, sinks: Floats, shares: Floats, columns: Floats) -> None:
    """Multiply weights by the share of the query, and update the maxima of each head in `columns` (heads, keys)."""
    bits = S.view(np.int32)
    for r in range(len(S)):
        head, row = divmod(r, len(reach))
        width = reach[row]
        s, column = S[r], columns[head]
        share = shares[row] / raise_to_powers(s, bits[r], width, sinks[head])
        for j in range(width):
            column[j] = max(column[j], s[j] * share)


@compiled(nogil=True)
def add_weights_by_head(S: Floats, reach: IntVector, sinks: Floats, columns: Floats) -> None:
    """Run `add_weights` for each head, with a slice of S (heads, rows, keys) and a row of `columns` (heads, keys)."""
    for h in range(len(S)):
        add_weights(S[h], reach, sinks[h], columns[h])
