"""Inputs of S2 to S6 and of decode at full size: neighbour lists, partitions, evictions, graphs, from a seed."""

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
    """How many neighbours a token has, and how they lie."""

    n: int
    k_intra: int
    k_cross: int
    C: int
    start: int = 0
    near: bool = True
    """Inside a chunk: next to the token, where S2 looks; else anywhere."""
    seed: int = 1


def lists(shape: Lists) -> CoAttention:
    """Neighbours as S1 would give them: own chunk without the token itself, earlier chunks; weights of 53 bits."""
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
    """k_intra steps ahead in the chunk, round its end: never the token itself, never one twice."""
    n, k = shape.n, shape.k_intra
    if k == 0:
        return np.zeros((n, 0), dtype=np.int64)
    span = np.maximum(size - 1, 1)
    if shape.near:
        step = np.argsort(numbers.words(n * 2 * k).reshape(n, 2 * k), axis=1)[:, :k]
        step = np.where(step < k, step + 1, k - 1 - step)  # k steps ahead and k back
    else:
        step = 1 + numbers.below(span)[:, None] + np.arange(k) * (span[:, None] // k + 1)
    place = (at - first)[:, None] + step
    kept = (place >= 0) & (place < size[:, None]) & (step != 0) if shape.near else np.abs(step) < size[:, None]
    found: IntMatrix = np.where(kept, first[:, None] + place % size[:, None], -1)
    return np.take_along_axis(found, np.argsort(found < 0, axis=1, kind="stable"), axis=1)


def _across(shape: Lists, numbers: Numbers, at: IntVector, first: IntVector) -> IntMatrix:
    """Sources apart from each other; those of a chunk's first tokens lie right before it."""
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
    """Falling from below 1 to above 0.3, as 53 bits that few sums hold exactly."""
    w = 0.31 + 0.69 * numbers.fractions(index.size).reshape(index.shape)
    return np.where(index >= 0, -np.sort(-w, axis=1), 0.0)


def some_ends(n: int, every: int, seed: int) -> BoolVector:
    """One token in `every` ends a sentence; 1 means all, 0 none."""
    if every == 0:
        return np.zeros(n, dtype=np.bool_)
    found: BoolVector = Numbers(seed).integers(0, every, n) == 0
    return found


def of_sizes(sizes: Any, start: int = 0) -> Trunks:
    """Trunks of given sizes; their impact says nothing."""
    sizes = np.asarray(sizes, dtype=np.int64)
    return Trunks(np.concatenate([[0], np.cumsum(sizes)]) + start, np.ones(len(sizes)))


def _record(index: IntMatrix, weight: Matrix) -> CoAttention:
    n = len(index)
    return CoAttention(0, np.ones(n), index, weight, np.full((n, 1), -1), np.zeros((n, 1)))


def hub(n: int, at: int) -> CoAttention:
    """Every other token has one edge to token `at`."""
    index = np.full((n, 1), at)
    index[at] = -1
    return _record(index, np.where(index >= 0, 0.31 + 0.69 * Numbers(n).fractions(n)[:, None], 0.0))


def blocks_of_edges(side: int, blocks: int) -> tuple[CoAttention, Trunks]:
    """Pairs of trunks of `side` tokens, each token of the first with an edge to each of the second: density 1."""
    n = 2 * side * blocks
    at = np.arange(n)
    base = at // (2 * side) * (2 * side) + side
    first = (at % (2 * side) < side)[:, None]
    index = np.where(first, base[:, None] + np.arange(side), -1)
    w = 0.31 + 0.69 * Numbers(side).fractions(n * side).reshape(n, side)
    return _record(index, np.where(first, -np.sort(-w, axis=1), 0.0)), of_sizes([side] * (2 * blocks))


def two_blocks(size: int) -> tuple[CoAttention, Trunks]:
    """Two trunks of `size` tokens; each token has an edge to its like in the other: the multiset has 2 size members."""
    at = np.arange(2 * size)
    index = ((at + size) % (2 * size))[:, None]
    return _record(index, 0.31 + 0.69 * Numbers(size).fractions(2 * size)[:, None]), of_sizes([size, size])


@dataclass(frozen=True)
class Eviction:
    """A problem of S6 by its sizes."""

    name: str
    m: int
    largest: int
    share: float
    """Of the tokens, B."""
    values: int
    """Distinct scores; 1 means that all tie."""
    marks: int
    """Distinct M_i."""
    protected: int = 0
    """One trunk in so many; 0 means none."""
    N_min: int = 3
    start: int = 0
    seed: int = 1

    def __str__(self) -> str:
        return self.name


def eviction(shape: Eviction, p: CrystalCacheParameters) -> EvictionProblem:
    """Trunks of 1 to `largest` tokens, scores and impacts that tie."""
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
    """A symmetric graph: each trunk is linked to `degree` others at steps of its own choice; some far."""
    numbers = Numbers(seed)
    a = np.repeat(np.arange(m), degree)
    b = (a + 1 + numbers.integers(0, m - 1, len(a))) % m
    low, high = np.minimum(a, b), np.maximum(a, b)
    key = np.unique(low * m + high)
    low, high = key // m, key % m
    return csr(m, low, high, 0.06 + 0.94 * numbers.fractions(len(key)))


def csr(m: int, low: IntVector, high: IntVector, w: Vector) -> TrunkWeights:
    """Both directions of each pair."""
    rows, columns, values = np.concatenate([low, high]), np.concatenate([high, low]), np.concatenate([w, w])
    order = np.lexsort((columns, rows))
    indptr = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=m))]).astype(np.int64)
    return TrunkWeights(indptr, columns[order].astype(np.int64), values[order])


# Ids that a narrower type takes for one another.
FAR_IDS = np.array([1, 65_537, 2**31 + 1, 2**32 + 1, 2**53, 2**53 + 1])


def state_at(seen: int, m: int, largest: int, tail: int, budget: int, p: CrystalCacheParameters) -> DecodeState:
    """m trunks of 1 to `largest` live tokens and a tail, the last of `seen`; some keys are zero."""
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
