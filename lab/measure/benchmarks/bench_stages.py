"""Benchmarks of the stages: S1 against NumPy, eager PyTorch and the floor of its products.

Further benchmarks are of S2 to S6, decode, selection, and NestedKV's score. All except S1 run on one core.
"""

import math
import os
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np
import pytest

from accelerated.numba_cpu.backend import BACKEND
from accelerated.numba_cpu.coattention import coattention
from accelerated.numba_cpu.diversity import diverse
from lab.measure.benchmarks.data import edges_like, first_layer, numpy_s1, torch_s1
from reference.crystalcache import decode_step, empty_state
from reference.crystalcache.breath import breath
from reference.diversity import unit_rows
from spec.backend import resolve
from spec.budget import parse_budget
from spec.decode import DecodeState, LiveTrunks, TrunkWeights, check_state
from spec.parameters import NESTEDKV, PAPER
from spec.records import CoAttention

SHAPES = [
    (4096, 8, 8, 64, "mixed"), (4096, 8, 2, 64, "peaky"), (4096, 32, 8, 128, "mixed"), (8192, 32, 8, 128, "mixed"),
]
# Rounds for a shape that takes Numba a tenth of a second, and for one that takes a second.
MANY, FEW = 25, 4


def numba_s1(q: Any, k: Any) -> Any:
    return coattention(q, k, np.arange(q.shape[1]), PAPER, q.shape[2] ** -0.5, None)


def torch_on_arrays(q: Any, k: Any) -> Any:
    import torch

    return torch_s1(torch.from_numpy(q), torch.from_numpy(k))


def floor(q: Any, k: Any) -> None:
    """Run the minimum work of any exact S1: the causal products in tiles, and one exponential for each."""
    H, n, d = q.shape
    out, tile = np.empty((512, 256), np.float32), np.full((512, 256), -1.0, np.float32)
    a, b = np.ones((512, d), np.float32), np.ones((256, d), np.float32)
    for _ in range(H * n * n // 2 // out.size):
        np.matmul(a, b.T, out=out)
        np.exp(tile, out=out)


ENGINES: dict[str, Callable[[Any, Any], Any]] = {"numba": numba_s1, "numpy": numpy_s1, "torch": torch_on_arrays}


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "n{}-H{}_{}-d{}-{}".format(*shape))
@pytest.mark.parametrize("engine", ENGINES)
def test_s1(benchmark: Any, engine: str, shape: tuple[int, int, int, int, str]) -> None:
    q, k = first_layer(*shape)
    run = ENGINES[engine]
    run(q[:, :1100], k[:, :1100])  # compiles
    benchmark.group = "S1 n={} H={}/{} d={} {}".format(*shape)
    rounds = 3 if shape[0] * shape[1] <= 4096 * 8 else 2
    benchmark.pedantic(run, (q, k), rounds=rounds)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "n{}-H{}_{}-d{}-{}".format(*shape))
def test_ratios(shape: tuple[int, int, int, int, str]) -> None:
    """Numba is faster than the other engines.

    The engines run in turn, and the best time of each counts, so that other programs slow down all of them.
    """
    q, k = first_layer(*shape)
    best = dict.fromkeys(ENGINES, math.inf)
    for _ in range(MANY if shape[0] * shape[1] <= 4096 * 8 else FEW):
        for engine, run in ENGINES.items():
            start = perf_counter()
            run(q, k)
            best[engine] = min(best[engine], perf_counter() - start)
    ratios = {engine: best[engine] / best["numba"] for engine in ("numpy", "torch")}
    print("S1 n={} H={}/{} d={} {}:".format(*shape), {engine: f"{x:.2f}x" for engine, x in ratios.items()},
          {engine: f"{1e3 * x:.0f} ms" for engine, x in best.items()}, f"load {os.getloadavg()[0]:.1f}")
    assert min(ratios.values()) > 1


@pytest.mark.parametrize("shape", SHAPES[2:3], ids=["n4096-H32_8-d128"])
def test_share_of_the_floor(benchmark: Any, shape: tuple[int, int, int, int, str]) -> None:
    q, k = first_layer(*shape)
    benchmark.group = "floor n={} H={}/{} d={}".format(*shape[:4])
    benchmark.pedantic(floor, (q, k), rounds=2)


def test_scratch_memory_at_16K() -> None:
    """S1 allocates less than 256 MiB besides its inputs."""
    q, k = first_layer(16384, 8, 2, 64, "peaky")
    numba_s1(q[:, :1100], k[:, :1100])
    tracemalloc.start()
    numba_s1(q, k)
    peak = tracemalloc.get_traced_memory()[1] / 2**20
    tracemalloc.stop()
    print(f"scratch at 16K: {peak:.0f} MiB")
    assert 1 < peak < 256


# Filled shares of the 8 intra and 4 cross places that give about 4 and 11 edges for each token.
DENSITIES = {4: (0.46, 0.1), 11: (0.95, 0.9)}


def inputs(n: int, edges: int) -> tuple[CoAttention, Any, Any]:
    rng = np.random.default_rng(1)
    intra, cross = (edges_like(n, share, k, rng, 40) for share, k in zip(DENSITIES[edges], (8, 4), strict=True))
    S = rng.uniform(0.1, 20, n)
    created = CoAttention(0, S, intra[0], intra[1].astype(np.float64), cross[0], cross[1].astype(np.float64))
    return created, rng.zipf(1.2, n) % 50_000, rng.random(n) < 1 / 18


def stages(coattention: CoAttention, ids: Any, ends: Any) -> Any:
    crystal, n = BACKEND.require_crystal(), len(ids)
    M = crystal.impact(coattention.salience, ids, PAPER)
    trunks = crystal.trunks(coattention, M, ends, PAPER)
    graph = crystal.graph(coattention, trunks, PAPER)
    protected = np.zeros(len(trunks.sizes), dtype=np.bool_)
    score = crystal.score(graph.D, trunks.impact, protected, PAPER)
    return crystal.dissolve(score, trunks, M, graph.D, protected, n // 2, PAPER)


@pytest.mark.parametrize("edges", DENSITIES)
@pytest.mark.parametrize("n", [32_768, 1_048_576])
def test_s2_to_s6(benchmark: Any, n: int, edges: int) -> None:
    arguments = inputs(n, edges)
    stages(*arguments)
    benchmark.group = f"S2-S6 n={n}, {edges} edges a token"
    benchmark.pedantic(stages, arguments, rounds=5)


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
    """Return a state in which half of the tokens are live, in trunks of 16 of 32 tokens.

    All trunks are active, because the key norms are almost equal.
    """
    rng = np.random.default_rng(1)
    live = (np.arange(M)[:, None] * 32 + np.sort(rng.random((M, 32)).argsort(1)[:, :16], 1)).ravel()
    table = LiveTrunks(
        live, np.arange(0, 16 * M + 1, 16), rng.uniform(1, 15, 16 * M), rng.uniform(0.5, 1, 16 * M),
        rng.uniform(3, 15, M),
    )
    ids, counts = np.unique(rng.zipf(1.2, SEEN) % 50_000, return_counts=True)
    result = replace(
        empty_state(parse_budget("0.5")), seen=SEEN + tail, step=tail, live=table, D=rng.random(M), W=weights(rng),
        ids=ids, counts=counts, mu=20.0, sigma=5.0, tail_ids=tuple(rng.integers(0, 99, tail).tolist()),
        tail_inverse_norms=(1.0,) * tail,
    )
    check_state(result)
    return result


def step(before: DecodeState) -> Any:
    """Run the work that one token adds to the forward pass: the norm of its key, and the decode step."""
    norm = BACKEND.require_breath().inverse_key_norms(KEY)[0]
    return decode_step(before, 5, float(norm), ENDS, PAPER, BACKEND)


@pytest.mark.parametrize("tail", [1, 62])
def test_a_step(benchmark: Any, tail: int) -> None:
    benchmark.group = "decode step, numba"
    benchmark.pedantic(step, (state(tail),), rounds=300, warmup_rounds=3)


def test_a_breath(benchmark: Any) -> None:
    benchmark.group = "breath, numba"
    benchmark.pedantic(breath, (state(64), ENDS, PAPER, BACKEND), rounds=50, warmup_rounds=2)


N, K, LAMBDA, ROUNDS, AT_LEAST = 4096, 512, 0.5, 5, 15
# Head dimension, clusters, spread inside a cluster, kind of scores.
INPUTS = [
    (64, 64, 0.3, "random"), (128, 16, 0.3, "random"), (128, 64, 0.3, "random"), (128, 256, 0.3, "random"),
    (128, 64, 0.05, "random"), (128, 64, 0.3, "of clusters"),
]


def clustered(d: int, clusters: int, spread: float, kind: str) -> tuple[Any, Any]:
    """Return scores and signatures. The scores are random, or a value of the cluster plus a small random part."""
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
    """The lazy algorithm is at least `AT_LEAST` times as fast as the literal one.

    Both run in turn, and the best time of each counts, so that other programs slow down both.
    """
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
    """The allocated memory besides the inputs is less than a thirtieth of the n x n cosines."""
    s, V = clustered(*INPUTS[2])
    lazy(s, V)
    tracemalloc.start()
    lazy(s, V)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    print(f"scratch: {peak / 2**20:.1f} MiB, the square is {8 * N * N / 2**20:.0f} MiB")
    assert 0 < peak < 8 * N * N / 30


NESTEDKV_AT_LEAST = 5.0


def keys(n: int) -> Any:
    """Return keys of eight heads with 128 channels, each head around a different direction."""
    rng = np.random.default_rng(1)
    return rng.standard_normal((8, n, 128), np.float32) + rng.standard_normal((8, 1, 128), np.float32)


def seconds(name: str, k: Any) -> float:
    """Return the processor time of one run. Both engines have one thread, and other processes do not count."""
    score = resolve(name).require_nestedkv().anomaly_score
    start = time.process_time()
    score(k, NESTEDKV)
    return time.process_time() - start


@pytest.mark.parametrize("n", [16_384, 32_768])
def test_anomaly_score(benchmark: Any, n: int) -> None:
    k = keys(n)
    seconds("numba", k[:, :100])
    reference = min(seconds("numpy", k) for _ in range(3))
    fast = min(seconds("numba", k) for _ in range(9))
    benchmark.group = f"NestedKV n={n}, H_kv=8, d=128"
    benchmark.extra_info["ratio"] = round(reference / fast, 1)
    print(f"\nn={n}: numpy {reference * 1e3:.0f} ms, numba {fast * 1e3:.0f} ms, ratio {reference / fast:.1f}")
    benchmark.pedantic(seconds, ("numba", k), rounds=5)
    assert reference / fast >= NESTEDKV_AT_LEAST
