"""Compactor and its two scores by brute force: lists, and an orthogonal factor for the leverage."""

import cmath
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from conformance.methods.brute import C_CHUNK, SINK, SLOW, Brute, Parts, W, both_ends, by_layer, plain
from conformance.methods.policies import Layer, Score, groups, over_group, pool, rows_on, top
from conformance.oracles.box import Box, State
from conformance.oracles.boxes import around, column_sums, dot, sqrt
from conformance.strategies.policy_inputs import Inputs, Kept

Vectors = Sequence[Sequence[float]]
RIDGE = 0.01
BOUND = 2.0**18
"""Bound of PO-LEVERAGE, PO-COMPACTOR and PO-CAPKV: 2^20 units roundoff of the largest score, in units of `boxes`."""


def attention(layer: Layer, c: int) -> list[list[float]]:
    """Return the attention that each key receives inside its chunk, for each query head."""
    result = []
    for heads, keys in zip(groups(layer), layer["k"], strict=True):
        for h in heads:
            total: list[float] = []
            for a in range(0, len(keys), c):
                queries, near = layer["q"][h][a : a + c], keys[a : a + c]
                total += list(column_sums(rows_on({**layer, "q": [queries] * (h + 1)}, h, queries, near,
                                                  [len(near)] * len(near))))
            result.append(total)
    return result


def noncausal(layer: Layer, c: int) -> list[Score]:
    rows, result = attention(layer, c), list[Score]()
    for heads, values in zip(groups(layer), layer["v"], strict=True):
        mean = list(over_group([rows[h] for h in heads]))
        result.append(pool([x * sqrt(dot(v, v)) for x, v in zip(mean, values, strict=True)], 3, "average"))
    return result


def leverage_of(rows: Any, ridge: float) -> list[float]:
    """Return x (X^T X + ridge I)^-1 x for each row x of X: the squared lengths of the rows of an orthogonal factor."""
    below = np.sqrt(ridge) * np.eye(rows.shape[1])
    Q = np.linalg.qr(np.concatenate([rows, below]))[0][: len(rows)]
    return [math.fsum(x * x for x in row) for row in Q.tolist()]


def before_rope(keys: Vectors, places: Sequence[int], inputs: Inputs) -> list[list[float]]:
    """Return vectors at positions of the text without rotation, as complex bands."""
    half, result = len(keys[0]) // 2, []
    for at, k in zip(places, keys, strict=True):
        z = [complex(k[f], k[f + half]) * cmath.exp(-1j * omega * at) / inputs.factor
             for f, omega in enumerate(inputs.inv_freq.tolist())]
        result.append([x.real for x in z] + [x.imag for x in z])
    return result


def leverages(x: Vectors) -> list[float]:
    mean = [math.fsum(column) / len(x) for column in zip(*x, strict=True)]
    return leverage_of(np.array([[a - b for a, b in zip(v, mean, strict=True)] for v in x]), RIDGE)


def leverage_rows(inputs: Inputs, B: int) -> list[Score]:
    rows = [leverages(before_rope(head, inputs.places, inputs))
            for view in inputs.layers for head in view.k.tolist()]
    return [around(row, BOUND) if State.unit else list(row) for row in rows]


def leverage(inputs: Inputs, B: int) -> Kept:
    return [top(row, B) for row in leverage_rows(inputs, B)]


def middle(x: Any) -> float:
    return (x.lo + x.hi) / 2 if isinstance(x, Box) else float(x)


def z_scores(rows: Vectors) -> list[list[float]]:
    flat = [x for row in rows for x in row]
    mean = math.fsum(flat) / len(flat)
    spread = max(math.sqrt(math.fsum((x - mean) ** 2 for x in flat) / len(flat)), 1e-6)
    return [[(x - mean) / spread for x in row] for row in rows]


def compactor_rows(inputs: Inputs, B: int, c: int, N_sink: int, N_recent: int) -> list[Score]:
    n, result = inputs.n, list[Score]()
    end = max(N_sink, n - N_recent)
    weight = max(0.0, 1 - B / n)
    for view in inputs.layers:
        layer = plain(view)
        layer |= {name: [head[N_sink:end] for head in layer[name]] for name in ("q", "k", "v")}
        keys = [head[N_sink:end] for head in view.k.tolist()]
        if not keys[0]:
            result += [[None] * n for _ in keys]
            continue
        far = z_scores([leverages(before_rope(k, inputs.places[N_sink:end], inputs)) for k in keys])
        near = z_scores([[middle(x) for x in row] for row in noncausal(layer, c)])
        for a, b in zip(far, near, strict=True):
            row = [weight * x + y for x, y in zip(a, b, strict=True)]
            inner = around(row, BOUND) if State.unit else row
            result.append([*[None] * min(N_sink, n), *inner, *[None] * (n - end)])
    return result


def compactor(inputs: Inputs, B: int, c: int, N_sink: int, N_recent: int) -> Kept:
    return [top(row, B) for row in compactor_rows(inputs, B, c, N_sink, N_recent)]


BRUTES = [
    # The keys of two tokens are opposite to each other around their mean, so rounding would decide between them.
    Brute("PO-LEVERAGE", "leverage", leverage, published={"factor": 1.0}, least=3,
          parts=Parts("", rows=leverage_rows)),
    Brute("PO-NONCAUSAL", "noncausal", by_layer(noncausal), {"c": C_CHUNK}, published={"c": 256},
          parts=Parts("", noncausal), longest=SLOW),
    Brute("PO-COMPACTOR", "compactor", compactor, {"c": C_CHUNK, "N_sink": SINK, "N_recent": W}, SINK + W, both_ends,
          published={"factor": 1.0, "c": 256, "N_sink": 8, "N_recent": 4},
          parts=Parts("sink=N_sink/recent=N_recent", rows=compactor_rows)),
]
