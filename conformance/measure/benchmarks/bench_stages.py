"""S2 to S6 on one core, at 32K and a million tokens."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from accelerated.numba_cpu.backend import BACKEND
from conformance.measure.benchmarks.data import edges_like
from spec.backend import Backend
from spec.parameters import PAPER
from spec.records import CoAttention

# Filled shares of the 8 intra and 4 cross places that give some 4 and 11 edges a token.
DENSITIES = {4: (0.46, 0.1), 11: (0.95, 0.9)}


def inputs(n: int, edges: int) -> tuple[CoAttention, Any, Any]:
    rng = np.random.default_rng(1)
    intra, cross = (edges_like(n, share, k, rng, 40) for share, k in zip(DENSITIES[edges], (8, 4), strict=True))
    S = rng.uniform(0.1, 20, n)
    made = CoAttention(0, S, intra[0], intra[1].astype(np.float64), cross[0], cross[1].astype(np.float64))
    return made, rng.zipf(1.2, n) % 50_000, rng.random(n) < 1 / 18


def stages(made: CoAttention, ids: Any, ends: Any, backend: Backend) -> Any:
    crystal, n = backend.require_crystal(), len(ids)
    M = crystal.impact(made.salience, ids, PAPER)
    trunks = crystal.trunks(made, M, ends, PAPER)
    graph = crystal.graph(made, trunks, PAPER)
    protected = np.zeros(len(trunks.sizes), dtype=np.bool_)
    score = crystal.score(graph.D, trunks.impact, protected, PAPER)
    return crystal.dissolve(score, trunks, M, graph.D, protected, n // 2, PAPER)


@pytest.mark.parametrize("edges", DENSITIES)
@pytest.mark.parametrize("n", [32_768, 1_048_576])
def test_s2_to_s6(benchmark: Any, n: int, edges: int) -> None:
    arguments = (*inputs(n, edges), BACKEND)
    run: Callable[..., Any] = stages
    run(*arguments)
    benchmark.group = f"S2-S6 n={n}, {edges} edges a token"
    benchmark.pedantic(run, arguments, rounds=5)
