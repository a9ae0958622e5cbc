"""S1 on the CPU: Numba against NumPy and eager PyTorch, and against the floor of its products and exponentials."""

import math
import os
import tracemalloc
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
import pytest

from accelerated.numba_cpu.coattention import coattention
from conformance.measure.benchmarks.data import first_layer, numpy_s1, torch_s1
from spec.parameters import PAPER

torch = pytest.importorskip("torch")

SHAPES = [
    (4096, 8, 8, 64, "mixed"), (4096, 8, 2, 64, "peaky"), (4096, 32, 8, 128, "mixed"), (8192, 32, 8, 128, "mixed"),
]
# Of a shape that takes Numba a tenth of a second, and of one that takes a second.
MANY, FEW = 25, 4


def numba_s1(q: Any, k: Any) -> Any:
    return coattention(q, k, np.arange(q.shape[1]), PAPER, q.shape[2] ** -0.5, None)


def torch_on_arrays(q: Any, k: Any) -> Any:
    return torch_s1(torch.from_numpy(q), torch.from_numpy(k))


def floor(q: Any, k: Any) -> None:
    """What any exact S1 must do once: the causal products, in tiles, and one exponential each."""
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
    """The engines in turn, the best of each: neighbours on the machine then slow all of them alike."""
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
    """What S1 allocates beside its inputs, at its peak."""
    q, k = first_layer(16384, 8, 2, 64, "peaky")
    numba_s1(q[:, :1100], k[:, :1100])
    tracemalloc.start()
    numba_s1(q, k)
    peak = tracemalloc.get_traced_memory()[1] / 2**20
    tracemalloc.stop()
    print(f"scratch at 16K: {peak:.0f} MiB")
    assert 1 < peak < 256
