"""Oracles of statistics by enumeration and by bisection."""

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction


def mcnemar(b: int, c: int) -> Fraction:
    """Count the sign patterns at least as uneven as the observed one, from the distribution by convolution."""
    ways = [1]
    for _ in range(b + c):
        ways = [x + y for x, y in zip([*ways, 0], [0, *ways], strict=True)]
    uneven = sum(count for wins, count in enumerate(ways) if abs(2 * wins - b - c) >= abs(c - b))
    return Fraction(uneven, 2 ** (b + c))


def wilson(correct: int, n: int, z: float) -> list[float]:
    """Return both ends of the interval, by bisection of the score test."""
    share = correct / n

    def turn(inside: float, outside: float) -> float:
        for _ in range(200):
            middle = (inside + outside) / 2
            if (share - middle) ** 2 * n <= z * z * middle * (1 - middle):
                inside = middle
            else:
                outside = middle
        return (inside + outside) / 2

    # The share is inside the interval, unless it is 0 or 1. Then it is the near end.
    eps = 1e-9
    low = 0.0 if correct == 0 else turn(min(share, 1 - eps), 0.0)
    high = 1.0 if correct == n else turn(max(share, eps), 1.0)
    return [low, high]


def interval(means: Sequence[float], confidence: float) -> list[float]:
    """Drop the extremes pair by pair, while a further pair fits into the share that is left out."""
    left = sorted(means)
    share = (1 - Fraction(str(confidence))) / 2
    dropped = 0
    while Fraction(dropped + 1, len(means)) <= share:
        left = left[1:-1]
        dropped += 1
    return [left[0], left[-1], sum(mean > 0 for mean in means) / len(means)]


def bootstrap(differences: Sequence[float], drawn: Sequence[Sequence[int]], confidence: float) -> list[float]:
    return interval([math.fsum(differences[i] for i in row) / len(row) for row in drawn], confidence)


def cluster_bootstrap(
    differences: Sequence[float], clusters: Sequence[int], drawn: Sequence[Sequence[int]], confidence: float,
) -> list[float]:
    means = []
    for row in drawn:
        members = [d for cluster in row for d, name in zip(differences, clusters, strict=True) if name == cluster]
        means.append(math.fsum(members) / len(members))
    return interval(means, confidence)


def power(n: int, discordance: Fraction, difference: Fraction, alpha: Fraction) -> Fraction:
    """Enumerate every sequence of n pairs, each lost, won or neither. This is feasible only for small n."""
    chance = {-1: (discordance - difference) / 2, 1: (discordance + difference) / 2, 0: 1 - discordance}
    total = Fraction(0)
    for pairs in itertools.product(chance, repeat=n):
        if mcnemar(pairs.count(-1), pairs.count(1)) <= alpha:
            total += math.prod((chance[pair] for pair in pairs), start=Fraction(1))
    return total
