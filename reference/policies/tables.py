"""Budgets from a table of weights, which a study or a paper found for the layers or the heads of a model."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from reference.policies.budgets import LayersThenHeads, largest_remainder
from spec.arrays import Int64, IntVector
from spec.composition import HEAD_SETS, LAYER_SETS, Required
from spec.errors import SpecError
from spec.policy import Budgets, Scores

__all__ = ["Table", "capped_shares", "check_weights"]


def capped_shares(weights: Sequence[Fraction], total: int, most: int) -> Int64[IntVector, " g"]:
    """Return shares of a total in proportion to the weights, but at most `most` each.

    If a share would be larger than `most`, the rest is divided among the remaining shares by their weights. If all
    remaining weights are 0, the rest is divided equally.

    Implements: PO-TABLE-BUDGET
    """
    targets, left, total = [Fraction(most)] * len(weights), list(range(len(weights))), min(total, most * len(weights))
    while left:
        rest = total - most * (len(weights) - len(left))
        size = sum(weights[at] for at in left)
        shares = {at: rest * (weights[at] / size if size else Fraction(1, len(left))) for at in left}
        if not (full := [at for at in left if shares[at] > most]):
            for at in left:
                targets[at] = shares[at]
            break
        left = [at for at in left if at not in full]
    return largest_remainder(targets)


@dataclass(frozen=True)
class Table:
    """Budgets in proportion to weights: one for each layer, or for each KV head of each layer, layer by layer."""

    W: int
    """Number of protected tokens. Every kept set keeps these tokens besides the share from the table."""
    shares: str
    """Weights, joined by "_": "3_2_1", or "0.5_0.25_0.25"."""

    def __post_init__(self) -> None:
        try:
            valid = all(weight >= 0 for weight in self.weights) and any(self.weights)
        except (ValueError, ZeroDivisionError):
            valid = False
        if not valid:
            raise SpecError("shares", self.shares, "must be weights of at least 0 that are joined by _, such as 3_2_1")

    @cached_property
    def weights(self) -> tuple[Fraction, ...]:
        """Return the weights as exact fractions."""
        return tuple(map(Fraction, self.shares.split("_")))

    @property
    def required(self) -> Required:
        return Required(
            frozenset({"tokens", "chunks"}), HEAD_SETS | LAYER_SETS, window=self.W, shares="counts", device=True
        )

    def __call__(self, total: int, scores: Scores, /) -> Int64[IntVector, " g"]:
        """Return the number of tokens of each kept set: the protected tokens, and a share of the rest.

        Implements: PO-TABLE-BUDGET

        Raises:
            SpecError: if the number of weights is wrong, or if the total is below the number of protected tokens.
        """
        groups, n = len(scores.values), int(scores.offsets[-1])
        W = min(self.W, n)
        check_weights(self, groups // scores.heads, groups)
        weights = self.weights if len(self.weights) == groups else tuple(
            weight for weight in self.weights for _ in range(scores.heads)
        )
        free = total - groups * W
        if free < 0:
            raise SpecError("budget", total, f"must be at least {W} protected tokens for each of {groups} kept sets")
        return W + capped_shares(weights, free, n - W)


def check_weights(budgets: Budgets, L: int, groups: int) -> None:
    """Check that a table, if the budgets have one, has a weight for each of L layers, or for each kept set.

    Raises:
        SpecError: if the number of weights is different.
    """
    table = budgets.layers if isinstance(budgets, LayersThenHeads) else budgets
    if isinstance(table, Table) and len(table.weights) not in (L, groups):
        reason = f"must be {L}, one for each layer, or {groups}, one for each kept set"
        raise SpecError("shares", f"{len(table.weights)} weights", reason)
