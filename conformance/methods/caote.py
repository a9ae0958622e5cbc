"""CAOTE by brute force: the change of the output after the eviction of one token."""

import math
from collections.abc import Sequence

import numpy as np

from conformance.methods.brute import SLOW, Brute, Parts, stepwise
from conformance.methods.policies import DECODE, Layer, Row, Score, at_places, groups, last_rows
from conformance.oracles.box_rows import Row as BoxRow
from conformance.oracles.boxes import (
    column_sums,
    columns,
    dot,
    dots,
    fsum,
    leaves,
    minus,
    over,
    row,
    sqrt,
    squares,
    stacked,
    times,
)


def caote_error(alpha: Row, values: Sequence[Row]) -> list[float]:
    """Return the change of the output after one token is evicted and the others are renormalised.

    The output is computed again without each token.
    """
    errors = []
    by_channel = list(map(row, columns(values)))
    whole = row([dot(alpha, channel) for channel in by_channel])
    if isinstance(values[0], BoxRow):  # For many tokens, the evicted token is subtracted from the whole output.
        rests = [total - a for total in [fsum(alpha)] for a in alpha]
        without = [over(minus(whole, times(v, a)), rest) for v, a, rest in zip(values, alpha, rests, strict=True)]
        return [sqrt(fsum(squares(minus(whole, other)))) for other in without]
    for j in range(len(alpha)):
        others = [i for i in range(len(alpha)) if i != j]
        weights, channels = at_places(alpha, others), [at_places(channel, others) for channel in by_channel]
        rest = fsum(weights)
        if rest == 0:
            errors.append(math.inf)
            continue
        without = row(list(dots(over(weights, rest), stacked(channels))))
        errors.append(sqrt(fsum(squares(minus(whole, without)))))
    return errors


def caote(layer: Layer) -> list[Score]:
    rows, n, result = last_rows(layer, 1), len(layer["k"][0]), list[Score]()
    for values, group in zip(layer["v"], groups(layer), strict=True):
        alpha = row(list(over(column_sums([rows[h][0] for h in group]), len(group))))
        # The sinks act as one more token, with the value zero.
        beside = [1.0 - fsum(alpha)] if layer.get("sinks") else []
        nothing = [row(leaves(np.zeros(len(values[0])))) for _ in beside]
        errors = caote_error(row([*alpha, *beside]), [*values, *nothing])
        result.append(list(errors[:n]))
    return result


BRUTES = [
    Brute("PO-CAOTE", "caote", stepwise(caote), readings={"decode": DECODE}, parts=Parts("every=1", caote),
          longest=SLOW),
]
