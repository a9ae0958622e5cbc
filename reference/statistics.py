"""Statistics for paired answers that are either right or wrong: tests, intervals and power.

Sections and tables without a name are those of the paper on injection (`reference.injection`).
"""

import math
from collections.abc import Mapping
from fractions import Fraction
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from spec.arrays import Float64, Int64, IntMatrix, IntVector, Vector
from spec.errors import SpecError
from spec.validate import check_whole

__all__ = [
    "Interval", "bootstrap", "cluster_bootstrap", "draws", "holm", "mcnemar", "mcnemar_power",
    "ratio_bootstrap", "sign_flip", "stratified_draws", "wilson",
]


class Interval(NamedTuple):
    """Percentile interval of a mean difference, and the fraction of bootstrap resamples with a mean above 0."""

    low: float
    high: float
    positive: float


def mcnemar(b: int, c: int) -> float:
    """Return the two-sided p value of McNemar's exact test for b losses and c wins.

    Implements: IN-MCNEMAR

    Source: Section 3.9, "binomial CDF, not chi-square approximation".

    Raises:
        SpecError: if a count is negative or no whole number.
    """
    b, c = check_whole("b", b), check_whole("c", c)  # an int has no largest value, and an integer of NumPy has
    tail = sum(math.comb(b + c, k) for k in range(min(b, c) + 1))
    return float(min(Fraction(1), Fraction(2 * tail, 2 ** (b + c))))


def holm(p: Mapping[str, float]) -> dict[str, float]:
    """Return Holm-corrected p values: of m p values, the smallest is multiplied by m, the next by m - 1, and so on.

    Source: Holm 1979, "A simple sequentially rejective multiple test procedure".
    """
    corrected, highest = {}, 0.0
    for rank, (name, value) in enumerate(sorted(p.items(), key=lambda item: item[1])):
        highest = max(highest, min(1.0, value * (len(p) - rank)))
        corrected[name] = highest
    return corrected


def wilson(correct: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the Wilson score interval (low, high) of `correct` successes in n trials. A Wilson interval is in [0, 1].

    For 0 successes, `low` is exactly 0. For n successes, `high` is exactly 1.

    Implements: IN-WILSON

    Source: Table 4 ("Wilson 95%").

    Raises:
        SpecError: for n below 1, a number of successes outside [0, n], a count that is no whole number, or a confidence
            outside (0, 1).
    """
    n, correct = check_whole("n", n, 1), check_whole("correct", correct)
    if correct > n:
        raise SpecError("correct", correct, f"must lie in [0, {n}]")
    _check_confidence(confidence)
    z = -NormalDist().inv_cdf((1 - confidence) / 2)
    share = correct / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    # If the share is 0 or 1, rounding could move a bound past the share, and so out of [0, 1].
    low = 0.0 if correct == 0 else min(max(0.0, centre - half), share)
    high = 1.0 if correct == n else max(min(1.0, centre + half), share)
    return low, high


def draws(units: int, resamples: int, seed: int) -> Int64[IntMatrix, "resamples units"]:
    """Return bootstrap indices, drawn with replacement by the generator PCG64. Equal seeds give equal indices.

    Raises:
        SpecError: if `units` or `resamples` is below 1, if the seed is negative, or if a number is not whole.
    """
    units, resamples = check_whole("units", units, 1), check_whole("resamples", resamples, 1)
    size = (resamples, units)
    return np.random.default_rng(check_whole("seed", seed)).integers(units, size=size, dtype=np.int64)


def stratified_draws(
    strata: Int64[IntVector, " units"], resamples: int, seed: int,
) -> Int64[IntMatrix, "resamples units"]:
    """Return bootstrap indices, drawn with replacement inside each stratum.

    Each resample contains as many units of a stratum as the original sample. The seed for the stratum with index s is
    `seed + s`. If there is only one stratum, the indices equal the result of `draws`.

    Raises:
        SpecError: if `strata` is empty, if `resamples` is below 1, if the seed is negative, or if a number is not
            whole.
    """
    seed = check_whole("seed", seed)
    names = np.unique(strata) if len(strata) else np.zeros(1, dtype=np.int64)
    members = [np.flatnonzero(strata == name) for name in names]
    drawn = [stratum[draws(len(stratum), resamples, seed + at)] for at, stratum in enumerate(members)]
    return np.concatenate(drawn, axis=1)


def sign_flip(differences: Float64[Vector, " n"]) -> float:
    """Return the two-sided p value of the sign-flip test. Under the null hypothesis, each difference has a random sign.

    The test is exact, because the function enumerates all 2 ** n combinations of signs. The smallest possible p value
    is 2 ** (1 - n).

    Source: Fisher 1935, "The Design of Experiments", section 21.

    Raises:
        SpecError: if there are no differences, or more than 20.
    """
    if not 1 <= len(differences) <= 20:
        raise SpecError("differences", len(differences), "must be from 1 to 20, because all signs are tried")
    sums = np.zeros(1)
    for difference in differences:
        sums = np.concatenate([sums + difference, sums - difference])
    rounding = 1e-12 * float(np.abs(differences).sum())
    return float((np.abs(sums) >= abs(float(differences.sum())) - rounding).mean())


def bootstrap(
    differences: Float64[Vector, " n"], drawn: Int64[IntMatrix, "resamples n"], confidence: float = 0.95,
) -> Interval:
    """Return the percentile interval of the paired bootstrap. Each resampled unit is the difference of one query.

    Implements: IN-BOOTSTRAP

    Source: Section 3.9, "paired bootstrap 95% CI (10,000 resamples), Pr(delta > 0)".

    Raises:
        SpecError: if `drawn` is empty, or if the confidence is outside (0, 1).
    """
    return _percentiles(differences[drawn].mean(axis=1) if drawn.size else np.empty(0), confidence)


def cluster_bootstrap(
    differences: Float64[Vector, " n"], clusters: Int64[IntVector, " n"], drawn: Int64[IntMatrix, "resamples m"],
    confidence: float = 0.95,
) -> Interval:
    """Return the percentile interval of a bootstrap that resamples whole clusters.

    Queries of one conversation are not independent, so a conversation is a cluster.

    Implements: IN-CLUSTER-BOOTSTRAP

    Source: none in the paper. The benchmark of the paper on injection has 10 conversations.

    Raises:
        SpecError: if `drawn` is empty, or if the confidence is outside (0, 1).
    """
    sums, sizes = np.bincount(clusters, weights=differences), np.bincount(clusters)
    means = sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1) if drawn.size else np.empty(0)
    return _percentiles(means, confidence)


def ratio_bootstrap(
    numerators: Float64[Vector, " n"], denominators: Float64[Vector, " n"], clusters: Int64[IntVector, " n"],
    drawn: Int64[IntMatrix, "resamples m"], confidence: float = 0.95,
) -> Interval:
    """Return the bootstrap interval of a ratio: the mean numerator divided by the mean denominator.

    The bootstrap resamples whole clusters, and uses the numerators and denominators of the drawn clusters. If all
    denominators are 1, the result equals the result of `cluster_bootstrap`.

    Raises:
        SpecError: if `drawn` is empty, or if the confidence is outside (0, 1).
    """
    above, below = (np.bincount(clusters, weights=values) for values in (numerators, denominators))
    ratios = above[drawn].sum(axis=1) / below[drawn].sum(axis=1) if drawn.size else np.empty(0)
    return _percentiles(ratios, confidence)


def _percentiles(means: Float64[Vector, " resamples"], confidence: float) -> Interval:
    """Return the interval that leaves out at most the fraction (1 - confidence) / 2 of the resamples on each side."""
    _check_confidence(confidence)
    if not len(means):
        raise SpecError("drawn", 0, "must have at least one resample of one unit")
    ordered = np.sort(means)
    out = math.floor((1 - Fraction(str(confidence))) / 2 * len(means))
    return Interval(float(ordered[out]), float(ordered[len(means) - 1 - out]), float((means > 0).mean()))


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise SpecError("confidence", confidence, "must lie in (0, 1)")


def mcnemar_power(n: int, discordance: float, difference: float, alpha: float = 0.05) -> float:
    """Return the power of McNemar's exact test with n pairs: the probability that the p value is at most alpha.

    A pair is discordant (a win or a loss) with probability `discordance`. `difference` is the rate of wins minus the
    rate of losses.

    Implements: IN-POWER

    Source: Section 7.1. The paper's sample size of 385 ignores the rate of discordant pairs.

    Raises:
        SpecError: if `difference` exceeds `discordance`, if `discordance` is outside (0, 1] or alpha outside (0, 1), or
            if n is negative or no whole number.
    """
    n = check_whole("n", n)
    if not 0 < alpha < 1:
        raise SpecError("alpha", alpha, "must lie in (0, 1)")
    if not 0 < discordance <= 1:
        raise SpecError("discordance", discordance, "must lie in (0, 1]")
    if abs(difference) > discordance:
        raise SpecError("difference", difference, f"must not exceed the discordance, {discordance}")
    win = (1 + difference / discordance) / 2
    total = 0.0
    for m in range(n + 1):
        rejected = _rejecting(m, Fraction(str(alpha)))
        sides = [_binomial(k, m, win) + _binomial(m - k, m, win) for k in range(rejected)]
        total += _binomial(m, n, discordance) * sum(sides)
    return total


def _rejecting(m: int, alpha: Fraction) -> int:
    """Return the number of values of min(wins, losses) with p <= alpha, for m discordant pairs and alpha < 1."""
    tail, k = 0, 0
    while 2 * (tail := tail + math.comb(m, k)) <= alpha * 2**m:
        k += 1
    return k


def _binomial(k: int, n: int, p: float) -> float:
    """Return the probability of k successes in n trials, computed with logarithms. 0 ** 0 counts as 1."""
    if p in (0.0, 1.0):
        return float(k == n * p)
    ways = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    return math.exp(ways + k * math.log(p) + (n - k) * math.log1p(-p))
