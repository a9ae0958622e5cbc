"""Stage S1: salience and neighbours of each token from the attention of the observed layer (Section 3.2).

Attention is streamed, so no (n, n) array is made. A block of queries is multiplied with the keys of the same chunk,
then with tiles of earlier keys. Each product (one sgemm) updates the log-sum-exp of the rows and the maxima of the
tile. A second pass recomputes a tile only for rows that can have a new neighbour in the tile. `bound_weights` finds
these rows. If the forward pass supplies the log-sum-exp, the first pass computes only the maxima.
"""

import itertools
import math
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from accelerated.numba_cpu import kernels
from accelerated.numba_cpu.threads import plain, threads
from spec.arrays import IntMatrix, IntVector
from spec.parameters import CrystalCacheParameters
from spec.policy import DeviceArray
from spec.records import CoAttention

__all__ = ["coattention"]

Floats = NDArray[np.float32]
f32 = np.float32
LOG2_E = math.log2(math.e)
ROWS = 1024  # rows in a product: the queries of a block in all heads that share keys
BLOCK = (64, 256)  # fewest and most queries of a block
KEYS = 128  # columns in a tile; ROWS x KEYS floats fill half of a second-level cache
SQUARE = 128  # rows and columns of a block of cosines
SLACK = 1.0 - 1e-5  # allows for rounding of the bound: 32 float32 terms and exp2 cause a relative error below 1e-6


def _matrix(scratch: Floats, rows: int, columns: int) -> Floats:
    """Return the start of `scratch` as a contiguous array (rows, columns)."""
    return scratch[: rows * columns].reshape(rows, columns)


@dataclass(frozen=True)
class _Logits:
    """Base-2 logits of blocks of queries and keys of a KV head. q and k are read in blocks and never fully copied."""

    q: NDArray[np.floating]
    k: NDArray[np.floating]
    scaling: float
    softcap: float | None
    sinks: NDArray[np.floating] | None

    def queries(self, rows: slice) -> Floats:
        """Return the scaled queries (H_kv, G x rows, d). The rows of a query head are contiguous."""
        factor = self.scaling / (self.softcap or 1.0)
        block = self.q[:, rows]
        scaled: Floats = np.multiply(block, f32(factor), out=np.empty(block.shape, f32), casting="same_kind")
        return scaled.reshape(len(self.k), -1, block.shape[2])

    def tile(self, queries: Floats, head: int, keys: slice, scratch: Floats) -> Floats:
        """Return the base-2 logits (G x rows, keys) of a tile, stored in `scratch`.

        The factor for base 2 is applied after the product, because BLAS may round a row differently if there are fewer
        rows. Exact products therefore give equal weights in both passes.
        """
        S = _matrix(scratch, len(queries), keys.stop - keys.start)
        np.matmul(queries, plain(self.k[head, keys]).T, out=S)
        if self.softcap:
            np.tanh(S, out=S)
        S *= f32((self.softcap or 1.0) * LOG2_E)
        return S


class _Chunk:
    """One chunk of the segment. The blocks in a step can run in any order, because each block writes different rows."""

    def __init__(
        self, logits: _Logits, lse: NDArray[np.floating] | None, c: int, before: int,
        parameters: CrystalCacheParameters,
    ) -> None:
        self.logits, self.lse, self.c, self.p = logits, lse, c, parameters
        self.heads, tokens = logits.q.shape[:2]
        self.stop, self.first_key = min(c + parameters.C, tokens), before + c
        self.group = self.heads // len(logits.k)
        self.share = f32(1.0 / self.heads)
        self.n = n = self.stop - c
        self.A = np.zeros((n, n), f32)
        self.cosine = np.empty((n, n), f32)
        self.size = min(max(ROWS // self.group, BLOCK[0]), BLOCK[1])
        self.tiles = range(0, self.first_key, KEYS)
        self.column = np.zeros((-(-n // self.size), self.heads, n), f32)
        self.intra = _no_edges(n, parameters.k_intra)
        self.cross = _no_edges(n, parameters.k_cross)

    def steps(self, pool: ThreadPoolExecutor) -> Iterator[bool]:
        """Run the steps one after the other. Longer blocks of a step are queued before shorter blocks."""
        for step, size in ((self.attend, self.size), (self.compare, SQUARE), (self.choose, SQUARE)):
            queued = [pool.submit(step, row) for row in reversed(range(0, self.n, size))]
            yield True
            for block in queued:
                block.result()

    def attend(self, row: int) -> None:
        """Compute column sums, the mean over heads, and neighbours in earlier chunks for a block of queries."""
        n = min(self.size, self.n - row)
        Q = self.logits.queries(slice(self.c + row, self.c + row + n))
        level = np.empty((len(Q), self.group * n), f32)
        tile_peak = np.empty((len(self.tiles), len(Q), self.group * n), f32)
        scratch = np.empty(self.group * n * KEYS, f32)
        buffer = np.empty(self.group * n * (row + n), f32)
        reach = np.arange(row + 1, row + n + 1)
        for head in range(len(Q)):
            S = self.logits.tile(Q[head], head, slice(self.first_key, self.first_key + row + n), buffer)
            if self.lse is None:
                level[head] = self._level(Q[head], head, S, reach, tile_peak[:, head], scratch)
            else:
                level[head] = self._given_level(Q[head], head, row, tile_peak[:, head], scratch)
            mine = slice(head * self.group, (head + 1) * self.group)
            if self.logits.sinks is not None:
                sinks = np.repeat((self.logits.sinks[mine] * LOG2_E).astype(f32), n)
                np.logaddexp2(level[head], sinks, out=level[head])
            column = self.column[row // self.size, mine]
            kernels.chunk_attention(S, level[head], column, self.A[row : row + n], row, self.share)
        kernels.normalise_rows(self.A[row : row + n], f32(self.p.epsilon))
        if len(self.tiles) and self.p.k_cross:
            self._cross(row, n, Q, level, tile_peak, scratch)

    def _level(
        self, Q: Floats, head: int, S: Floats, reach: IntVector, tile_peak: Floats, scratch: Floats,
    ) -> Floats:
        """Return the base-2 log-sum of each row over the same chunk's logits S and the logits of all earlier tiles."""
        peak, total = np.full(len(Q), kernels.LOWEST), np.zeros(len(Q), f32)
        kernels.running_lse(S, peak, total, np.empty(len(Q), f32), reach)
        whole = np.array([KEYS])
        for t, key in enumerate(self.tiles):
            earlier = self.logits.tile(Q, head, slice(key, min(key + KEYS, self.first_key)), scratch)
            kernels.running_lse(earlier, peak, total, tile_peak[t], whole)
        level: Floats = peak + np.log2(total)
        return level

    def _given_level(self, Q: Floats, head: int, row: int, tile_peak: Floats, scratch: Floats) -> Floats:
        """Return the base-2 log-sum of each row from the given lse. If k_cross is 0, no earlier tile is computed."""
        assert self.lse is not None
        if self.p.k_cross:
            for t, key in enumerate(self.tiles):
                earlier = self.logits.tile(Q, head, slice(key, min(key + KEYS, self.first_key)), scratch)
                kernels.tile_peaks(earlier, tile_peak[t])
        n = len(Q) // self.group
        given = self.lse[head * self.group : (head + 1) * self.group, self.c + row : self.c + row + n]
        level: Floats = (given * LOG2_E).astype(f32).reshape(-1)
        return level

    def _cross(self, row: int, n: int, Q: Floats, level: Floats, tile_peak: Floats, scratch: Floats) -> None:
        """Compute the neighbours in earlier chunks from the tiles in which a row can have a neighbour."""
        lse = level.reshape(self.heads, n)
        bound = np.empty((len(self.tiles), n), f32)
        kernels.bound_weights(tile_peak.reshape(-1, self.heads, n), lse, bound)
        index, weight = self.cross[0][row : row + n], self.cross[1][row : row + n]
        for t, key in enumerate(self.tiles):
            # A new key's weight must exceed tau, and the smallest weight in a full list.
            least = np.maximum(weight[:, -1], f32(self.p.tau_cross)) * f32(self.heads * SLACK)
            rows = np.flatnonzero(bound[t] > least)
            if len(rows) == 0:
                continue
            keys = slice(key, min(key + KEYS, self.first_key))
            W = np.zeros((len(rows), keys.stop - keys.start), f32)
            for head in range(len(Q)):
                chosen = Q[head].reshape(self.group, n, -1).take(rows, axis=1).reshape(self.group * len(rows), -1)
                S = self.logits.tile(chosen, head, keys, scratch)
                kernels.accumulate_attention(S, rows, lse[head * self.group : (head + 1) * self.group], W)
            kernels.insert_best(W, rows, self.share, f32(self.p.tau_cross), key, index, weight)

    def compare(self, row: int) -> None:
        """Compute the cosines of a block of rows with all earlier rows, and write them to both sides of the diagonal.

        A is lower triangular, so the columns of A after the diagonal of the earlier row are zero and are skipped.
        """
        last = min(row + SQUARE, self.n)
        for other in range(0, last, SQUARE):
            end = min(other + SQUARE, self.n)
            square = self.cosine[row:last, other:end]
            np.matmul(self.A[row:last, :end], self.A[other:end, :end].T, out=square)
            if other < row:
                self.cosine[other:end, row:last] = square.T
        np.fill_diagonal(self.cosine[row:last, row:last], -1.0)

    def choose(self, row: int) -> None:
        """Compute, for a block of rows, the neighbours in the same chunk."""
        if self.p.k_intra:
            last = min(row + SQUARE, self.n)
            index, weight = self.intra[0][row:last], self.intra[1][row:last]
            rows = np.arange(last - row)
            kernels.insert_best(self.cosine[row:last], rows, f32(1.0), f32(self.p.tau_intra), 0, index, weight)

    def salience(self) -> Floats:
        """Return the salience (Equation 11 or the essay's mean). Column sums of blocks are added in a fixed order."""
        h = self.column.sum(axis=0)
        top = np.sort(h, axis=0)[::-1][: self.p.k_heads]
        share = f32(max(1, len(top)) if self.p.heads == "mean" else 1)
        S: Floats = np.clip(top.sum(axis=0) / share, f32(self.p.M_min), f32(self.p.M_max))
        return S


def _no_edges(n: int, k: int) -> tuple[IntMatrix, Floats]:
    return np.full((n, k), -1, dtype=np.int64), np.zeros((n, k), f32)


def coattention(
    q: DeviceArray, k: DeviceArray, positions: IntVector, parameters: CrystalCacheParameters, scaling: float,
    softcap: float | None, lse: DeviceArray | None = None, sinks: DeviceArray | None = None,
) -> CoAttention:
    """Return the result of S1, computed in float32. The bits of the result do not depend on the number of threads.

    Implements: CC-ATTENTION, CC-SALIENCE, CC-MEAN-SALIENCE, CC-ROW-NORM, CC-INTRA, CC-CROSS, CC-COATTENTION
    """
    n = q.shape[1]
    before = k.shape[1] - n
    logits = _Logits(q, k, scaling, softcap, sinks)
    S = np.empty(n)
    intra = [np.full((n, parameters.k_intra), -1, dtype=np.int64), np.zeros((n, parameters.k_intra))]
    cross = [np.full((n, parameters.k_cross), -1, dtype=np.int64), np.zeros((n, parameters.k_cross))]
    # The chunk with the most keys (the last) runs first, so that no thread ends with a long block.
    starts = range(0, n, parameters.C)[::-1]
    with threads() as pool:
        for chunk in _finished((_Chunk(logits, lse, c, before, parameters) for c in starts), pool):
            rows = slice(chunk.c, chunk.stop)
            S[rows] = chunk.salience()
            intra[0][rows] = _positions_of(chunk.intra[0], positions[chunk.first_key :])
            cross[0][rows] = _positions_of(chunk.cross[0], positions)
            intra[1][rows], cross[1][rows] = chunk.intra[1], chunk.cross[1]
    return CoAttention(int(positions[before]), S, intra[0], intra[1], cross[0], cross[1])


def _finished(chunks: Iterator[_Chunk], pool: ThreadPoolExecutor) -> Iterator[_Chunk]:
    """Yield each chunk when it is finished. Steps of several chunks are queued in turn, so that no thread waits."""
    under_way: deque[tuple[_Chunk, Iterator[bool]]] = deque()
    for chunk in itertools.chain(chunks, itertools.repeat(None)):
        if chunk is not None:
            under_way.appendleft((chunk, chunk.steps(pool)))
        elif not under_way:
            return
        done = [each for each, steps in list(under_way) if not next(steps, False)]
        for _ in done:
            under_way.pop()
        yield from done


def _positions_of(index: IntMatrix, positions: IntVector) -> IntMatrix:
    return np.where(index >= 0, positions[index], -1)
