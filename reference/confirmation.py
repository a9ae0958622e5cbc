"""The pre-registered protocol of the paper Set-Conditioned Diversity: data split, choice of lambda, decision rule."""

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
"""Significance level for one model at one budget: a difference with a p value below `PER_CELL` is significant."""
BONFERRONI = 0.0125
"""Bonferroni-corrected significance level: `PER_CELL` divided by 4 (two models times two budgets)."""
RESAMPLES = 10_000
_TIE = 0.005
"""Largest difference between two means that counts as a tie."""
Branch = Literal["A", "B", "C"]


class Cell(NamedTuple):
    """Accuracy difference for one model at one budget, with confidence interval (low, high) and two-sided p value."""

    difference: float
    low: float
    high: float
    p: float


def split_of(unique_id: str) -> Literal["dev", "confirm"]:
    """Return the split of a problem: "dev" if the MD5 hash of its id, modulo 5, is 0 or 1, else "confirm".

    Source: Set-Conditioned Diversity, Section 4.2.
    """
    bucket = int(hashlib.md5(unique_id.encode(), usedforsecurity=False).hexdigest(), 16) % 5
    return "dev" if bucket < 2 else "confirm"


def choose_lambda(differences: Mapping[float, Sequence[float]]) -> float:
    """Return the smallest lambda whose mean accuracy difference is at most 0.005 below the largest mean.

    Args:
        differences: for each lambda, one value per cell (model and budget): accuracy with the penalty minus accuracy
            without the penalty.

    Source: "ties within 0.5 pp are broken toward the smaller" (Section 4.2, Phase 1).

    Raises:
        SpecError: if `differences` is empty, or if a lambda has no value.
    """
    if not differences or not all(len(cells) for cells in differences.values()):
        raise SpecError("differences", dict(differences), "must have a difference for each lambda")
    means = {penalty: fmean(cells) for penalty, cells in differences.items()}
    return min(penalty for penalty, mean in means.items() if mean >= max(means.values()) - _TIE)


def paired_difference(
    differences: Float64[Vector, " n"], problems: Int64[IntVector, " n"], resamples: int = RESAMPLES, seed: int = 0,
) -> Cell:
    """Return the mean paired difference, and the confidence interval and p value of this mean from a cluster bootstrap.

    A cluster contains the differences of one problem for all seeds.

    The p value is 2 min(a, b): a is the fraction of resamples with a mean <= 0, and b the fraction with a mean >= 0.
    The p value is at least 2 / resamples, and at most 1.

    Args:
        differences: per problem and seed, correctness (0 or 1) with the penalty minus correctness without the penalty.
        problems: index of the problem of each difference, counted from 0.
        resamples: number of bootstrap resamples.
        seed: seed of the random numbers of the bootstrap.

    Source: Section 4.2, Phase 2.

    Raises:
        SpecError: if `differences` is empty.
    """
    if not len(differences):
        raise SpecError("differences", 0, "must have at least one difference")
    drawn = draws(int(problems.max()) + 1, resamples, seed)
    low, high, above = cluster_bootstrap(differences, problems, drawn)
    below = cluster_bootstrap(-differences, problems, drawn).positive
    p = min(1.0, 2 * max(1 / resamples, min(1 - above, 1 - below)))
    return Cell(float(differences.mean()), low, high, p)


def branch_of(first: Sequence[Cell], second: Sequence[Cell]) -> Branch:
    """Apply the pre-registered decision rule to the results of two models, and return its branch: A, B or C.

    The paper developed its method on the first model. The second model tests whether the method transfers.

    Branch A is returned if three conditions are true:

    1. At least one cell of the first model has a positive difference with p < 0.05.
    2. The mean difference over the cells of the second model is positive.
    3. No cell of the second model has a negative difference with p < 0.05.

    Branch B is returned if condition 1 is true, and condition 2 or 3 is false. Branch C is returned if condition 1 is
    false. As pre-registered, the rule ignores negative differences of the first model.

    Source: Section 4.2, "Decision rule".

    Raises:
        SpecError: if `first` or `second` is empty.
    """
    for name, cells in (("first", first), ("second", second)):
        if not cells:
            raise SpecError(name, (), "must have at least one cell")
    if not any(cell.difference > 0 and cell.p < PER_CELL for cell in first):
        return "C"
    harmed = any(cell.difference < 0 and cell.p < PER_CELL for cell in second)
    return "B" if harmed or fmean(cell.difference for cell in second) <= 0 else "A"
