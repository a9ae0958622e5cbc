"""The alpha selector by brute force: plain lists, from the paper's Algorithm 1; nothing is shared with the rest."""

import math
from collections.abc import Sequence

__all__ = ["alpha", "cosine", "schedule", "signatures", "toward_mean", "unit"]

Row = Sequence[float]


def plain_sum(terms: Sequence[float]) -> float:
    """From left to right; `sum` of newer Pythons compensates."""
    total = 0.0
    for term in terms:
        total += term
    return total


def unit(u: Row) -> list[float]:
    """Eq. 1: u over its length plus 1e-8."""
    length = math.sqrt(plain_sum([x * x for x in u])) + 1e-8
    return [x / length for x in u]


def mean(vectors: Sequence[Row]) -> list[float]:
    return [plain_sum([v[c] for v in vectors]) / len(vectors) for c in range(len(vectors[0]))]


def signatures(values: Sequence[Sequence[Sequence[Row]]], mode: str) -> list[list[list[float]]]:
    """Eq. 1 of values[layer][head][token]: one list for the cache, one per layer, or one per layer and head."""
    n = range(len(values[0][0]))
    if mode == "flat":
        return [[unit(mean([head[i] for layer in values for head in layer])) for i in n]]
    if mode == "layer":
        return [[unit(mean([head[i] for head in layer])) for i in n] for layer in values]
    return [[unit(head[i]) for i in n] for layer in values for head in layer]


def cosine(a: Row, b: Row) -> float:
    return plain_sum([x * y for x, y in zip(a, b, strict=True)])


def alpha(s: Sequence[float], V: Sequence[Row], retained: Sequence[int], k: int, lam: float) -> list[int]:
    """Algorithm 1: at every step every candidate against every token that is kept; NaN is the worst score."""
    S = list(retained)
    while len(S) < k:
        best, best_gain = -1, -math.inf
        for i in range(len(s)):
            if i in S:
                continue
            gain = -math.inf if math.isnan(s[i]) else s[i] - lam * max([0.0, *[cosine(V[i], V[j]) for j in S]])
            if best < 0 or gain > best_gain:
                best, best_gain = i, gain
        S.append(best)
    return sorted(S)


def toward_mean(V: Sequence[Row]) -> list[float]:
    """The cosine of each signature with the direction of their mean."""
    direction = unit(mean(V))
    return [cosine(v, direction) for v in V]


def schedule(B: int, rounds: int, tilt: int) -> list[int]:
    """B + tilt down to B - tilt in equal steps, as integers of mean B: rounds with the largest rests get one more."""
    floors, rests = [], []
    for r in range(rounds):
        whole, rest = divmod((B + tilt) * (rounds - 1) - 2 * tilt * r, rounds - 1)
        floors.append(whole)
        rests.append(rest)
    by_rest = sorted(range(rounds), key=lambda r: (-rests[r], r))
    for r in by_rest[: B * rounds - sum(floors)]:
        floors[r] += 1
    return floors
