"""The registered protocol of the paper on set-conditioned diversity: its split, the choice of lambda, its branches."""

import hashlib
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Literal, NamedTuple

from reference.statistics import cluster_bootstrap, draws
from spec.arrays import Float64, Int64, IntVector, Vector
from spec.errors import SpecError

__all__ = [
    "BONFERRONI", "PER_CELL", "RESAMPLES", "Branch", "Cell", "branch_of", "choose_lambda", "paired_difference",
    "split_of",
]

PER_CELL = 0.05
"""The largest p of one cell that counts."""
BONFERRONI = 0.0125
"""PER_CELL over the four cells of two models and two budgets."""
RESAMPLES = 10_000
_TIE = 0.005
"""Means of two lambdas that differ by at most so much are equal."""
Branch = Literal["A", "B", "C"]


class Cell(NamedTuple):
    """What one model gains at one budget: difference of accuracies, its interval and two-sided p."""

    difference: float
    low: float
    high: float
    p: float


def split_of(unique_id: str) -> Literal["dev", "confirm"]:
    """The part of a problem: dev if the MD5 of its id, modulo 5, is 0 or 1.

    Source: Set-Conditioned Diversity, Section 4.2.
    """
    bucket = int(hashlib.md5(unique_id.encode(), usedforsecurity=False).hexdigest(), 16) % 5
    return "dev" if bucket < 2 else "confirm"


def choose_lambda(differences: Mapping[float, Sequence[float]]) -> float:
    """The lambda with the largest mean difference over the cells; the smallest of those within 0.005 of that.

    Args:
        differences: accuracy with the penalty minus accuracy without, by lambda, one for each cell.

    Source: Section 4.2, Phase 1; "ties within 0.5 pp are broken toward the smaller".

    Raises:
        SpecError: if a lambda has no cell, or there is no lambda.
    """
    if not differences or not all(len(cells) for cells in differences.values()):
        raise SpecError("differences", dict(differences), "must have a difference for each lambda")
    means = {penalty: fmean(cells) for penalty, cells in differences.items()}
    return min(penalty for penalty, mean in means.items() if mean >= max(means.values()) - _TIE)


def paired_difference(
    differences: Float64[Vector, " n"], problems: Int64[IntVector, " n"], resamples: int = RESAMPLES, seed: int = 0,
) -> Cell:
    """The mean of paired differences of right answers, with all seeds of a problem drawn as one.

    p is twice the smaller share of resamples on one side of 0, and at most 1; a resample at 0 is on both sides. It is
    never below 2 / resamples, because no resample says more.

    Args:
        differences: of one answer with and one without the penalty, for each problem and seed.
        problems: number of each answer's problem, from 0.
        resamples, seed: of the bootstrap.

    Source: Section 4.2, Phase 2.

    Raises:
        SpecError: if there is no answer.
    """
    if not len(differences):
        raise SpecError("differences", 0, "must hold at least one")
    drawn = draws(int(problems.max()) + 1, resamples, seed)
    low, high, above = cluster_bootstrap(differences, problems, drawn)
    below = cluster_bootstrap(-differences, problems, drawn).positive
    p = min(1.0, 2 * max(1 / resamples, min(1 - above, 1 - below)))
    return Cell(float(differences.mean()), low, high, p)


def branch_of(first: Sequence[Cell], second: Sequence[Cell]) -> Branch:
    """What the cells of the model on which the mechanism was made, and those of the other, entitle to claim.

    A: a cell of the first has a positive difference with p < 0.05, the mean difference of the second is positive, and
    no cell of the second is negative with p < 0.05. B: the first condition holds and one of the others fails. C: the
    first fails. A negative cell of the first model is not looked at, as registered.

    Source: Section 4.2, "Decision rule".

    Raises:
        SpecError: if a model has no cell.
    """
    for name, cells in (("first", first), ("second", second)):
        if not cells:
            raise SpecError(name, (), "must hold at least one cell")
    if not any(cell.difference > 0 and cell.p < PER_CELL for cell in first):
        return "C"
    harmed = any(cell.difference < 0 and cell.p < PER_CELL for cell in second)
    return "B" if harmed or fmean(cell.difference for cell in second) <= 0 else "A"
