"""Inputs of S2 to S6 and of decode at full size, from a seed: neighbour lists, partitions, evictions and graphs."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from conformance.strategies.numbers import Numbers
from conformance.strategies.trunks import EvictionProblem, frozen_state
from spec.arrays import BoolVector, IntMatrix, IntVector, Matrix, Vector
from spec.budget import Budget
from spec.decode import DecodeState, LiveTrunks, TrunkWeights
from spec.parameters import CrystalCacheParameters
from spec.records import CoAttention, Trunks


@dataclass(frozen=True)
class Lists:
    """Sizes of neighbour lists, and the places of the neighbours."""

    n: int
    k_intra: int
    k_cross: int
    C: int
    start: int = 0
    near: bool = True
    """Inside a chunk: True for neighbours next to the token, where S2 reads, False for neighbours anywhere."""
    seed: int = 1


def lists(shape: Lists) -> CoAttention:
    """Return neighbours as S1 would: of the same chunk without the token itself, and of earlier chunks.

    Weights have 53 bits.
    """
    numbers, n, C = Numbers(shape.seed), shape.n, shape.C
    at = np.arange(n)
    first = at // C * C
    size = np.minimum(first + C, n) - first
    intra = _inside(shape, numbers, at, first, size)
    cross = _across(shape, numbers, at, first)
    return CoAttention(
        shape.start, numbers.fractions(n), _placed(intra, shape.start), _weights(intra, numbers),
        _placed(cross, shape.start), _weights(cross, numbers),
    )


def _inside(shape: Lists, numbers: Numbers, at: IntVector, first: IntVector, size: IntVector) -> IntMatrix:
    """Return k_intra distinct neighbours inside the chunk, never the token itself.

    The neighbours are next to the token, or at steps that wrap around the end of the chunk.
    """
    n, k = shape.n, shape.k_intra
    if k == 0:
        return np.zeros((n, 0), dtype=np.int64)
    span = np.maximum(size - 1, 1)
    if shape.near:
        step = np.argsort(numbers.words(n * 2 * k).reshape(n, 2 * k), axis=1)[:, :k]
        step = np.where(step < k, step + 1, k - 1 - step)  # k steps ahead and k steps back
    else:
        step = 1 + numbers.below(span)[:, None] + np.arange(k) * (span[:, None] // k + 1)
    place = (at - first)[:, None] + step
    kept = (place >= 0) & (place < size[:, None]) & (step != 0) if shape.near else np.abs(step) < size[:, None]
    result: IntMatrix = np.where(kept, first[:, None] + place % size[:, None], -1)
    return np.take_along_axis(result, np.argsort(result < 0, axis=1, kind="stable"), axis=1)


def _across(shape: Lists, numbers: Numbers, at: IntVector, first: IntVector) -> IntMatrix:
    """Return distinct sources in earlier chunks.

    The sources of a chunk's first tokens are immediately before the chunk.
    """
    n, k = shape.n, shape.k_cross
    if k == 0:
        return np.zeros((n, 0), dtype=np.int64)
    span = np.maximum(first // max(k, 1), 1)
    place = numbers.below(np.repeat(span, k)).reshape(n, k) + np.arange(k) * span[:, None]
    edge = (at - first < k) & (first >= k)
    place = np.where(edge[:, None], first[:, None] - 1 - np.arange(k), place)
    return np.where(first[:, None] >= k, place, -1)


def _placed(index: IntMatrix, start: int) -> IntMatrix:
    return np.where(index >= 0, index + start, -1)


def _weights(index: IntMatrix, numbers: Numbers) -> Matrix:
    """Return weights from below 1 down to above 0.3, with 53 bits that few sums represent exactly."""
    w = 0.31 + 0.69 * numbers.fractions(index.size).reshape(index.shape)
    return np.where(index >= 0, -np.sort(-w, axis=1), 0.0)


def some_ends(n: int, every: int, seed: int) -> BoolVector:
    """Return a mask in which one token in `every` ends a sentence. 1 means all tokens, 0 means none."""
    if every == 0:
        return np.zeros(n, dtype=np.bool_)
    result: BoolVector = Numbers(seed).integers(0, every, n) == 0
    return result


def of_sizes(sizes: Any, start: int = 0) -> Trunks:
    """Return trunks of given sizes. Their impact is 1 and has no meaning."""
    sizes = np.asarray(sizes, dtype=np.int64)
    return Trunks(np.concatenate([[0], np.cumsum(sizes)]) + start, np.ones(len(sizes)))


def _record(index: IntMatrix, weight: Matrix) -> CoAttention:
    n = len(index)
    return CoAttention(0, np.ones(n), index, weight, np.full((n, 1), -1), np.zeros((n, 1)))


def hub(n: int, at: int) -> CoAttention:
    """Return a record in which every other token has one edge to token `at`."""
    index = np.full((n, 1), at)
    index[at] = -1
    return _record(index, np.where(index >= 0, 0.31 + 0.69 * Numbers(n).fractions(n)[:, None], 0.0))


def blocks_of_edges(side: int, blocks: int) -> tuple[CoAttention, Trunks]:
    """Return pairs of trunks of `side` tokens with density 1.

    Each token of the first trunk has an edge to each token of the second trunk.
    """
    n = 2 * side * blocks
    at = np.arange(n)
    base = at // (2 * side) * (2 * side) + side
    first = (at % (2 * side) < side)[:, None]
    index = np.where(first, base[:, None] + np.arange(side), -1)
    w = 0.31 + 0.69 * Numbers(side).fractions(n * side).reshape(n, side)
    return _record(index, np.where(first, -np.sort(-w, axis=1), 0.0)), of_sizes([side] * (2 * blocks))


def two_blocks(size: int) -> tuple[CoAttention, Trunks]:
    """Return two trunks of `size` tokens, with an edge from each token to the corresponding token of the other trunk.

    Each of the `size` pairs of tokens has one edge in each direction.
    """
    at = np.arange(2 * size)
    index = ((at + size) % (2 * size))[:, None]
    return _record(index, 0.31 + 0.69 * Numbers(size).fractions(2 * size)[:, None]), of_sizes([size, size])


@dataclass(frozen=True)
class Eviction:
    """Sizes of a problem of S6."""

    name: str
    m: int
    largest: int
    share: float
    """Budget B as a share of the tokens."""
    values: int
    """Number of distinct scores. 1 means that all scores tie."""
    marks: int
    """Number of distinct M_i."""
    protected: int = 0
    """One trunk in this many is protected, on average. 0 means none."""
    N_min: int = 3
    start: int = 0
    seed: int = 1

    def __str__(self) -> str:
        return self.name


def eviction(shape: Eviction, p: CrystalCacheParameters) -> EvictionProblem:
    """Return a problem of S6: trunks of 1 to `largest` tokens, with scores and impacts that tie."""
    numbers, m = Numbers(shape.seed), shape.m
    sizes = 1 + numbers.integers(0, shape.largest, m)
    n = int(sizes.sum())
    shut = numbers.integers(0, shape.protected, m) == 0 if shape.protected else np.zeros(m, dtype=np.bool_)
    scores = numbers.integers(0, shape.values, m) / shape.values
    return EvictionProblem(
        np.where(shut, np.nan, scores), of_sizes(sizes, shape.start), numbers.integers(0, shape.marks, n) / 4 + 0.25,
        numbers.fractions(m), shut, int(shape.share * n), p,
    )


def network(m: int, degree: int, seed: int) -> TrunkWeights:
    """Return a symmetric graph in which each trunk is linked to `degree` others at random steps, some of them far."""
    numbers = Numbers(seed)
    a = np.repeat(np.arange(m), degree)
    b = (a + 1 + numbers.integers(0, m - 1, len(a))) % m
    low, high = np.minimum(a, b), np.maximum(a, b)
    key = np.unique(low * m + high)
    low, high = key // m, key % m
    return csr(m, low, high, 0.06 + 0.94 * numbers.fractions(len(key)))


def csr(m: int, low: IntVector, high: IntVector, w: Vector) -> TrunkWeights:
    """Return both directions of each pair, in CSR form."""
    rows, columns, values = np.concatenate([low, high]), np.concatenate([high, low]), np.concatenate([w, w])
    order = np.lexsort((columns, rows))
    indptr = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=m))]).astype(np.int64)
    return TrunkWeights(indptr, columns[order].astype(np.int64), values[order])


# Ids that are equal in narrower integer types.
FAR_IDS = np.array([1, 65_537, 2**31 + 1, 2**32 + 1, 2**53, 2**53 + 1])


def state_at(seen: int, m: int, largest: int, tail: int, budget: int, p: CrystalCacheParameters) -> DecodeState:
    """Return a decode state: m trunks of 1 to `largest` live tokens and a tail of the last tokens.

    Some keys are zero.
    """
    numbers = Numbers(m + tail)
    sizes = numbers.integers(1, largest + 1, m)
    n = int(sizes.sum())
    gaps = 1 + numbers.integers(0, 3, n)
    positions = seen - tail - 1 - np.cumsum(gaps)[::-1]
    M, norms = 0.1 + 15 * numbers.fractions(n), numbers.fractions(n) + 0.1
    norms[numbers.integers(0, 50, n) == 0] = np.inf
    ids = np.concatenate([np.arange(2, 9), FAR_IDS])
    ids.sort()
    counts = 1 + numbers.integers(0, min(70_000, (seen - tail) // (2 * len(ids))), len(ids))
    counts[0] += seen - tail - counts.sum()
    waiting = np.concatenate([FAR_IDS, 3 + np.arange(tail) % 29])[:tail]
    table = LiveTrunks(
        positions, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64), M, norms, 0.1 + 15 * numbers.fractions(m)
    )
    return frozen_state(DecodeState(
        Budget(count=budget), seen, 0, table, numbers.fractions(m), network(m, 3, m), ids, counts, 0.5, 0.25,
        tuple(waiting.tolist()), tuple((0.1 + numbers.fractions(tail)).tolist()),
    ))
