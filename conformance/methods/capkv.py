"""CapKV by brute force: lists, and an orthogonal factor for the leverage of values."""

import cmath
import math
from collections.abc import Sequence

import numpy as np

from conformance.methods.brute import FUTURE, SINK, SLOW, Brute, Parts, sinks
from conformance.methods.compactor import BOUND, Vectors, before_rope, leverage_of
from conformance.methods.policies import Score, top
from conformance.oracles.box import State
from conformance.oracles.boxes import around
from conformance.strategies.policy_inputs import Inputs, Kept

EPSILON, TAU = 1e-6, 5.0


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    length = math.hypot(*a) * math.hypot(*b)
    return max(-1.0, min(1.0, math.fsum(x * y for x, y in zip(a, b, strict=True)) / length)) if length else 0.0


def ahead(mean: Sequence[float], n: int, N_future: int, inv_freq: Sequence[float], factor: float) -> list[float]:
    """Return the mean query under the mean rotation of the next N_future positions."""
    half, turned = len(mean) // 2, []
    for f, omega in enumerate(inv_freq):
        angle = sum(cmath.exp(1j * omega * at) for at in range(n, n + N_future)) / N_future
        turned.append(complex(mean[f], mean[f + half]) * angle * factor)
    return [z.real for z in turned] + [z.imag for z in turned]


def of_head(query: Sequence[float], keys: Vectors, values: Vectors, tau: float) -> list[float]:
    """Return the weighted leverage of the values, for one query head."""
    near = [cosine(query, k) for k in keys]
    w = [math.exp(tau * (x - max(near))) for x in near]
    rows = np.array(values) * np.sqrt([[x + EPSILON] for x in w])
    return [x / (x + EPSILON) * size for x, size in zip(w, leverage_of(rows, 1.0), strict=True)]


def rows(inputs: Inputs, B: int, tau: float, N_sink: int, N_future: int) -> list[Score]:
    n, inv_freq, result = inputs.n, inputs.inv_freq.tolist(), list[Score]()
    asked = [i for i, place in enumerate(inputs.places) if place >= N_sink]
    for view in inputs.layers:
        q, k, v = view.q.tolist(), view.k.tolist(), view.v.tolist()  # type: ignore[union-attr]
        G = len(q) // len(k)
        for g in range(len(k)):
            if n <= N_sink:
                result.append([None] * n)
                continue
            each = []
            for head in q[g * G : (g + 1) * G]:
                back = before_rope([head[i] for i in asked], [inputs.places[i] for i in asked], inputs)
                mean = [math.fsum(x[c] for x in back) / len(back) for c in range(len(back[0]))]
                query = ahead(mean, inputs.places[-1] + 1, N_future, inv_freq, inputs.factor)
                each.append(of_head(query, k[g][N_sink:], v[g][N_sink:], tau))
            row = [math.fsum(column) / G for column in zip(*each, strict=True)]
            result.append([*[None] * N_sink, *(around(row, BOUND) if State.unit else row)])
    return result


def kept(inputs: Inputs, B: int, tau: float, N_sink: int, N_future: int) -> Kept:
    return [top(row, B) for row in rows(inputs, B, tau, N_sink, N_future)]


BRUTES = [
    Brute("PO-CAPKV", "capkv", kept, {"tau": TAU, "N_sink": SINK, "N_future": FUTURE}, SINK, sinks,
          published={"factor": 1.0, "tau": 5.0, "N_sink": 4, "N_future": 512}, parts=Parts("sink=N_sink", rows=rows),
          longest=SLOW),
]
