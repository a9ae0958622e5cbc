"""DefensiveKV by brute force: the largest weights in the window, after a first stage by their mean."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from conformance.methods.brute import KERNEL, Brute, Parts, W, newest, plain
from conformance.methods.policies import (
    Layer,
    Row,
    Score,
    best,
    competition_shares,
    groups,
    last_rows,
    padded,
    pool,
    top,
    window,
)
from conformance.oracles.boxes import column_extremes, column_sums, columns, fsum, largest, leaves, projected, times
from conformance.oracles.choices import ordered, surely
from conformance.strategies.policy_inputs import Inputs, Kept


def defensive(layer: Layer, W_o: Sequence[Sequence[Row]], W: int, kernel: int, B: int) -> list[Score]:
    """Return the scores: worst case, prior and output share.

    Tokens of the first stage have the layer's largest score.
    """
    n, past, rows = len(layer["k"][0]), window(layer, W), last_rows(layer, W)
    if past == 0:
        return [[None] * n for _ in layer["k"]]
    tail = [fsum(q[max(0, past - W) : past]) for head in rows for q in head]
    bound = 0.9 - fsum(tail) / len(tail)
    scores, firsts, sizes = [], [], []
    for g, group in enumerate(groups(layer)):
        worst: Any = [0.0] * past
        for row in (q[:past] for h in group for q in rows[h]):
            pooled = pool(row, kernel, "average")
            share = fsum(row) / fsum(pooled)
            worst = column_extremes(largest, [worst, times(pooled, share)])
        floor = fsum(worst) / past
        scores.append([largest([x, floor]) for x in worst])
        mean = list(column_sums([q[:past] for h in group for q in rows[h]]))
        whole, covered, chosen = fsum(mean), 0.0, 0
        for x in ordered(mean):
            covered += x / whole
            if covered >= bound:
                break
            chosen += 1
        firsts.append(surely(best(range(past), mean, max(0, min(chosen, B - W)))))
        outputs = [projected(layer["v"][g][:past], columns(W_o[h])) for h in group]
        sizes.append([fsum(fsum(map(abs, output[i])) for output in outputs) / len(group) for i in range(past)])
    for g, row in enumerate(scores):
        scores[g] = [x * (sizes[g][i] / fsum(size[i] for size in sizes)) for i, x in enumerate(row)]
    most = largest(x for row in scores for x in row)
    for row, first in zip(scores, firsts, strict=True):
        for i in first:
            row[i] = most
    return [padded(row, n) for row in scores]


def scores(inputs: Inputs, B: int, W: int, kernel: int) -> list[Score]:
    return [
        row for view, W_o in zip(inputs.layers, inputs.W_o, strict=True)
        for row in defensive(plain(view), leaves(W_o), W, kernel, B)
    ]


def kept(inputs: Inputs, B: int, W: int, kernel: int) -> Kept:
    result = Kept()
    for view, W_o in zip(inputs.layers, inputs.W_o, strict=True):
        rows = defensive(plain(view), leaves(W_o), W, kernel, B)
        result += [top(row, b) for row, b in zip(rows, competition_shares(rows, B, Fraction(0)), strict=True)]
    return result


BRUTES = [
    Brute("PO-DEFENSIVEKV", "defensivekv", kept, {"W": W, "kernel": KERNEL}, W, newest,
          published={"W": 32, "kernel": 5}, parts=Parts("recent=W/heads=quota:safeguard=0", rows=scores)),
]
