"""CAOTE by brute force: how the output changes when one token goes."""

import math
from collections.abc import Sequence

from conformance.methods.brute import Brute, stepwise
from conformance.methods.policies import DECODE, Layer, Row, Score, groups, last_rows
from conformance.oracles.boxes import fsum, sqrt


def caote_error(alpha: Row, values: Sequence[Row]) -> list[float]:
    """The change of the output when one token goes and the others are renormalised, done literally."""
    errors = []
    whole = [fsum(a * v[c] for a, v in zip(alpha, values, strict=True)) for c in range(len(values[0]))]
    for j in range(len(alpha)):
        others = [i for i in range(len(alpha)) if i != j]
        rest = fsum(alpha[i] for i in others)
        if rest == 0:
            errors.append(math.inf)
            continue
        without = [fsum(alpha[i] / rest * values[i][c] for i in others) for c in range(len(whole))]
        errors.append(sqrt(fsum((a - b) ** 2 for a, b in zip(whole, without, strict=True))))
    return errors


def caote(layer: Layer) -> list[Score]:
    rows, n, found = last_rows(layer, 1), len(layer["k"][0]), list[Score]()
    for values, group in zip(layer["v"], groups(layer), strict=True):
        alpha = [fsum(rows[h][0][i] for h in group) / len(group) for i in range(n)]
        # The sinks stand for one more token, whose value is zero.
        beside = [1.0 - fsum(alpha)] if layer.get("sinks") else []
        errors = caote_error([*alpha, *beside], [*values, *([0.0] * len(values[0]) for _ in beside)])
        found.append(list(errors[:n]))
    return found


BRUTES = [
    Brute("PO-CAOTE", "caote", stepwise(caote), readings={"decode": DECODE}),
]
