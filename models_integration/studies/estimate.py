"""An estimate with its interval, and the paired difference of answers that are right or wrong."""

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
"""Of every bootstrap of a study."""
SIGNIFICANT = 0.05
"""The largest p of a difference that counts."""
SAME_CACHE = 0.01
"""Largest difference of the prompt tokens that two compared policies keep, as a part of the smaller number."""


class Estimate(NamedTuple):
    """A value with its 95 % interval, and the samples that it is about; NaN where there is none."""

    value: float
    low: float
    high: float
    n: int

    @property
    def known(self) -> bool:
        """Whether there is a value."""
        return not math.isnan(self.value)

    def text(self, form: str = ".2f") -> str:
        """The value and its interval, each in this format; nothing if there is no value."""
        if not self.known:
            return ""
        return f"{self.value:{form}}" + ("" if math.isnan(self.low) else f" [{self.low:{form}}, {self.high:{form}}]")

    def __str__(self) -> str:
        return self.text()


NOTHING = Estimate(math.nan, math.nan, math.nan, 0)


class Pairs(NamedTuple):
    """Two policies on the same samples: what the first gains, samples won and lost, and McNemar's exact p."""

    difference: Estimate
    won: int
    lost: int
    p: float


def format_p(p: float, bound: bool = False) -> str:
    """A p value as text, never 0.0000; `bound`: the smallest p that the resamples can give, so p is at most this."""
    text = "< 0.0001" if p < 0.0001 else f"{p:.4f}"
    return f"≤ {text.removeprefix('< ')}" if bound else text


def share_of(correct: int, n: int) -> Estimate:
    """A share of right answers, with Wilson's interval."""
    return Estimate(correct / n, *wilson(correct, n), n)


def pairs_of(first: Sequence[float], second: Sequence[float]) -> Pairs:
    """The difference of two vectors of right (1) and wrong (0) answers, sample by sample; one has no interval."""
    differences, n = np.subtract(first, second, dtype=np.float64), len(first)
    low, high, _ = bootstrap(differences, draws(n, RESAMPLES, SEED)) if n > 1 else (math.nan, math.nan, 0.0)
    won, lost = int((differences > 0).sum()), int((differences < 0).sum())
    return Pairs(Estimate(float(differences.mean()), low, high, n), won, lost, mcnemar(lost, won))
