"""Budgets: how a total is shared over groups. Groups of one layer stand side by side, layers one after the other."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from spec.arrays import Float64, Int64, IntVector, Matrix
from spec.errors import SpecError
from spec.policy import Scores

__all__ = [
    "Above", "Adaptive", "Competition", "Pyramid", "across_layers", "adakv_official", "even", "everything",
    "largest_remainder", "pyramid_targets", "pyramidkv_official", "spread", "winners",
]


def even(total: int, scores: Scores, /) -> Int64[IntVector, " g"]:
    """The same share for every group; what does not divide goes to the lower groups, one token each.

    Implements: PO-WHOLE-SHARES
    """
    groups = len(scores.values)
    share, rest = divmod(total, groups)
    return np.full(groups, share, dtype=np.int64) + (np.arange(groups) < rest)


@dataclass(frozen=True)
class Above:
    """What scores above a threshold stays, up to an even share."""

    tau: float

    def __call__(self, total: int, scores: Scores, /) -> Int64[IntVector, " g"]:
        """Each group's tokens that are protected or score more than tau, but at most its share.

        Implements: PO-THRESHOLD

        Source: KVzap, Section 3.
        """
        wanted = (np.isnan(scores.values) | (scores.values > self.tau)).sum(axis=1)
        shares: IntVector = np.minimum(even(total, scores), wanted)
        return shares


def everything(total: int, scores: Scores, /) -> Int64[IntVector, " g"]:
    """All tokens for every group, whatever the total."""
    return np.full(len(scores.values), scores.offsets[-1], dtype=np.int64)


def largest_remainder(targets: Sequence[Fraction]) -> Int64[IntVector, " g"]:
    """Whole tokens for exact targets whose sum is whole: floors, then one each by remainder, lower index first.

    Implements: PO-WHOLE-SHARES
    """
    floors = np.array([math.floor(target) for target in targets], dtype=np.int64)
    missing = int(sum(targets)) - int(floors.sum())
    order = sorted(range(len(targets)), key=lambda g: (-(targets[g] - int(floors[g])), g))
    floors[order[:missing]] += 1
    return floors


def pyramid_targets(base: Fraction, past: int, L: int, beta: int) -> list[Fraction]:
    """Tokens beyond the window for each of L layers: linear, from the most in layer 0 to base / beta in the last.

    Implements: PO-PYRAMID-BUDGET

    Source: PyramidKV, Section 3.2. Where layer 0 would exceed the `past` tokens that there are, it gets these, and the
    last layer what keeps the mean at base.
    """
    if L == 1 or base >= past:
        return [min(base, Fraction(past))] * L
    least = base / beta
    if 2 * base - least >= past:
        least = 2 * base - past
    most = 2 * base - least
    return [most - layer * (most - least) / (L - 1) for layer in range(L)]


@dataclass(frozen=True)
class Pyramid:
    """More for lower layers: PyramidKV's line, made whole by largest remainder. The total is met exactly."""

    W: int
    """Tokens of every group that the line is drawn above."""
    beta: int = 20

    def __call__(self, total: int, scores: Scores, /) -> Int64[IntVector, " g"]:
        """Each head's column of layers is a pyramid of its own.

        Implements: PO-PYRAMID-BUDGET
        """
        L, n = len(scores.values) // scores.heads, int(scores.offsets[-1])
        shares = np.empty((L, scores.heads), dtype=np.int64)
        W = min(self.W, n)
        for head, share in enumerate(spread(total, scores.heads)):
            base = Fraction(share, L) - W
            if base < 0:
                raise SpecError("budget", total, f"must give each layer and head its window of {W} tokens")
            shares[:, head] = largest_remainder([W + target for target in pyramid_targets(base, n - W, L, self.beta)])
        return shares.ravel()


def winners(values: Float64[Matrix, "h n"], k: int) -> Int64[IntVector, " h"]:
    """How many of the k highest scores of a layer each head has; lower head, then lower position first on a tie.

    Implements: PO-ADAPTIVE-BUDGET

    Source: Ada-KV, Algorithm 1. A token without a score takes no part.
    """
    order = np.argsort(-values.ravel(), kind="stable")[:k]
    return np.bincount(order // values.shape[1], minlength=len(values)).astype(np.int64)


@dataclass(frozen=True)
class Adaptive:
    """Ada-KV: heads share a layer's tokens by how many of its best scores they have; a part is shared evenly."""

    safeguard: Fraction | int

    def __post_init__(self) -> None:
        _check_share(self.safeguard)

    def __call__(self, total: int, scores: Scores, /) -> Int64[IntVector, " g"]:
        """Per layer: (1 - safeguard) of the wins and safeguard of the even share, whole by largest remainder.

        Implements: PO-ADAPTIVE-BUDGET
        """
        shares = []
        for rows, share in _layers(total, scores):
            free, pinned = _open(rows, share)
            wins = winners(rows, free)
            shares.append(pinned + largest_remainder([
                (1 - self.safeguard) * int(won) + self.safeguard * Fraction(free, len(rows)) for won in wins
            ]))
        return np.concatenate(shares)


@dataclass(frozen=True)
class Competition:
    """The best scores of a layer win, whichever head they are in, once each head has a quota of its own best."""

    safeguard: Fraction | int

    def __post_init__(self) -> None:
        _check_share(self.safeguard)

    def __call__(self, total: int, scores: Scores, /) -> Int64[IntVector, " g"]:
        """Per layer: each head's best floor(safeguard * even share), protected ones among them; then the layer's best.

        Implements: PO-COMPETITION-BUDGET
        """
        shares = []
        for rows, share in _layers(total, scores):
            free, pinned = _open(rows, share)
            quota = max(0, math.floor(self.safeguard * (share // len(rows))) - pinned)
            quota = min(quota, free // len(rows))
            rank = np.argsort(np.argsort(-rows, axis=1, kind="stable"), axis=1)
            wins = winners(np.where(rank < quota, np.nan, rows), free - quota * len(rows))
            shares.append(pinned + quota + wins)
        return np.concatenate(shares)


def across_layers(total: int, scores: Scores, /) -> Int64[IntVector, " g"]:
    """The best scores of all layers win, whichever layer and head they are in.

    Implements: PO-GLOBAL-BUDGET

    Source: KVzip, Section 4.1 (non-uniform head budgets).
    """
    free, pinned = _open(scores.values, total)
    return pinned + winners(scores.values, free)


def _check_share(share: Fraction | int) -> None:
    if not 0 <= share <= 1:
        raise SpecError("safeguard", share, "must lie in [0, 1]")


def spread(total: int, parts: int) -> list[int]:
    """Even shares of a total; what does not divide goes to the first parts."""
    return [total // parts + (part < total % parts) for part in range(parts)]


def _layers(total: int, scores: Scores) -> list[tuple[Float64[Matrix, "h n"], int]]:
    """Each layer's rows, and its even share of the total."""
    L = len(scores.values) // scores.heads
    return list(zip(np.split(scores.values, L), spread(total, L), strict=True))


def _open(rows: Float64[Matrix, "h n"], share: int) -> tuple[int, int]:
    """Tokens of a layer that the heads compete for, and the protected ones of each head."""
    pinned = int(np.isnan(rows[0]).sum())
    free = share - pinned * len(rows)
    if free < 0:
        raise SpecError("budget", share, f"must hold the {pinned} protected tokens of each of {len(rows)} heads")
    return min(free, rows.size - pinned * len(rows)), pinned


def pyramidkv_official(capacity: int, W: int, L: int, n: int, beta: int = 20) -> Int64[IntVector, " L"]:
    """Tokens per layer, the window among them: integer steps, so that the sum exceeds L * capacity.

    Implements: PO-PYRAMID-OFFICIAL

    Source: KVCache-Factory, `pyramidkv_utils.py`. Below 2 (capacity - W) tokens every layer gets the capacity.

    Raises:
        SpecError: for fewer than two layers (the code divides by zero), or a capacity that is not above W.
    """
    if L < 2:
        raise SpecError("L", L, "must be at least 2: the step is divided by L - 1")
    base = capacity - W
    if base <= 0:
        raise SpecError("capacity", capacity, f"must exceed the window of {W}")
    if n < capacity or n < 2 * base:
        return np.full(L, min(n, capacity), dtype=np.int64)
    least = base // beta
    most = 2 * base - least
    if most >= n - W:
        most = n - W
        least = 2 * base - most
    step = (most - least) // (L - 1)
    return W + most - step * np.arange(L, dtype=np.int64)


def adakv_official(wins: Sequence[int], base: int, safeguard: Fraction) -> Int64[IntVector, " h"]:
    """Tokens per head beyond the window: each blend is rounded by itself, a half to the even neighbour.

    Implements: PO-ADAKV-OFFICIAL

    Source: Ada-KV's official code. The sum may miss len(wins) * base on either side.
    """
    floor = int(base * safeguard)
    return np.array([round(won * (1 - safeguard) + floor) for won in wins], dtype=np.int64)
