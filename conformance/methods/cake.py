"""CAKE by brute force, with the functions of `methods.policies`. No code is shared with the reference."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from conformance.methods.brute import KERNEL, Brute, Parts, W, newest, plain
from conformance.methods.policies import Layer, Score, groups, last_rows, padded, pool, top, whole, window
from conformance.oracles.box import Box
from conformance.oracles.boxes import column_sums, each, fsum, largest, log, minus, over, plus, positive, squares, times
from conformance.strategies.policy_inputs import Inputs, Kept


def variances(rows: Sequence[Any]) -> Any:
    """Return the variance of each column, with the number of rows minus one as divisor.

    For one row, the variance is 0.
    """
    mean = over(column_sums(rows), len(rows))
    return over(column_sums([squares(minus(row, mean)) for row in rows]), max(1, len(rows) - 1))


def preference(layer: Layer, W: int, tau1: float, tau2: float) -> Any:
    """Return the preference of a layer.

    The preference combines the entropy of every row before the window, and the variance of every key over the window's
    queries.
    """
    past, rows = window(layer, W), last_rows(layer, W)
    weights = [positive(row[:past]) for head in rows for row in head]
    entropy = -fsum(fsum(times(row, each(log, row))) for row in weights)
    shift = fsum(fsum(variances([row[:past] for row in head])) for head in rows)
    return largest([0.0, entropy]) ** (1 / tau1) * shift ** (1 / tau2)


def scores(layer: Layer, W: int, kernel: int, gamma: float) -> list[Score]:
    """Return the scores: mean and variance over the window, pooled, averaged over the group."""
    n, past, rows, result = len(layer["k"][0]), window(layer, W), last_rows(layer, W), []
    for group in groups(layer):
        pooled = []
        for h in group:
            before = [row[:past] for row in rows[h]]
            mean = over(column_sums(before), len(before))
            pooled.append(pool(plus(mean, times(variances(before), gamma)), kernel, "average"))
        result.append(padded([fsum(p[i] for p in pooled) / len(group) for i in range(past)], n))
    return result


def preferred_shares(preferences: Sequence[float], B: int, W: int, n: int) -> list[int]:
    """Return the number of tokens of each layer.

    The layers with the highest preference are full. The smallest number of full layers is used for which no share of a
    remaining layer exceeds the prompt.
    """
    L, W = len(preferences), min(W, n)
    most, total = n - W, min((B - W) * L, (n - W) * L)
    exact = [x if isinstance(x, Box) else Fraction(x) for x in preferences]
    order = sorted(range(L), key=lambda layer: (-exact[layer], layer))
    for full in range(L + 1):
        rest, left = order[full:], total - full * most
        known = sum((exact[layer] for layer in rest), Fraction(0)) if len(rest) > 1 else Fraction(0)
        parts = {layer: left * exact[layer] / known if known else Fraction(left, len(rest)) for layer in rest}
        if all(part <= most for part in parts.values()):
            return [W + share for share in whole([parts.get(layer, Fraction(most)) for layer in range(L)], total)]
    raise AssertionError("the layers together hold the total")


def kept(inputs: Inputs, B: int, W: int, kernel: int, gamma: float, tau1: float, tau2: float) -> Kept:
    """Return the kept sets. The preferences of the layers divide the budget."""
    shares = preferred_shares([preference(plain(view), W, tau1, tau2) for view in inputs.layers], B, W, inputs.n)
    return [
        top(row, share) for view, share in zip(inputs.layers, shares, strict=True)
        for row in scores(plain(view), W, kernel, gamma)
    ]


BRUTES = [
    Brute(
        "PO-CAKE", "cake", kept,
        {"W": W, "kernel": KERNEL, "gamma": 200.0, "tau1": 1.0, "tau2": 1.0}, W, newest,
        published={"W": 32, "kernel": 5, "gamma": 200.0, "tau1": 1.0, "tau2": 1.0},
        parts=Parts("recent=W/layers=preference", scores, preference=preference)),
]
