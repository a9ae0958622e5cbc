"""The Numba backend by itself: S1 in blocks and threads, NestedKV's windows, machine code on disk."""

import pytest

pytest.importorskip("numba", reason="pip install 'kvspec[numba]'")

import os
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numba.core.caching import IndexDataCacheFile

from accelerated.numba_cpu import coattention as s1
from accelerated.numba_cpu import kernels, rkv
from accelerated.numba_cpu.backend import BACKEND
from accelerated.numba_cpu.compiled import Files, digest_of
from accelerated.numba_cpu.diversity import diverse
from accelerated.numba_cpu.nestedkv import anomalies, measured
from conformance.checks import stage_checks
from conformance.oracles import s1 as oracle
from conformance.paths import ROOT
from conformance.plugin import fewer_examples
from conformance.strategies.policy_inputs import decided, drawn, with_sinks
from conformance.strategies.prompts import AttentionInputs, attention_inputs, hot_sets, later_segments
from lab.measure.first_layer import first_layer
from lab.policy_cases import CASES
from reference.diversity import unit_rows
from reference.policies.names import with_twins
from reference.policies.rkv import rkv_score
from spec.parameters import PAPER
from spec.policy import LayerView
from spec.records import CoAttention

pytestmark = pytest.mark.judges("numba")

Array = np.ndarray[Any, Any]
compiled = pytest.mark.skipif(
    os.environ.get("NUMBA_DISABLE_JIT") == "1", reason="takes minutes where the loops are not compiled"
)


def run(q: Array, k: Array, C: int = 128, lse: Array | None = None, k_cross: int = 4) -> CoAttention:
    p = replace(PAPER, C=C, k_cross=k_cross)
    return s1.coattention(q, k, np.arange(k.shape[1]), p, q.shape[2] ** -0.5, None, lse)


def sized(inputs: AttentionInputs, **sizes: Any) -> CoAttention:
    """Return S1 with small blocks and tiles.

    With the default sizes, one block contains any prompt of the common suite.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, value in sizes.items():
            patch.setattr(s1, name, value)
        return s1.coattention(
            inputs.q, inputs.k, inputs.positions, inputs.parameters, inputs.scaling, inputs.softcap, None, inputs.sinks
        )


def same(a: CoAttention, b: CoAttention) -> bool:
    """Return True if salience, neighbours and weights are equal, bit for bit."""
    names = ("salience", "intra", "intra_weight", "cross", "cross_weight")
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in names)


@pytest.mark.spec("CC-ATTENTION", "CC-SALIENCE", "CC-ROW-NORM", "CC-INTRA", "CC-CROSS", "CC-COATTENTION")
@given(
    inputs=st.one_of(attention_inputs(), later_segments()), rows=st.sampled_from([1, 16, 64]),
    least=st.integers(1, 5), most=st.integers(5, 9), keys=st.integers(1, 9), square=st.integers(1, 9),
)
def test_every_block_size_lies_in_the_certified_box(
    inputs: AttentionInputs, rows: int, least: int, most: int, keys: int, square: int,
) -> None:
    """Check block and tile sizes that do not divide each other or the chunk."""
    actual = sized(inputs, ROWS=rows, BLOCK=(least, most), KEYS=keys, SQUARE=square)
    assert not list(stage_checks.coattention(actual, inputs, "float32"))


@pytest.mark.spec("CC-SALIENCE", "CC-CROSS")
@given(inputs=hot_sets(), sizes=st.sampled_from([(1, 1, 2), (2, 3, 1), (5, 2, 3)]))
def test_blocks_of_hot_sets_are_exact(inputs: AttentionInputs, sizes: tuple[int, int, int]) -> None:
    """Check that of equal weights in different tiles, the source with the lower index is chosen."""
    queries, keys, side = sizes
    actual = sized(inputs, BLOCK=(queries, queries), KEYS=keys, SQUARE=side)
    want = oracle.coattention(
        inputs.q.tolist(), inputs.k.tolist(), inputs.positions.tolist(), inputs.parameters, inputs.scaling,
        inputs.softcap,
    )
    assert actual.salience.tolist() == want.salience
    assert [[j for j in row if j >= 0] for row in actual.cross.tolist()] == [[j for j, _ in row] for row in want.cross]


@pytest.mark.spec("CC-COATTENTION")
def test_fast_math_reorders_sums_and_assumes_nothing() -> None:
    """Check that LLVM may not assume that numbers are finite, and may not approximate functions."""
    assert {"reassoc", "contract", "nsz"} >= kernels.FAST


@pytest.mark.spec("CC-COATTENTION")
def test_a_tile_is_bounded_by_its_peaks() -> None:
    """Check the bound: the sum of 2 ** (peak - lse) over the heads, with at most 1 for each head."""
    peak = np.array([[[-1.0, 2.0], [0.0, 3.0]], [[-9.0, 1.0], [-2.0, 5.0]]], np.float32)
    lse, bound = np.ones((2, 2), np.float32), np.empty((2, 2), np.float32)
    kernels.bound_weights(peak, lse, bound)
    assert bound.tolist() == [[0.75, 2.0], [2.0**-10 + 0.125, 2.0]]


@compiled
@pytest.mark.spec("CC-COATTENTION")
@pytest.mark.parametrize("kind", ["mixed", "peaky"])
def test_the_bits_do_not_depend_on_threads_or_on_the_run(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    q, k = first_layer(700, 4, 2, 64, kind)
    once = run(q, k)
    assert (once.cross >= 0).any()
    for threads in (1, 2, 5):
        monkeypatch.setattr(os, "cpu_count", lambda threads=threads: threads)
        assert same(run(q, k), once)


@compiled
@pytest.mark.spec("CC-COATTENTION")
def test_views_give_the_same_bits_and_are_not_copied() -> None:
    """Check views of (tokens, heads, d) memory after padding: the peak memory grows by at most one tile of keys."""
    q, k = first_layer(1200, 4, 2, 64, "mixed")
    views = [np.pad(x.transpose(1, 0, 2), ((100, 0), (0, 0), (0, 0)))[100:].transpose(1, 0, 2) for x in (q, k)]
    assert not any(x.flags.c_contiguous for x in views)
    plain, plain_scratch = peak_of(q, k)
    actual, scratch = peak_of(*views)
    assert same(actual, plain)
    assert scratch - plain_scratch < 64 * 2**10 < k.nbytes // 4


def peak_of(q: Array, k: Array) -> tuple[CoAttention, int]:
    """Return the result of S1 and its peak memory besides the inputs, in bytes, on one thread, so that runs agree."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "cpu_count", lambda: 1)
        run(q, k)
        tracemalloc.start()
        actual = run(q, k)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return actual, peak


@compiled
@pytest.mark.spec("DV-GREEDY")
def test_diverse_selection_makes_no_square_array() -> None:
    """Check that the peak memory besides the inputs is less than a thirtieth of the memory of n x n cosines."""
    n, rng = 2048, np.random.default_rng(1)
    arguments = rng.standard_normal(n), unit_rows(rng.standard_normal((n, 32))), np.zeros(n, dtype=np.bool_), 64, 0.5
    diverse(*arguments)
    tracemalloc.start()
    diverse(*arguments)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 0 < peak < 8 * n * n / 30


@compiled
@pytest.mark.spec("CC-ATTENTION")
def test_with_a_given_lse_only_maxima_are_left_to_find(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a given log-sum-exp is not recomputed, and that without cross edges no earlier key is read."""
    q, k = first_layer(300, 2, 1, 64, "mixed")
    lse = np.empty((2, 300))
    for i in range(300):
        logits = np.float64(0.125) * q[:, i].astype(np.float64) @ k[0, : i + 1].astype(np.float64).T
        lse[:, i] = np.log(np.exp(logits).sum(axis=1))

    def refuse(*_: object) -> None:
        raise AssertionError("a sum was taken")

    plain = run(q, k)
    monkeypatch.setattr(kernels, "running_lse", refuse)
    actual = run(q, k, lse=lse)
    assert np.array_equal(actual.cross, plain.cross)
    assert np.array_equal(actual.intra, plain.intra)
    monkeypatch.setattr(kernels, "tile_peaks", refuse)
    assert np.array_equal(run(q, k, lse=lse, k_cross=0).intra, plain.intra)


@compiled
@pytest.mark.spec("CC-CROSS")
def test_the_bound_skips_no_edge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the bound skips most rows of tiles, and that the sources are those without skipped tiles."""
    q, k = first_layer(700, 4, 2, 64, "mixed")
    plain = run(q, k)
    visited: list[int] = []
    accumulate = kernels.accumulate_attention

    def counted(S: Array, rows: Array, *rest: Array) -> None:
        visited.append(len(rows))
        accumulate(S, rows, *rest)

    monkeypatch.setattr(kernels, "accumulate_attention", counted)
    run(q, k)
    few = sum(visited)
    monkeypatch.setattr(s1, "SLACK", -1.0)
    every = run(q, k)
    assert sum(visited) - few > 2 * few > 0
    assert np.array_equal(every.cross, plain.cross)


@pytest.mark.spec("CC-CROSS")
@given(
    weights=st.lists(st.lists(st.integers(0, 6), min_size=150, max_size=150), min_size=1, max_size=2),
    k=st.integers(1, 6), tau=st.sampled_from([0.0, 0.25]), split=st.integers(1, 149),
)
@fewer_examples
def test_lists_are_the_strongest_of_all_tiles(weights: list[list[int]], k: int, tau: float, split: int) -> None:
    """Check two tiles with many ties: the largest weight above tau is first, and the lower key if weights tie."""
    W = np.array(weights, np.float32) / 8
    rows = np.arange(len(W))
    index, weight = np.full((len(W), k), -1), np.zeros((len(W), k), np.float32)
    for first, tile in ((0, W[:, :split]), (split, W[:, split:])):
        kernels.insert_best(
            np.ascontiguousarray(tile), rows, np.float32(1), np.float32(tau), first, index, weight
        )
    for row, actual, kept in zip(W.tolist(), index.tolist(), weight.tolist(), strict=True):
        want = sorted((j for j, w in enumerate(row) if w > tau), key=lambda j: (-row[j], j))[:k]
        assert actual == want + [-1] * (k - len(want))
        assert kept == [row[j] for j in want] + [0.0] * (k - len(want))


@pytest.mark.spec("CC-ATTENTION")
@given(row=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=70))
def test_a_maximum_of_bits_is_the_maximum_of_floats(row: list[float]) -> None:
    S, peak = np.array([row], np.float32), np.empty(1, np.float32)
    kernels.tile_peaks(S, peak)
    assert peak[0] == max(row)


HITS_AND_MISSES = """
import numpy as np
from accelerated.numba_cpu.crystallization import crystallization
crystallization(np.ones(3), 1.0, 1e-8)
print(*(sum(each.values()) for each in crystallization.stats[1:]))
"""


def read_after_a_race(kind: type[IndexDataCacheFile], home: Path) -> dict[str, str | None]:
    """Return what a third process loads after two processes that both started with an empty index."""
    first, second = (kind(str(home), "f-1.py311", "stamp") for _ in range(2))
    late: list[tuple[str, str]] = []
    first._save_data = lambda name, data: late.append((name, data))
    first.save("integers", "code for integers")
    second._load_index = dict
    second.save("floats", "code for floats")
    for name, data in late:
        kind._save_data(first, name, data)
    later = kind(str(home), "f-1.py311", "stamp")
    return {types: later.load(types) for types in ("integers", "floats")}


@pytest.mark.law("saved-is-what-was")
def test_processes_that_compile_at_once_never_read_each_other_s_code(tmp_path: Path) -> None:
    assert read_after_a_race(Files, tmp_path) == {"integers": None, "floats": "code for floats"}


@pytest.mark.law("saved-is-what-was")
def test_numba_s_own_cache_gives_code_for_other_types(tmp_path: Path) -> None:
    """Check the defect for which kvspec has a cache class. If this test fails, Numba's class can be used."""
    assert read_after_a_race(IndexDataCacheFile, tmp_path)["floats"] == "code for integers"


@pytest.mark.law("saved-is-what-was")
def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "NUMBA_DISABLE_JIT": "0"}
    completed = [
        subprocess.run(
            [sys.executable, "-c", HITS_AND_MISSES], check=True, cwd=ROOT, env=environment, capture_output=True,
            text=True,
        ).stdout.split()
        for _ in range(2)
    ]
    (no_hits, misses), (hits, no_misses) = completed
    assert (no_hits, no_misses) == ("0", "0")
    assert misses == hits != "0"


@pytest.mark.law("saved-is-what-was")
def test_code_is_compiled_anew_once_any_source_changes(tmp_path: Path) -> None:
    for name in ("one.py", "two.py"):
        (tmp_path / name).write_text("x = 1\n", encoding="utf-8")
    before = digest_of(tmp_path)
    (tmp_path / "two.py").touch()
    assert digest_of(tmp_path) == before
    (tmp_path / "two.py").write_text("x = 2\n", encoding="utf-8")
    assert digest_of(tmp_path) != before


W, B = 64, 128


def current(k: Any) -> Any:
    """Return a_c (n,) of one head's keys."""
    inverse, blocks, stable = measured(k, B)
    return anomalies(k, inverse, blocks, stable, B, W)[2]


@pytest.mark.spec("NK-CURRENT")
@pytest.mark.parametrize("n", [3 * W, 20_000])
def test_a_window_has_the_same_bits_after_any_prompt(n: int) -> None:
    """Compare the last tokens alone and after a prompt of a different direction: after one window, all bits agree."""
    rng = np.random.default_rng(4)
    before = (rng.standard_normal((n - n % W, 16)) + 5).astype(np.float32)
    tail = (rng.standard_normal((3 * W + 7, 16)) - 5).astype(np.float32)
    alone, behind = current(tail), current(np.concatenate([before, tail]))[-len(tail) :]
    assert np.array_equal(behind[W - 1 :], alone[W - 1 :])
    assert not np.array_equal(behind[: W - 1], alone[: W - 1])


@pytest.mark.spec("NK-EPISODIC", "NK-ANOMALY")
@pytest.mark.parametrize(("rise", "directed"), [(1.5 * 2.0**-16, False), (1.25 * 2.0**-15, True)])
def test_a_block_whose_keys_cancel_has_no_direction(rise: float, directed: bool) -> None:
    """Check keys (1, 0) and (-1, rise): the bound 2^-16 MUST apply to their mean, rise / 2, and not to their sum."""
    k = np.array([[1.0, 0.0], [-1.0, rise]], np.float32)
    episodic = anomalies(k, *measured(k, 2), 2, 2)[1]
    assert (episodic[1] == -k[1, 1]) == directed == bool(episodic.any())


@pytest.mark.spec("NK-CURRENT", "NK-ANOMALY")
@pytest.mark.parametrize(("rise", "directed"), [(1.5 * 2.0**-16, False), (1.25 * 2.0**-15, True)])
@pytest.mark.parametrize(("n", "window"), [(40, 2), (2, 64)])
def test_a_window_whose_keys_cancel_has_no_direction(rise: float, directed: bool, n: int, window: int) -> None:
    """Check that the bound applies to the mean of the window, also in windows that are not full."""
    k = np.tile(np.array([[1.0, 0.0], [-1.0, rise]], np.float32), (n // 2, 1))
    actual = anomalies(k, *measured(k, 2), 2, window)[2]
    assert (actual[-1] == -k[1, 1]) == directed == bool(actual[-1])


@pytest.mark.spec("PO-RKV")
@pytest.mark.parametrize("seed", range(30))
def test_rkv_keeps_the_tokens_of_brute_force(seed: int) -> None:
    case, inputs = CASES["rkv"], with_sinks(drawn(seed), seed)
    policy, B = case.policy(inputs), max(case.floor, (inputs.n + 1) // 2)
    twin = with_twins(policy, BACKEND)
    assert twin is not policy
    assert decided(twin, inputs, B) == case.expected(inputs, B)


@pytest.mark.spec("PO-RKV")
@pytest.mark.parametrize(("kind", "bits"), [(np.float32, 15), (np.float64, 40)])
def test_scores_of_rkv_are_those_of_the_reference_in_several_blocks(kind: type[np.floating], bits: int) -> None:
    """Check similar keys in different blocks, of very different lengths, with no cosine near 1/2."""
    rng = np.random.default_rng(0)
    k = (rng.standard_normal((2, 5, 8))[:, rng.integers(0, 5, 90)] + 0.3 * rng.standard_normal((2, 90, 8))).astype(kind)
    k *= kind(2.0) ** rng.integers(-20, 20, (2, 90, 1)).astype(kind)
    view = LayerView(rng.standard_normal((4, 90, 8)).astype(kind), k, k, 0.4, 5.0)
    unit = k.astype(np.float64) / np.linalg.norm(k.astype(np.float64), axis=2, keepdims=True)
    cosines = unit @ unit.transpose(0, 2, 1)
    assert np.abs(cosines - 0.5).min() > 2.0**-20
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rkv, "FLOATS", 0)
        actual = rkv.rkv_score(view, 8, 7, 0.1)
    error = np.abs(actual - rkv_score(view, 8, 7, 0.1))
    assert np.nanmax(error) <= 2.0**-bits


@pytest.mark.spec("PO-RKV")
@pytest.mark.parametrize(("more", "last"), [(0.0, 0), (2.0**-40, 0), (2.0**-20, 1)])
def test_cosines_are_compared_with_a_half_in_float32(more: float, last: int) -> None:
    cosine = 0.5 + more
    assert rkv.last_similar(np.array([[1.0, 0.0], [cosine, (1 - cosine * cosine) ** 0.5]]))[0] == last
