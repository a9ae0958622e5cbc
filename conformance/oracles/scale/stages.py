"""S2 to S6 at full size. Sums with a given order use `np.cumsum` and `np.add.at`, which add from left to right."""

import math
from collections import defaultdict
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from conformance.oracles import added
from spec.arrays import BoolVector, IntVector, Vector
from spec.parameters import CrystalCacheParameters

INTERFACE = 5  # Number of tokens on either side (Eq. 16).


class Columns(NamedTuple):
    """Triples of Eq. 15 as columns: first endpoint, second endpoint, weight."""

    first: IntVector
    second: IntVector
    weight: Vector


class Pairs(NamedTuple):
    """Unordered pairs of groups with an edge, ascending: number of edges, and sum of the edges in the order of E."""

    a: IntVector
    b: IntVector
    number: IntVector
    total: Vector


def in_order(terms: Vector) -> float:
    """Return the sum from left to right, starting from 0."""
    return float(np.cumsum(terms)[-1]) if len(terms) else 0.0


def in_groups(group: IntVector, terms: Vector, groups: int) -> Vector:
    """Return the sum of each group's terms, in the order of the terms."""
    result = np.zeros(groups)
    np.add.at(result, group, terms)
    return result


def edge_columns(result: Any) -> Columns:
    """Return the edges of CC-EDGES: intra by owner and rank, then cross by owner and rank."""
    columns = []
    intra, cross = (result.intra, result.intra_weight, False), (result.cross, result.cross_weight, True)
    for index, weight, turned in (intra, cross):
        owner = np.repeat(np.arange(len(index)) + result.start, index.shape[1])
        other, w = index.ravel(), weight.ravel()
        there = other >= 0
        owner, other, w = owner[there], other[there], w[there]
        columns.append((other, owner, w) if turned else (owner, other, w))
    return Columns(*(np.concatenate(parts) for parts in zip(*columns, strict=True)))


def sentences(ends: BoolVector) -> IntVector:
    """Return the offsets of CC-SENTENCES."""
    n = len(ends)
    stops = np.flatnonzero(ends) + 1
    return np.unique(np.concatenate([[0], stops, [n]])).astype(np.int64)


def interface_sums(weights: list[float], tau: float) -> bool:
    """Return True if the strength exceeds tau: the sum from left to right, minus tau times the number, is positive."""
    return added(weights) - tau * len(weights) > 0


def trunks(ends: BoolVector, E: Columns, start: int, p: CrystalCacheParameters) -> IntVector:
    """Return the offsets of CC-TRUNKS in absolute positions."""
    offsets = sentences(ends).tolist()
    forward: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for a, b, w in zip((E.first - start).tolist(), (E.second - start).tolist(), E.weight.tolist(), strict=True):
        if 0 <= a < b:
            forward[a].append((b, w))
    done: list[int] = []
    left = offsets[0]
    for at, stop in pairwise(offsets[1:]):
        near = range(max(left, at - INTERFACE), at)
        edge = min(stop, at + INTERFACE)
        weights = [w for a in near for b, w in sorted(forward[a]) if at <= b < edge]
        if not (interface_sums(weights, p.tau_merge) and stop - left <= p.T_max):
            done.append(left)
            left = at
    done.append(left)
    return start + _split(np.array([*done, len(ends)], dtype=np.int64), p.T_max)


def _split(offsets: IntVector, T_max: int) -> IntVector:
    """Apply CC-SPLIT to every trunk, larger pieces first, and return the offsets."""
    result = [0]
    for size in np.diff(offsets).tolist():
        k = -(-size // T_max)
        short, more = divmod(size, k)
        result += [short + 1] * more + [short] * (k - more)
    return np.cumsum(result).astype(np.int64)


def counts(ids: IntVector) -> IntVector:
    """Return the counts of CC-COUNT."""
    _, inverse, number = np.unique(ids, return_inverse=True, return_counts=True)
    return number[inverse].astype(np.int64)


def rarity(c: IntVector, form: str = "logarithm") -> Vector:
    """Return the rarity of CC-RARITY and CC-RARITY-FORMS."""
    if form == "reciprocal":
        return 1 / (1 + c)
    if form == "exponential":
        return np.exp(-c.astype(np.float64))
    result: Vector = 1 / (1 + np.log1p(c))
    return result


def token_impact(S: Vector, c: IntVector, p: CrystalCacheParameters) -> Vector:
    """Return the impact of CC-IMPACT."""
    if p.impact == "uniform":
        return np.ones(len(S))
    if p.impact == "salience":
        return S
    if p.impact == "unit":
        top = S.max()
        return 0.5 * (S / top if top else np.zeros(len(S))) + 0.5 * rarity(c, p.rarity)
    mixed = 0.5 * (S / p.M_max) + 0.5 * rarity(c, p.rarity)
    return np.clip(mixed * p.M_max, p.M_min, p.M_max)


def trunk_impact(M: Vector, offsets: IntVector) -> Vector:
    """Return the impact of CC-TRUNK-IMPACT. Offsets count from the segment's first token."""
    result = []
    for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        top = np.sort(M[a:b])[::-1][:3].tolist()
        result.append(added(top) / len(top))
    return np.array(result)


def pairs(E: Columns, bounds: IntVector, new_from: int = 0) -> Pairs:
    """Return the pairs of CC-TRUNK-EDGES.

    An endpoint belongs to the last group whose first position is not above the endpoint.
    """
    a = np.searchsorted(bounds, E.first, side="right") - 1
    b = np.searchsorted(bounds, E.second, side="right") - 1
    apart = (a != b) & (np.maximum(a, b) >= new_from)
    low, high, w = np.minimum(a, b)[apart], np.maximum(a, b)[apart], E.weight[apart]
    order = np.lexsort((np.arange(len(low)), high, low))
    low, high, w = low[order], high[order], w[order]
    first = np.ones(len(low), dtype=np.bool_)
    first[1:] = (low[1:] != low[:-1]) | (high[1:] != high[:-1])
    group = np.cumsum(first) - 1
    number = np.bincount(group, minlength=int(first.sum())).astype(np.int64)
    total = in_groups(group, w, int(first.sum()))
    return Pairs(low[first], high[first], number, total)


def pair_weights(result: Pairs, sizes: IntVector) -> Vector:
    """Return the weights of Eq. 25 before the prune. The product of sizes is an exact integer."""
    product = sizes[result.a].astype(object) * sizes[result.b].astype(object)
    density = np.array([int(k) / int(size) for k, size in zip(result.number.tolist(), product, strict=True)])
    weights: Vector = result.total / result.number * np.sqrt(density)
    return weights


def degrees(indptr: IntVector, weights: Vector) -> Vector:
    """Return the degrees of CC-DEGREE for given rows."""
    m = len(indptr) - 1
    rows = np.repeat(np.arange(m), np.diff(indptr))
    return in_groups(rows, weights, m)


def moments(degree: Vector, epsilon: float) -> tuple[float, float]:
    """Return mean and standard deviation of Eq. 27, from correctly rounded sums."""
    m = len(degree)
    mu = math.fsum(degree.tolist()) / m
    sigma = math.sqrt(math.fsum(((degree - mu) ** 2).tolist()) / m)
    return mu, sigma if sigma >= epsilon else 1.0


def crystallization(degree: Vector, p: CrystalCacheParameters) -> Vector:
    """Return D by CC-CRYSTALLIZATION."""
    if p.graph == "zero":
        return np.zeros(len(degree))
    mu, sigma = moments(degree, p.epsilon)
    x = p.s * ((degree - mu) / sigma)
    power = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + power), power / (1 + power))


def normalised_impact(M_bar: Vector, epsilon: float) -> Vector:
    """Return the impact of CC-NORMALISED-IMPACT for the unprotected trunks."""
    ell = np.log1p(M_bar)
    low, high = ell.min(), ell.max()
    result: Vector = (ell - low) / (high - low + epsilon)
    return result


def score(D: Vector, M_bar: Vector, shut: BoolVector, p: CrystalCacheParameters) -> Vector:
    """Return the scores of CC-SCORE, with NaN for protected trunks."""
    result = np.full(len(D), np.nan)
    if not shut.all():
        result[~shut] = np.maximum(D[~shut], p.alpha * normalised_impact(M_bar[~shut], p.epsilon))
    return result


def protected(offsets: IntVector, n: int, p: CrystalCacheParameters) -> BoolVector:
    """Return the protected trunks by CC-PROTECTED."""
    result: BoolVector = (offsets[:-1] < p.N_sink) | (offsets[1:] > n - p.W_recent)
    return result


class Dissolved(NamedTuple):
    """Result of S6: kept positions, counted from 0, share of kept tokens of each trunk, and D after the eviction."""

    kept: IntVector
    ratio: Vector
    D: Vector


def dissolve(
    scores: Vector, offsets: IntVector, M: Vector, D: Vector, shut: BoolVector, B: int, N_min: int,
) -> Dissolved:
    """Apply the closed form of Algorithm 1: exclusive prefix sums in the order of eviction, with exact integers."""
    sizes = np.diff(offsets)
    alive = np.flatnonzero(~shut)
    order = alive[np.lexsort((alive, scores[alive]))]
    total = int(sizes[order].sum())
    c_0 = min(max(0, total - (B - int(sizes[shut].sum()))), total)
    before = np.cumsum(sizes[order]) - sizes[order]
    remnant = before + sizes[order] - c_0
    stays = np.where(before >= c_0, sizes[order], np.where(remnant >= max(N_min, 1), remnant, 0))
    number = sizes.copy()
    number[order] = stays
    kept = np.repeat(number == sizes, sizes)
    first = int(offsets[0])
    for g in np.flatnonzero((number > 0) & (number < sizes)).tolist():
        a, b = int(offsets[g]) - first, int(offsets[g + 1]) - first
        best = np.lexsort((np.arange(a, b), -M[a:b]))[: int(number[g])]
        kept[a + best] = True
    ratio = np.array([float(Fraction(k, s)) for k, s in zip(number.tolist(), sizes.tolist(), strict=True)])
    return Dissolved(np.flatnonzero(kept), ratio, ratio * D)
