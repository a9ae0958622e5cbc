"""NestedKV by brute force: plain lists, from the paper's text and Appendix A. No code is shared with the reference.

A head is a list of keys. Parameters can be any object with the paper's names as attributes.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from conformance.oracles.boxes import column_sums, directions, dot, exp, fsum, largest, least, log, over, sqrt
from conformance.oracles.choices import ordered

Row = Sequence[float]
TINY = Fraction(1, 2**16)


def unit(keys: Sequence[Row]) -> list[list[float]]:
    """Return the directions of keys, even if the squares of a key overflow or underflow a float."""
    result: list[list[float]] = directions(keys)
    return result


def mean(rows: Sequence[Row]) -> list[float]:
    result: list[float] = over(column_sums(rows), len(rows))
    return result


def block_of(i: int, N: int, p: Any) -> range:
    """Return the block of token i, counted from 0."""
    b = sorted((p.b_min, N // p.blocks, p.b_max))[1]
    return range(i - i % b, min(i - i % b + b, N))


def memories(
    directions: Sequence[Row], i: int, p: Any, stable: list[float] | None = None,
) -> tuple[list[float], list[float], list[float]]:
    """Return mu_s, mu_e(i) and mu_c(i). mu_s is equal for every i, and can be given as `stable`."""
    N = len(directions)
    return (
        stable or mean(directions), mean([directions[j] for j in block_of(i, N, p)]),
        mean([directions[j] for j in range(max(0, i - p.W + 1), i + 1)]),
    )


def anomaly(direction: Row, memory: Row) -> float:
    """Return minus the cosine, or 0 if the memory has no direction."""
    length = sqrt(dot(memory, memory))
    return -dot(direction, memory) / length if length > TINY else 0.0


def min_max(row: Row) -> list[float]:
    low, high = least(row), largest(row)
    return [(x - low) / (high - low) for x in row] if high - low > TINY else [0.0] * len(row)


def deltas(scales: Sequence[Row], p: Any) -> list[float]:
    """Return the top mean minus the bottom mean of each scale."""
    number = max(1, int(p.p * len(scales[0]) // 1))
    best = [ordered(scale) for scale in scales]
    return [fsum(row[:number]) / number - fsum(row[-number:]) / number for row in best]


def blended(scales: Sequence[Row], gaps: Row, p: Any) -> list[float]:
    logits = [log(w) + p.beta * gap for w, gap in zip(p.w0, gaps, strict=True)]
    powers = [exp(x - largest(logits)) for x in logits]
    w = [power / fsum(powers) for power in powers]
    return [dot(w, column) for column in zip(*scales, strict=True)]


def surprise(scales: Sequence[Row]) -> list[float]:
    """Return the population deviation of each token's three anomalies."""
    result = []
    for column in zip(*scales, strict=True):
        centre = fsum(column) / 3
        result.append(sqrt(fsum((x - centre) ** 2 for x in column) / 3))
    return result


def rectified(s: Row) -> list[float]:
    normalised = min_max(s)
    centre = fsum(normalised) / len(s)
    return [largest([0.0, x - centre]) for x in normalised]


def gate(s: float, p: Any) -> float:
    x = -p.kappa * (s - p.tau)
    return 0.0 if x > 700 else 1 / (1 + exp(x))


def routed(scales: Sequence[Row], blend: Row, s: Row, p: Any) -> list[float]:
    result = []
    for column, mixed, x in zip(zip(*scales, strict=True), blend, s, strict=True):
        alpha = gate(x, p)
        result.append((1 - alpha) * mixed + alpha * largest(column))
    return result


class Trace(NamedTuple):
    """Score of one head, with the values that determine its error."""

    score: list[float]
    raw: list[list[float]]
    """The three anomalies before normalisation."""
    shortest: list[float]
    """Length of the shortest memory of each scale."""
    deviation: list[float]


def traced(keys: Sequence[Row], p: Any) -> Trace:
    directions = unit(keys)
    stable = mean(directions)
    everything = [memories(directions, i, p, stable) for i in range(len(keys))]
    raw = [[anomaly(k, m[scale]) for k, m in zip(directions, everything, strict=True)] for scale in range(3)]
    shortest = [least(sqrt(dot(m[scale], m[scale])) for m in everything) for scale in range(3)]
    scales = [min_max(row) for row in raw]
    deviation = surprise(scales)
    return Trace(
        routed(scales, blended(scales, deltas(scales, p), p), rectified(deviation), p), raw, shortest, deviation
    )


def scores(head: Sequence[Row], p: Any) -> list[float]:
    """Return a* of every token of a head."""
    return traced(head, p).score
