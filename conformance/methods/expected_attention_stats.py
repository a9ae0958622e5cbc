"""Expected Attention with given statistics of the queries, by brute force: one key and one product at a time."""

import math
from collections.abc import Callable, Sequence
from operator import mul
from typing import Any

import numpy as np

from conformance.methods.brute import FUTURE, SINK, SLOW, Brute, Parts, sinks
from conformance.methods.policies import Score, top
from conformance.oracles.box import State
from conformance.oracles.boxes import around
from conformance.strategies.policy_inputs import Inputs, Kept

Vector = Sequence[float]
Matrix = Sequence[Sequence[float]]
Spread = Callable[[Matrix], Vector]
"""Function that returns the product u C u for each vector u."""
BOUND = 2.0**13
"""Bound of PO-EXPECTED-ATTENTION-STATS: 2^15 units roundoff of the row's largest score, in units of `boxes`."""


def statistics(queries: Matrix) -> tuple[Vector, Spread]:
    """Return the mean of queries, and the function of the products u C u with their covariance C.

    Each product is the mean square of the centred queries along u, so that wide heads need no product for each entry
    of C.
    """
    mean = [math.fsum(column) / len(queries) for column in zip(*queries, strict=True)]
    centred = np.array(queries) - mean

    def squares(vectors: Matrix) -> Vector:
        along = np.array(vectors).reshape(-1, len(mean)) @ centred.T
        return [math.fsum(row) / len(queries) for row in (along**2).tolist()]

    return mean, squares


def products_with(covariance: Matrix) -> Spread:
    """Return the function of the products u C u, one product at a time."""
    return lambda vectors: [
        math.fsum(a * math.fsum(map(mul, row, u)) for a, row in zip(u, covariance, strict=True)) for u in vectors
    ]


def mean_waves(seen: int, N_future: int, inv_freq: Vector, factor: float) -> list[tuple[float, float]]:
    """Return the mean cosine and the mean sine of each frequency over the next N_future positions."""
    result = []
    for omega in inv_freq:
        angles = [omega * at for at in range(seen, seen + N_future)]
        c, s = (factor * math.fsum(map(of, angles)) / N_future for of in (math.cos, math.sin))
        result.append((c, s))
    return result


def turned_back(key: Vector, waves: Sequence[tuple[float, float]]) -> Vector:
    """Return the mean of the key after the opposite rotation of each future position."""
    half, first, second = len(key) // 2, list[float](), list[float]()
    for f, (c, s) in enumerate(waves):
        a, b = key[f], key[f + half]
        first.append(a * c + b * s)
        second.append(b * c - a * s)
    return [*first, *second]


def gaussian(
    k: Sequence[Matrix], v: Sequence[Matrix], mean: Matrix, spreads: Sequence[Spread], seen: int,
    inv_freq: Vector, factor: float, scaling: float, N_sink: int, N_future: int, sinks: Any = None,
) -> list[Score]:
    """Return E exp(z) of Gaussian queries, as a score of each key of each KV head of a layer."""
    result, G, waves = list[Score](), len(mean) // len(k), mean_waves(seen, N_future, inv_freq, factor)
    for g, (keys, values) in enumerate(zip(k, v, strict=True)):
        back = [turned_back(key, waves) for key in keys[N_sink:]]
        total = [0.0] * len(back)
        for h in range(g * G, (g + 1) * G):
            z = [
                scaling * math.fsum(map(mul, mean[h], u)) + scaling**2 / 2 * spread
                for u, spread in zip(back, spreads[h](back), strict=True)
            ]
            beside = [] if sinks is None else [float(sinks[h])]
            most = max([*z, *beside], default=0.0)
            size = math.fsum(math.exp(x - most) for x in [*z, *beside])
            total = [t + math.exp(x - most) / size / G for t, x in zip(total, z, strict=True)]
        norms = [math.hypot(*value) for value in values[N_sink:]]
        result.append([*[None] * min(N_sink, len(keys)), *(a * b for a, b in zip(total, norms, strict=True))])
    return result


def rows(inputs: Inputs, B: int, N_sink: int, N_future: int) -> list[Score]:
    result, calibrated = list[Score](), (inputs.whole or inputs).layers
    for view, whole in zip(inputs.layers, calibrated, strict=True):
        each = [statistics(head) for head in whole.q.tolist()]
        v: Any = view.v
        result += gaussian(
            view.k.tolist(), v.tolist(), [mean for mean, _ in each], [spread for _, spread in each],
            inputs.places[-1] + 1, inputs.inv_freq.tolist(), inputs.factor, view.scaling, N_sink, N_future, view.sinks,
        )
    return [around(row, BOUND) if State.unit else row for row in result]


def kept(inputs: Inputs, B: int, N_sink: int, N_future: int) -> Kept:
    return [top(row, B) for row in rows(inputs, B, N_sink, N_future)]


BRUTES = [
    Brute("PO-EXPECTED-ATTENTION-STATS", "expected-attention-stats", kept, {"N_sink": SINK, "N_future": FUTURE}, SINK,
          sinks, published={"N_sink": 4, "N_future": 512}, longest=SLOW,
          parts=Parts("sink=N_sink", rows=rows)),
]
