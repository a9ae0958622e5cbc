"""Signatures, the prior toward their mean, and the schedule of budgets, by brute force in plain lists."""

import math
from collections.abc import Sequence

from conformance.oracles import added
from conformance.oracles.diversity import Row, cosine


def unit(u: Row) -> list[float]:
    """Return u divided by its length plus 1e-8 (Eq. 1)."""
    length = math.sqrt(added([x * x for x in u])) + 1e-8
    return [x / length for x in u]


def mean(vectors: Sequence[Row]) -> list[float]:
    return [added([v[c] for v in vectors]) / len(vectors) for c in range(len(vectors[0]))]


def signatures(values: Sequence[Sequence[Sequence[Row]]], mode: str) -> list[list[list[float]]]:
    """Return the signatures (Eq. 1) from values[layer][head][token].

    There is one list for the cache, one list per layer, or one list per layer and head.
    """
    n = range(len(values[0][0]))
    if mode == "flat":
        return [[unit(mean([head[i] for layer in values for head in layer])) for i in n]]
    if mode == "layer":
        return [[unit(mean([head[i] for head in layer])) for i in n] for layer in values]
    return [[unit(head[i]) for i in n] for layer in values for head in layer]


def toward_mean(V: Sequence[Row]) -> list[float]:
    """Return the cosine of each signature with the direction of their mean."""
    direction = unit(mean(V))
    return [cosine(v, direction) for v in V]


def schedule(B: int, rounds: int, tilt: int) -> list[int]:
    """Return budgets from B + tilt down to B - tilt in equal steps, as integers with the mean B.

    Rounds with the largest remainders get one more token.
    """
    floors, rests = [], []
    for r in range(rounds):
        whole, rest = divmod((B + tilt) * (rounds - 1) - 2 * tilt * r, rounds - 1)
        floors.append(whole)
        rests.append(rest)
    by_rest = sorted(range(rounds), key=lambda r: (-rests[r], r))
    for r in by_rest[: B * rounds - sum(floors)]:
        floors[r] += 1
    return floors
