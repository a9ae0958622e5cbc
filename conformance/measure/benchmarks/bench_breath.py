"""Decode's bookkeeping on one core: a step and a breath at 32K tokens seen, 1 024 live trunks of mean degree 20.

`python -m pytest conformance/measure/benchmarks/bench_breath.py --benchmark-only`. What is asked for: 0.1 ms a step,
5 ms a breath.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from accelerated.numba_cpu.backend import BACKEND
from reference.crystalcache import decode_step, empty_state
from reference.crystalcache.breath import breath
from spec.budget import parse_budget
from spec.decode import DecodeState, LiveTrunks, TrunkWeights, check_state
from spec.parameters import PAPER

SEEN, M, DEGREE = 32_768, 1_024, 20
ENDS = frozenset({3})
KEY = np.random.default_rng(0).standard_normal((8, 1, 128)).astype(np.float32)


def weights(rng: np.random.Generator) -> TrunkWeights:
    W = np.triu(rng.random((M, M)) < DEGREE / M, 1) * rng.uniform(0.06, 1, (M, M))
    W += W.T
    row, column = np.nonzero(W)
    indptr = np.concatenate([[0], np.cumsum((W > 0).sum(axis=1))]).astype(np.int64)
    return TrunkWeights(indptr, column.astype(np.int64), W[row, column])


def state(tail: int) -> DecodeState:
    """Half of the tokens live, in trunks of 16 of 32; all are active, as key norms that hardly differ make them."""
    rng = np.random.default_rng(1)
    live = (np.arange(M)[:, None] * 32 + np.sort(rng.random((M, 32)).argsort(1)[:, :16], 1)).ravel()
    table = LiveTrunks(
        live, np.arange(0, 16 * M + 1, 16), rng.uniform(1, 15, 16 * M), rng.uniform(0.5, 1, 16 * M),
        rng.uniform(3, 15, M),
    )
    ids, counts = np.unique(rng.zipf(1.2, SEEN) % 50_000, return_counts=True)
    found = replace(
        empty_state(parse_budget("0.5")), seen=SEEN + tail, step=tail, live=table, D=rng.random(M), W=weights(rng),
        ids=ids, counts=counts, mu=20.0, sigma=5.0, tail_ids=tuple(rng.integers(0, 99, tail).tolist()),
        tail_inverse_norms=(1.0,) * tail,
    )
    check_state(found)
    return found


def step(before: DecodeState) -> Any:
    """What a forward of one token costs beside the model: its key's norm, and the step."""
    norm = BACKEND.require_breath().inverse_key_norms(KEY)[0]
    return decode_step(before, 5, float(norm), ENDS, PAPER, BACKEND)


@pytest.mark.parametrize("tail", [1, 62])
def test_a_step(benchmark: Any, tail: int) -> None:
    benchmark.group = "decode step, numba"
    benchmark.pedantic(step, (state(tail),), rounds=300, warmup_rounds=3)


def test_a_breath(benchmark: Any) -> None:
    benchmark.group = "breath, numba"
    benchmark.pedantic(breath, (state(64), ENDS, PAPER, BACKEND), rounds=50, warmup_rounds=2)
