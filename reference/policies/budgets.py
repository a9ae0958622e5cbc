"""Number of tokens that a policy keeps, and division of the total among groups, by layer, then by head."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar

import numpy as np

from reference.policies.protections import InEachPiece
from spec.arrays import Float64, Int64, IntVector, Matrix
from spec.budget import Budget
from spec.composition import HEAD_SETS, LAYER_SETS, Required, required_by, requires
from spec.errors import SpecError
from spec.policy import Budgets, Policy, Scores

__all__ = [
    "Above", "Adaptive", "Competition", "LayersThenHeads", "Pyramid", "across_layers", "adakv_official", "even",
    "everything", "largest_remainder", "pyramid_targets", "pyramidkv_official", "spread", "tokens_of", "winners",
]


def tokens_of(policy: Policy, budget: Budget, seen: int) -> int:
    """Return B, the average number of tokens that a group keeps: the budget, but at least the policy's floor.

    If the policy protects tokens in each piece of a prompt, the floor includes the protected tokens of all pieces.
    """
    held = int(policy.protection(seen).sum()) if isinstance(policy.protection, InEachPiece) else 0
    return max(policy.floor, budget.tokens(seen), held if policy.least is not None else 0)


_UNITS = Required(frozenset({"tokens", "chunks", "trunks"}))
_BY_LAYER = HEAD_SETS | LAYER_SETS


@requires(replace(_UNITS, shares="equal", device=True))
def even(total: int, scores: Scores, /) -> Int64[IntVector, " g"]:
    """Return equal shares of the total.

    If the total is not a multiple of the number of groups, each of the first groups receives one token more.

    Implements: PO-WHOLE-SHARES
    """
    groups = len(scores.values)
    share, rest = divmod(total, groups)
    return np.full(groups, share, dtype=np.int64) + (np.arange(groups) < rest)


@dataclass(frozen=True)
class Above:
    """Budgets that keep the tokens with scores above a threshold, but at most an even share of the total per group."""

    tau: float
    required: ClassVar[Required] = Required(shares="layer", exact=False)

    def __post_init__(self) -> None:
        if math.isnan(self.tau):
            raise SpecError("threshold", self.tau, "must be a number, because no score is above NaN")

    def __call__(self, total: int, scores: Scores, /) -> Int64[IntVector, " g"]:
        """Return the number of each group's tokens that are protected or have a score above tau.

        The number is at most an even share of the total.

        Implements: PO-THRESHOLD

        Source: KVzap, Section 3.
        """
        wanted = (np.isnan(scores.values) | (scores.values > self.tau)).sum(axis=1)
        shares: IntVector = np.minimum(even(total, scores), wanted)
        return shares


@requires(replace(_UNITS, shares="everything", exact=False, device=True))
def everything(total: int, scores: Scores, /) -> Int64[IntVector, " g"]:
    """Return the number of all cached tokens as the budget of every group. The argument `total` is ignored."""
    return np.full(len(scores.values), scores.offsets[-1], dtype=np.int64)


def largest_remainder(targets: Sequence[Fraction]) -> Int64[IntVector, " g"]:
    """Round fractional targets to integers with the same sum, by the largest-remainder method.

    Targets are rounded down. Then the targets with the largest remainders are raised by 1 until the sum is right. If
    two remainders are equal, the target with the lower index is raised first.

    Implements: PO-WHOLE-SHARES
    """
    floors = np.array([math.floor(target) for target in targets], dtype=np.int64)
    missing = int(sum(targets)) - int(floors.sum())
    order = sorted(range(len(targets)), key=lambda g: (-(targets[g] - int(floors[g])), g))
    floors[order[:missing]] += 1
    return floors


def pyramid_targets(base: Fraction, past: int, L: int, beta: int) -> list[Fraction]:
    """Return how many tokens before the window each of L layers keeps.

    The number of tokens falls linearly with the layer index. The mean over the layers is `base`. Layer 0 keeps the most
    tokens. The last layer keeps base / beta tokens.

    Implements: PO-PYRAMID-BUDGET

    Source: PyramidKV, Section 3.2. Only `past` tokens precede the window. If layer 0 would keep more than `past`
    tokens, layer 0 keeps `past` tokens and the last layer keeps 2 base - past tokens. The mean over the layers is then
    still `base`.
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
    """PyramidKV's budgets: lower layers keep more tokens. The sum of the rounded budgets is exactly the total."""

    W: int
    """Number of tokens in the window. Every group keeps the window in addition to the tokens of the pyramid."""
    beta: int = 20

    @property
    def required(self) -> Required:
        return Required(frozenset({"tokens", "chunks"}), _BY_LAYER, window=self.W, shares="counts", device=True)

    def __call__(self, total: int, scores: Scores, /) -> Int64[IntVector, " g"]:
        """Return the budget of each group. The pyramid over the layers is computed separately for each head index.

        Implements: PO-PYRAMID-BUDGET
        """
        L, n = len(scores.values) // scores.heads, int(scores.offsets[-1])
        shares = np.empty((L, scores.heads), dtype=np.int64)
        W = min(self.W, n)
        for head, share in enumerate(spread(total, scores.heads)):
            base = Fraction(share, L) - W
            if base < 0:
                raise SpecError(
                    "budget", total, f"must be at least the {W} tokens of the window in each layer and head"
                )
            shares[:, head] = largest_remainder([W + target for target in pyramid_targets(base, n - W, L, self.beta)])
        return shares.ravel()


def winners(values: Float64[Matrix, "h n"], k: int) -> Int64[IntVector, " h"]:
    """Return how many of a layer's k highest scores belong to each head.

    If scores are equal, the lower head comes first, then the lower position.

    Implements: PO-ADAPTIVE-BUDGET

    Source: Ada-KV, Algorithm 1. Tokens without a score (NaN) are ignored.
    """
    order = np.argsort(-values.ravel(), kind="stable")[:k]
    return np.bincount(order // values.shape[1], minlength=len(values)).astype(np.int64)


@dataclass(frozen=True)
class Adaptive:
    """Ada-KV's budgets: each head receives an even part, and a part in proportion to the head's number of best scores.

    The fraction `safeguard` of a layer's budget is split evenly over the heads.
    """

    safeguard: Fraction | int
    required: ClassVar[Required] = Required(sets=HEAD_SETS, shares="layer", device=True)

    def __post_init__(self) -> None:
        _check_share(self.safeguard)

    def __call__(self, total: int, scores: Scores, /) -> Int64[IntVector, " g"]:
        """Return each head's budget: (1 - safeguard) * wins + safeguard * even share, rounded by largest remainder.

        The number `wins` of a head is the number of the layer's best scores that belong to the head. The number of
        protected tokens is added to each budget.

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
    """Budgets of Ada-KV in kvpress: each head receives a quota of tokens.

    The rest of a layer's budget goes to the best remaining scores of the layer.
    """

    safeguard: Fraction | int
    required: ClassVar[Required] = Required(sets=HEAD_SETS, shares="layer", device=True)

    def __post_init__(self) -> None:
        _check_share(self.safeguard)

    def __call__(self, total: int, scores: Scores, /) -> Int64[IntVector, " g"]:
        """Return the budget of each head. A head's quota is floor(safeguard * even share), including protected tokens.

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


@dataclass(frozen=True)
class LayersThenHeads:
    """Budgets by two rules: the first rule divides the total among layers, the second a layer's share among heads."""

    layers: Budgets
    heads: Budgets

    @property
    def required(self) -> Required:
        """Return what both rules need. The shares of a layer depend on the first rule, and on scores of the layer."""
        rule = required_by(self.layers) or Required()
        return replace(rule, units=frozenset({"tokens"}), sets=HEAD_SETS, device=False)

    def __call__(self, total: int, scores: Scores, /) -> Int64[IntVector, " g"]:
        """Return the budget of each head. The sum of a layer is the sum that the first rule gives the layer's heads.

        Implements: PO-COMPOSE
        """
        L = len(scores.values) // scores.heads
        sums = self.layers(total, scores).reshape(L, scores.heads).sum(axis=1)
        rows = np.split(scores.values, L)
        return np.concatenate([
            self.heads(int(share), replace(scores, values=layer_values, preferences=None))
            for share, layer_values in zip(sums, rows, strict=True)
        ])


@requires(Required(sets=_BY_LAYER, shares="model", device=True))
def across_layers(total: int, scores: Scores, /) -> Int64[IntVector, " g"]:
    """Return how many of the `total` best-scored tokens of all layers belong to each group.

    Protected tokens rank first.

    Implements: PO-GLOBAL-BUDGET

    Source: KVzip, Section 4.1 (non-uniform head budgets).
    """
    free, pinned = _open(scores.values, total)
    return pinned + winners(scores.values, free)


def _check_share(share: Fraction | int) -> None:
    if not 0 <= share <= 1:
        raise SpecError("safeguard", share, "must lie in [0, 1]")


def spread(total: int, parts: int) -> list[int]:
    """Return even shares of a total. If `total` is not a multiple of `parts`, the first shares are larger by 1."""
    return [total // parts + (part < total % parts) for part in range(parts)]


def _layers(total: int, scores: Scores) -> list[tuple[Float64[Matrix, "h n"], int]]:
    """Return each layer's score rows, and each layer's even share of the total."""
    L = len(scores.values) // scores.heads
    return list(zip(np.split(scores.values, L), spread(total, L), strict=True))


def _open(rows: Float64[Matrix, "h n"], share: int) -> tuple[int, int]:
    """Return the number of tokens for which the heads compete, and the number of protected tokens of each head."""
    pinned = int(np.isnan(rows[0]).sum())
    free = share - pinned * len(rows)
    if free < 0:
        raise SpecError(
            "budget", share, f"must be at least {pinned} tokens, which are protected, for each of {len(rows)} heads"
        )
    return min(free, rows.size - pinned * len(rows)), pinned


def pyramidkv_official(capacity: int, W: int, L: int, n: int, beta: int = 20) -> Int64[IntVector, " L"]:
    """Return how many tokens the official PyramidKV code keeps in each layer, including the window.

    The official code rounds the step between layers down to an integer, so the sum over the layers can exceed L *
    capacity.

    Implements: PO-PYRAMID-OFFICIAL

    Source: KVCache-Factory, `pyramidkv_utils.py`. If n is below 2 (capacity - W), every layer keeps min(n, capacity)
    tokens.

    Raises:
        SpecError: if L is below 2 (the official code divides by zero), or if the capacity is not above W.
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
    """Return how many tokens before the window the official Ada-KV code keeps in each head.

    Numbers that end in .5 are rounded to the even neighbour.

    Implements: PO-ADAKV-OFFICIAL

    Source: Ada-KV's official code. The code rounds each head's budget separately, so the sum over the heads can differ
    from len(wins) * base.
    """
    floor = int(base * safeguard)
    return np.array([round(won * (1 - safeguard) + floor) for won in wins], dtype=np.int64)
