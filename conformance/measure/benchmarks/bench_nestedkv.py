"""NestedKV's score: Numba against the NumPy reference, in turn in one process; at least 5 times as fast."""

import time
from typing import Any

import numpy as np
import pytest

from spec.backend import resolve
from spec.parameters import NESTEDKV

AT_LEAST = 5.0


def keys(n: int) -> Any:
    """Eight heads of 128 channels around directions of their own."""
    rng = np.random.default_rng(1)
    return rng.standard_normal((8, n, 128), np.float32) + rng.standard_normal((8, 1, 128), np.float32)


def seconds(name: str, k: Any) -> float:
    """Processor time of one run: both engines have one thread, and other processes do not count."""
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
    assert reference / fast >= AT_LEAST
