"""S1: what the observed layer's attention says of each token (Section 3.2), streamed.

No (n, n) array exists. A block of queries meets its own chunk first and then the earlier keys in tiles: each product
is one sgemm, folded at once into the rows' log-sum-exp and the tile's maxima. A tile is revisited only for rows where
the bound of `mark_active_rows` leaves room for an edge; there are fewer than 1 / tau such tiles per row.
"""

import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from accelerated.numba_cpu import kernels
from spec.arrays import IntMatrix, IntVector
from spec.errors import BackendUnavailable
from spec.parameters import CrystalCacheParameters
from spec.policy import DeviceArray
from spec.records import CoAttention

try:
    from threadpoolctl import threadpool_limits
except ModuleNotFoundError:  # S2 to S6 need it not, and the Triton backend takes them from this package
    threadpool_limits = None

__all__ = ["coattention"]

Floats = NDArray[np.float32]
f32 = np.float32
QUERIES = 128  # rows of a block
KEYS = 256  # columns of a tile
SLACK = 1.0 - 1e-5  # rounding of the bound: 32 float32 terms and exp2, below 1e-6 relative


@dataclass(frozen=True)
class _Logits:
    """Base-2 logits of query rows against keys, by KV head."""

    q: NDArray[np.floating]
    k: Floats
    scaling: float
    softcap: float | None

    def queries(self, rows: slice) -> Floats:
        """Scaled queries (H_kv, G x rows, d), head major."""
        block = self.q[:, rows]
        factor = self.scaling / self.softcap if self.softcap else self.scaling * math.log2(math.e)
        scaled = (block * f32(factor)).astype(f32)
        return scaled.reshape(self.k.shape[0], -1, self.k.shape[2])

    def tile(self, queries: Floats, head: int, keys: slice) -> Floats:
        """(G x rows, keys)."""
        S: Floats = np.matmul(queries, self.k[head, keys].T)
        if self.softcap:
            np.tanh(S, out=S)
            S *= f32(self.softcap * math.log2(math.e))
        return S


class _Chunk:
    """One chunk of the segment: its blocks may run in any order, each writes rows of its own."""

    def __init__(self, logits: _Logits, c: int, stop: int, before: int, parameters: CrystalCacheParameters) -> None:
        self.logits, self.c, self.stop, self.p = logits, c, stop, parameters
        self.own, self.before = before + c, before
        self.heads = logits.q.shape[0]
        self.share = f32(1.0 / self.heads)
        n = stop - c
        self.A = np.zeros((n, n), f32)
        self.cosine = np.empty((n, n), f32)
        self.blocks = range(0, n, QUERIES)
        self.column = np.zeros((len(self.blocks), self.heads, n), f32)
        self.intra = _no_edges(n, parameters.k_intra)
        self.cross = _no_edges(n, parameters.k_cross)

    def attend(self, row: int) -> None:
        """Everything that one block of queries says: own columns, head mean, cross neighbours."""
        n = min(QUERIES, self.stop - self.c - row)
        Q = self.logits.queries(slice(self.c + row, self.c + row + n))
        H_kv, group = len(Q), self.heads // len(Q)
        tiles = range(0, self.own, KEYS)
        lse = np.empty((self.heads, n), f32)
        tile_peak = np.empty((len(tiles), self.heads, n), f32)
        for head in range(H_kv):
            mine = slice(head * group, (head + 1) * group)
            S = self.logits.tile(Q[head], head, slice(self.own, self.own + row + n))
            peak, total = np.full(group * n, kernels.LOWEST), np.zeros(group * n, f32)
            kernels.running_lse(S, peak, total, np.empty(group * n, f32), row, n, 0, True)
            for t, key in enumerate(tiles):
                earlier = self.logits.tile(Q[head], head, slice(key, min(key + KEYS, self.own)))
                kernels.running_lse(earlier, peak, total, tile_peak[t, mine].reshape(-1), 0, n, 0, False)
            level = peak + np.log2(total)
            lse[mine] = level.reshape(group, n)
            kernels.own_chunk(S, level, self.column[row // QUERIES, mine], self.A[row : row + n], row, self.share)
        kernels.normalise_rows(self.A[row : row + n], f32(self.p.epsilon))
        if len(tiles) and self.p.k_cross:
            self._cross(row, n, Q, lse, tile_peak, tiles)

    def _cross(self, row: int, n: int, Q: Floats, lse: Floats, tile_peak: Floats, tiles: range) -> None:
        active = np.empty((len(tiles), n), np.bool_)
        bound = f32(self.heads * self.p.tau_cross * SLACK)
        kernels.mark_active_rows(tile_peak, lse, bound, active)
        group = self.heads // len(Q)
        index, weight = self.cross[0][row : row + n], self.cross[1][row : row + n]
        for t in np.flatnonzero(active.any(axis=1)):
            rows = np.flatnonzero(active[t])
            keys = slice(tiles[t], min(tiles[t] + KEYS, self.own))
            W = np.zeros((len(rows), keys.stop - keys.start), f32)
            for head in range(len(Q)):
                chosen = np.ascontiguousarray(Q[head].reshape(group, n, -1)[:, rows]).reshape(group * len(rows), -1)
                S = self.logits.tile(chosen, head, keys)
                kernels.accumulate_attention(S, rows, lse[head * group : (head + 1) * group], W)
            kernels.insert_best(W, rows, self.share, f32(self.p.tau_cross), tiles[t], index, weight)

    def compare(self, row: int) -> None:
        """Cosines of a block of rows with all earlier ones: A is lower triangular, so later columns are zero."""
        last = min(row + QUERIES, len(self.A))
        for other in range(0, last, QUERIES):
            end = min(other + QUERIES, len(self.A))
            np.matmul(self.A[row:last, :end], self.A[other:end, :end].T, out=self.cosine[row:last, other:end])

    def choose(self, row: int) -> None:
        """The intra neighbours of a block of rows."""
        if self.p.k_intra:
            last = min(row + QUERIES, len(self.A))
            kernels.lower_triangle_best(self.cosine, row, last, f32(self.p.tau_intra), *self.intra)

    def salience(self) -> Floats:
        """Eq. 11, from the blocks' partial column sums in a fixed order."""
        h = self.column.sum(axis=0)
        top = np.sort(h, axis=0)[::-1][: self.p.k_heads]
        S: Floats = np.clip(top.sum(axis=0), f32(self.p.M_min), f32(self.p.M_max))
        return S


def _no_edges(n: int, k: int) -> tuple[IntMatrix, Floats]:
    return np.full((n, k), -1, dtype=np.int64), np.zeros((n, k), f32)


def coattention(
    q: DeviceArray, k: DeviceArray, positions: IntVector, parameters: CrystalCacheParameters, scaling: float,
    softcap: float | None,
) -> CoAttention:
    """S1 in float32; the same bits for any number of threads.

    Implements: CC-ATTENTION, CC-SALIENCE, CC-ROW-NORM, CC-INTRA, CC-CROSS, CC-COATTENTION

    Raises:
        BackendUnavailable: without threadpoolctl, which keeps BLAS from starting threads inside ours.
    """
    if threadpool_limits is None:
        raise BackendUnavailable("S1 of backend 'numba' needs threadpoolctl: pip install 'kvspec[numba]'")
    n = q.shape[1]
    before = k.shape[1] - n
    logits = _Logits(q, np.asarray(k, dtype=f32), scaling, softcap)
    S = np.empty(n)
    intra = [np.full((n, parameters.k_intra), -1, dtype=np.int64), np.zeros((n, parameters.k_intra))]
    cross = [np.full((n, parameters.k_cross), -1, dtype=np.int64), np.zeros((n, parameters.k_cross))]
    with threadpool_limits(1, user_api="blas"), ThreadPoolExecutor(os.cpu_count()) as pool:
        for c in range(0, n, parameters.C):
            chunk = _Chunk(logits, c, min(c + parameters.C, n), before, parameters)
            for step in (chunk.attend, chunk.compare, chunk.choose):
                list(pool.map(step, reversed(chunk.blocks)))
            rows = slice(c, chunk.stop)
            S[rows] = chunk.salience()
            intra[0][rows] = _positions_of(chunk.intra[0], positions[chunk.own :])
            cross[0][rows] = _positions_of(chunk.cross[0], positions)
            intra[1][rows], cross[1][rows] = chunk.intra[1], chunk.cross[1]
    return CoAttention(int(positions[before]), S, intra[0], intra[1], cross[0], cross[1])


def _positions_of(index: IntMatrix, positions: IntVector) -> IntMatrix:
    return np.where(index >= 0, positions[index], -1)
