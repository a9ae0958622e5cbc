"""Injection: wrong readings of the statistics."""

from fractions import Fraction
from statistics import NormalDist

import numpy as np

from conformance.assurance.saboteurs.registry import Array, instead_of
from reference.statistics import Interval, bootstrap, cluster_bootstrap, mcnemar, mcnemar_power, wilson

__all__: list[str] = []


@instead_of(mcnemar, "IN-MCNEMAR")
def mid_p(b: int, c: int) -> float:
    """Half of what was seen: 0.0080 for the merged pool."""
    below = mcnemar(min(b, c) - 1, max(b, c) + 1) if min(b, c) > 0 else 0.0
    return (mcnemar(b, c) + below) / 2


@instead_of(mcnemar, "IN-MCNEMAR")
def one_sided(b: int, c: int) -> float:
    """Only wins count as uneven."""
    return mcnemar(b, c) / 2


@instead_of(mcnemar, "IN-MCNEMAR")
def chi_square(b: int, c: int) -> float:
    """The normal approximation, with a continuity correction."""
    if b + c == 0:
        return 1.0
    return 2 * NormalDist().cdf(-max(abs(b - c) - 1, 0) / (b + c) ** 0.5)


@instead_of(wilson, "IN-WILSON")
def normal_interval(correct: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """The share, plus and minus z standard errors."""
    wilson(correct, n, confidence)
    share, z = correct / n, NormalDist().inv_cdf(0.5 + confidence / 2)
    half = z * (share * (1 - share) / n) ** 0.5
    return share - half, share + half


@instead_of(wilson, "IN-WILSON")
def one_sided_quantile(correct: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """z leaves all of 1 - confidence on one side."""
    return wilson(correct, n, 2 * confidence - 1)


@instead_of(bootstrap, "IN-BOOTSTRAP")
def nothing_counts_as_a_win(differences: Array, drawn: Array, confidence: float = 0.95) -> Interval:
    """A resample whose mean is 0 counts as positive."""
    found = bootstrap(differences, drawn, confidence)
    return Interval(found.low, found.high, float((differences[drawn].mean(axis=1) >= 0).mean()))


@instead_of(bootstrap, "IN-BOOTSTRAP")
def interpolated(differences: Array, drawn: Array, confidence: float = 0.95) -> Interval:
    """Percentiles lie between two resamples."""
    found = bootstrap(differences, drawn, confidence)
    means = differences[drawn].mean(axis=1)
    share = float(1 - Fraction(str(confidence))) / 2
    return Interval(float(np.quantile(means, share)), float(np.quantile(means, 1 - share)), found.positive)


@instead_of(cluster_bootstrap, "IN-CLUSTER-BOOTSTRAP")
def mean_of_means(differences: Array, clusters: Array, drawn: Array, confidence: float = 0.95) -> Interval:
    """Every cluster weighs the same."""
    means = np.bincount(clusters, weights=differences) / np.bincount(clusters)
    return bootstrap(means, drawn, confidence)


@instead_of(cluster_bootstrap, "IN-CLUSTER-BOOTSTRAP")
def by_the_number_of_pairs(differences: Array, clusters: Array, drawn: Array, confidence: float = 0.95) -> Interval:
    """The sum of a resample is divided by the number of pairs of the study."""
    sums = np.bincount(clusters, weights=differences) * drawn.shape[1] / len(differences) if len(drawn) else differences
    return bootstrap(sums, drawn, confidence)


@instead_of(mcnemar_power, "IN-POWER")
def strictly_below_alpha(n: int, discordance: float, difference: float, alpha: float = 0.05) -> float:
    """p must be below alpha."""
    return mcnemar_power(n, discordance, difference, float(np.nextafter(alpha, 0.0)))


@instead_of(mcnemar_power, "IN-POWER")
def every_pair_is_discordant(n: int, discordance: float, difference: float, alpha: float = 0.05) -> float:
    """The discordance is left out: n discordant pairs."""
    mcnemar_power(0, discordance, difference, alpha)
    return mcnemar_power(n, 1.0, difference, alpha)
