"""VATP and CriticalKV by brute force, in the terms of `oracles.policies`; nothing is shared with the reference."""

import math
from collections.abc import Sequence
from fractions import Fraction

from conformance.assurance.oracles.policies import Layer, Row, Score, accumulated, dot, groups, top

__all__ = ["critical", "output_sizes", "two_stages", "vatp"]

Projection = Sequence[Sequence[Row]]


def vatp(layer: Layer) -> list[Score]:
    """What a key got from all queries of its group, times the magnitudes of its value."""
    return [
        [float(a or 0.0) * math.fsum(map(abs, value)) for a, value in zip(row, values, strict=True)]
        for row, values in zip(accumulated(layer), layer["v"], strict=True)
    ]


def output_sizes(layer: Layer, W_o: Projection) -> list[list[float]]:
    """Per KV head and token: magnitudes of what a query head writes into the output, as a mean over the group."""
    return [
        [
            math.fsum(
                abs(dot(value, column)) for h in group for column in zip(*W_o[h], strict=True)
            ) / len(group) for value in layer["v"][g]
        ] for g, group in enumerate(groups(layer))
    ]


def two_stages(first: Score, second: Sequence[float | None], B: int, share: Fraction) -> list[int]:
    """Protected tokens, a share of the other places by the first score, what is left by the second."""
    pinned = [i for i, x in enumerate(first) if x is None]
    early = top(first, len(pinned) + max(0, B - len(pinned)) * share // 1)
    return top([None if i in early else x for i, x in enumerate(second)], B)


def critical(layer: Layer, W_o: Projection, rows: list[Score], shares: Sequence[int]) -> list[list[int]]:
    """Half of each head's share by its scores, the rest by score and output."""
    found = []
    for row, size, B in zip(rows, output_sizes(layer, W_o), shares, strict=True):
        second = [None if a is None else (a + 1e-4) * b for a, b in zip(row, size, strict=True)]
        found.append(two_stages(row, second, B, Fraction(1, 2)))
    return found
