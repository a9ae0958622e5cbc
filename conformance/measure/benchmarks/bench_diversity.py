"""Set-conditioned selection: lazy greedy against the float64 literal of Algorithm 1, on clustered signatures.

The literal has what a library gives it: one matrix product for all cosines, vectors for the gains. It adds in the
library's order, so that its sets could differ where gains tie to the last bit; random scores do not.
"""

import math
import os
import tracemalloc
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
import pytest

from accelerated.numba_cpu.diversity import diverse
from reference.diversity import unit_rows

N, K, LAMBDA, ROUNDS, AT_LEAST = 4096, 512, 0.5, 5, 15
# Head dimension, clusters, spread inside a cluster, what the scores are like.
INPUTS = [
    (64, 64, 0.3, "random"), (128, 16, 0.3, "random"), (128, 64, 0.3, "random"), (128, 256, 0.3, "random"),
    (128, 64, 0.05, "random"), (128, 64, 0.3, "of clusters"),
]


def clustered(d: int, clusters: int, spread: float, kind: str) -> tuple[Any, Any]:
    """Scores and signatures; scores are independent, or a cluster's own and a little of each token's."""
    rng = np.random.default_rng(1)
    centres, member = rng.standard_normal((clusters, d)), rng.integers(0, clusters, N)
    V = unit_rows(centres[member] + spread * rng.standard_normal((N, d)))
    s = rng.standard_normal(N)
    return (s if kind == "random" else rng.standard_normal(clusters)[member] + 0.1 * s), V


def literal(s: Any, V: Any) -> Any:
    sims, S, m = V @ V.T, np.zeros(N, dtype=np.bool_), np.zeros(N)
    for _ in range(K):
        a = s - LAMBDA * m
        a[S] = -np.inf
        i = np.argmax(a)
        S[i] = True
        np.maximum(m, sims[i], out=m)
    return np.flatnonzero(S)


def lazy(s: Any, V: Any) -> Any:
    return diverse(s, V, np.zeros(N, dtype=np.bool_), K, LAMBDA)


@pytest.mark.parametrize("given", INPUTS, ids=lambda given: "d{}-{}x{}-{}".format(*given))
def test_ratio(given: tuple[int, int, float, str]) -> None:
    """In turn, the best of each: neighbours on the machine then slow both alike."""
    s, V = clustered(*given)
    best: dict[Callable[..., Any], float] = dict.fromkeys((literal, lazy), math.inf)
    assert lazy(s, V).tolist() == literal(s, V).tolist()
    for _ in range(ROUNDS):
        for run in best:
            start = perf_counter()
            run(s, V)
            best[run] = min(best[run], perf_counter() - start)
    ratio = best[literal] / best[lazy]
    print("d={} clusters={} spread={} scores {}:".format(*given), f"literal {best[literal] * 1e3:.0f} ms,",
          f"lazy {best[lazy] * 1e3:.1f} ms, {ratio:.0f}x, load {os.getloadavg()[0]:.1f}")
    assert ratio >= AT_LEAST


def test_no_square_array_is_made() -> None:
    """What it allocates beside its inputs stays below a thirtieth of the cosines' n x n."""
    s, V = clustered(*INPUTS[2])
    lazy(s, V)
    tracemalloc.start()
    lazy(s, V)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    print(f"scratch: {peak / 2**20:.1f} MiB, the square is {8 * N * N / 2**20:.0f} MiB")
    assert 0 < peak < 8 * N * N / 30
