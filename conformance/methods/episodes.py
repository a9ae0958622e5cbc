"""EpiCache's episodes by brute force, in exact fractions."""

from collections.abc import Sequence
from fractions import Fraction
from itertools import count
from typing import Any, NamedTuple

from conformance.methods.policies import whole
from conformance.methods.vase import uniforms

Point = Sequence[Any]
RUNS = 10
"""Number of runs of K-means."""


class Clusters(NamedTuple):
    """Episode of each window, centroids, and the smallest difference of two numbers that a choice compared."""

    labels: list[int]
    centroids: list[list[float]]
    margin: Fraction


def squared(a: Point, b: Point) -> Fraction:
    return sum(((Fraction(x) - Fraction(y)) ** 2 for x, y in zip(a, b, strict=True)), Fraction(0))


def middle(points: Sequence[Point]) -> list[Fraction]:
    return [sum(map(Fraction, axis), Fraction(0)) / len(points) for axis in zip(*points, strict=True)]


def least(values: Sequence[Fraction]) -> tuple[int, Fraction]:
    """Return the first index of the smallest value, and the difference to the next larger value."""
    low = min(values)
    return values.index(low), min((one - low for one in values if one != low), default=Fraction(1))


def one_run(x: Sequence[Point], first: Sequence[int]) -> tuple[list[int], Fraction, Fraction]:
    """Return labels, the sum of squared distances, and the margin, after rounds until no label changes."""
    centroids, labels, margin = [x[at] for at in first], list[int](), Fraction(1)
    while True:
        choices = [least([squared(one, c) for c in centroids]) for one in x]
        margin = min([margin, *(gap for _, gap in choices)])
        if labels == (labels := [label for label, _ in choices]):
            total = sum((squared(one, centroids[label]) for one, label in zip(x, labels, strict=True)), Fraction(0))
            return labels, total, margin
        for e in range(len(centroids)):
            if members := [one for one, label in zip(x, labels, strict=True) if label == e]:
                centroids[e] = middle(members)


def clusters(x: Sequence[Point], K: int, seed: int) -> Clusters:
    m, outcomes = len(x), []
    for run in range(RUNS):
        numbers = uniforms(seed, run, m, m)
        outcomes.append(one_run(x, sorted(sorted(range(m), key=numbers.__getitem__)[:K])))
    at, gap = least([total for _, total, _ in outcomes])
    numbered = dict(zip(dict.fromkeys(outcomes[at][0]), count()))
    labels = [numbered[label] for label in outcomes[at][0]]
    centroids = [
        [float(axis) for axis in middle([one for one, label in zip(x, labels, strict=True) if label == e])]
        for e in range(len(numbered))
    ]
    return Clusters(labels, centroids, min([gap, *(margin for _, _, margin in outcomes)]))


def product(a: Point, b: Point) -> Fraction:
    return sum((Fraction(x) * Fraction(y) for x, y in zip(a, b, strict=True)), Fraction(0))


def prompts(x: Sequence[Point], labels: Sequence[int], centroids: Sequence[Point], P: int) -> list[list[int]]:
    result = []
    for e, c in enumerate(centroids):
        members = [at for at, label in enumerate(labels) if label == e]
        ranked = sorted(members, key=lambda at: (-product(x[at], c), at))
        result.append(sorted(ranked[:P]))
    return result


def nearest(question: Point, centroids: Sequence[Point]) -> int:
    return max(range(len(centroids)), key=lambda e: (product(question, centroids[e]), -e))


def window_of(i: int, w: int, N_sink: int) -> list[int]:
    """Return the tokens to which token i attends in the pass in windows of w tokens, half of which overlap."""
    starts = range(0, i + 1, w // 2)
    start = next((one for one in reversed(starts) if i - one >= w // 2), 0)
    return sorted({*range(start, i + 1), *range(min(N_sink, i + 1))})


def shares(similarity: Sequence[float], M: int, power: float) -> list[int]:
    """Return the shares of layers: one factor times each weight, but at least a quarter of M, L M in all."""
    low, high, floor = min(similarity), max(similarity), Fraction(max(1, M // 4))
    weights = [Fraction((1.0 - (one - low) / (high - low) if high > low else 1.0) ** power) for one in similarity]
    total = Fraction(len(weights) * M)
    for small in sorted({Fraction(0), *weights}):
        # The layers with weights up to `small` have the floor. The factor must then put all other layers above it.
        rest = [w for w in weights if w > small]
        factor = (total - floor * (len(weights) - len(rest))) / sum(rest)
        if min(rest) * factor >= floor:
            break
    return whole([max(floor, w * factor) if w > small else floor for w in weights])
