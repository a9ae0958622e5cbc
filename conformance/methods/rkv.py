"""R-KV by brute force: importance minus redundancy."""

from collections.abc import Sequence

from conformance.methods.brute import KERNEL, Brute, Parts, W, newest, stepwise
from conformance.methods.policies import Layer, Row, Score, groups, logits_of, normalise, padded, pool, sink_of, window
from conformance.oracles.boxes import column_extremes, directions, dots, fsum, largest, stacked


def rkv(layer: Layer, W: int, kernel: int, lam: float) -> list[Score]:
    """Return importance minus redundancy of the keys before the last W."""
    n, past, result = len(layer["k"][0]), window(layer, W), []
    if past == 0:
        return [[None] * n for _ in layer["k"]]
    for g, group in enumerate(groups(layer)):
        keys, importance = layer["k"][g], [0.0] * past
        W_now = n - past
        for at in range(-W_now, 0):
            logits = column_extremes(largest, [logits_of(layer, layer["q"][h][at], keys[:past]) for h in group])
            A = normalise(logits, sink_of(layer, group))
            importance = [a + b / W_now for a, b in zip(importance, A, strict=True)]
        redundancy = rkv_redundancy(keys)
        pooled = pool(importance, kernel, "max")
        result.append(padded([lam * pooled[i] - (1 - lam) * redundancy[i] for i in range(past)], n))
    return result


def rkv_redundancy(keys: Sequence[Row]) -> Row:
    n = len(keys)
    unit = directions(keys, 1e-8)
    together = stacked(unit)
    C = [list(dots(key, together)) for key in unit]
    for i in range(n):
        C[i][i] = 0.0
        above = [j for j in range(n) if C[i][j] > 0.5]
        C[i][above[-1] if above else 0] = 0.0
    return normalise([fsum(column) / n for column in zip(*C, strict=True)])


EVERY = 128
"""A decode step decides if the number of tokens seen is a multiple of this."""
BRUTES = [
    Brute("PO-RKV", "rkv", stepwise(rkv, EVERY), {"W": W, "kernel": KERNEL, "lam": 0.1}, W, newest,
          published={"W": 8, "kernel": 7, "lam": 0.1, "every": EVERY}, longest=1_100, decoded=True,
          parts=Parts("recent=W/every=every", rkv)),
]
