"""Estimate with an interval, and paired difference of answers that are right or wrong."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from reference.statistics import bootstrap, draws, mcnemar, wilson

__all__ = [
    "NOTHING", "RESAMPLES", "SAME_CACHE", "SEED", "SIGNIFICANT", "Estimate", "Pairs", "format_p", "pairs_of",
    "share_of",
]

SEED, RESAMPLES = 0, 2000
"""Seed and number of resamples of every bootstrap of a study."""
SIGNIFICANT = 0.05
"""Largest p value of a significant difference."""
SAME_CACHE = 0.01
"""Largest relative difference of the numbers of prompt tokens that two compared policies keep."""


class Estimate(NamedTuple):
    """Value with a 95 % interval and the number of samples. A missing number is NaN."""

    value: float
    low: float
    high: float
    n: int

    @property
    def known(self) -> bool:
        """Return True if the value is not NaN."""
        return not math.isnan(self.value)

    def text(self, form: str = ".2f") -> str:
        """Return value and interval as text, with numbers in this format, or "" without a value."""
        if not self.known:
            return ""
        return f"{self.value:{form}}" + ("" if math.isnan(self.low) else f" [{self.low:{form}}, {self.high:{form}}]")

    def __str__(self) -> str:
        return self.text()


NOTHING = Estimate(math.nan, math.nan, math.nan, 0)


class Pairs(NamedTuple):
    """Comparison of two policies on the same samples: gain of the first, samples won and lost, McNemar's exact p."""

    difference: Estimate
    won: int
    lost: int
    p: float


def format_p(p: float, bound: bool = False) -> str:
    """Return a p value as text, never as 0.0000. With `bound`, the text says that p is at most this value."""
    text = "< 0.0001" if p < 0.0001 else f"{p:.4f}"
    return f"≤ {text.removeprefix('< ')}" if bound else text


def share_of(correct: int, n: int) -> Estimate:
    """Return the fraction of right answers with Wilson's interval."""
    return Estimate(correct / n, *wilson(correct, n), n)


def pairs_of(first: Sequence[float], second: Sequence[float]) -> Pairs:
    """Return the paired difference of two vectors of right (1) and wrong (0) answers. One sample gives no interval."""
    differences, n = np.subtract(first, second, dtype=np.float64), len(first)
    low, high, _ = bootstrap(differences, draws(n, RESAMPLES, SEED)) if n > 1 else (math.nan, math.nan, 0.0)
    won, lost = int((differences > 0).sum()), int((differences < 0).sum())
    return Pairs(Estimate(float(differences.mean()), low, high, n), won, lost, mcnemar(lost, won))
