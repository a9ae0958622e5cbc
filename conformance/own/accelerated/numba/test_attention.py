"""S1 on the CPU: block sizes, threads, memory, and what a given log-sum-exp saves."""

import os
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("numba", reason="pip install 'kvspec[numba]'")

from accelerated.numba_cpu import coattention as s1
from accelerated.numba_cpu import kernels
from conformance.checks import stage_checks
from conformance.measure.benchmarks.data import first_layer
from conformance.oracles import s1 as oracle
from conformance.plugin import sparingly
from conformance.strategies.prompts import AttentionInputs, attention_inputs, hot_sets, later_segments
from spec.parameters import PAPER
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
    """In blocks and tiles of other sizes: at their real ones one holds any prompt of the common suite."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in sizes.items():
            patch.setattr(s1, name, value)
        return s1.coattention(
            inputs.q, inputs.k, inputs.positions, inputs.parameters, inputs.scaling, inputs.softcap
        )


def same(a: CoAttention, b: CoAttention) -> bool:
    """Salience, neighbours and weights equal to the bit."""
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
    """Sizes that divide neither the chunk nor one another, so that few tokens cross several blocks and tiles."""
    found = sized(inputs, ROWS=rows, BLOCK=(least, most), KEYS=keys, SQUARE=square)
    assert not list(stage_checks.coattention(found, inputs, "float32"))


@pytest.mark.spec("CC-SALIENCE", "CC-CROSS")
@given(inputs=hot_sets(), sizes=st.sampled_from([(1, 1, 2), (2, 3, 1), (5, 2, 3)]))
def test_blocks_of_hot_sets_are_exact(inputs: AttentionInputs, sizes: tuple[int, int, int]) -> None:
    """Ties between sources of different tiles go to the lower index, too."""
    queries, keys, side = sizes
    found = sized(inputs, BLOCK=(queries, queries), KEYS=keys, SQUARE=side)
    want = oracle.coattention(
        inputs.q.tolist(), inputs.k.tolist(), inputs.positions.tolist(), inputs.parameters, inputs.scaling,
        inputs.softcap,
    )
    assert found.salience.tolist() == want.salience
    assert [[j for j in row if j >= 0] for row in found.cross.tolist()] == [[j for j, _ in row] for row in want.cross]


@pytest.mark.spec("CC-COATTENTION")
def test_fast_math_reorders_sums_and_assumes_nothing() -> None:
    """Numba hands each word to LLVM; those left out would let it take every number for finite, or guess functions."""
    assert {"reassoc", "contract", "nsz"} >= kernels.FAST


@pytest.mark.spec("CC-COATTENTION")
def test_a_tile_is_bounded_by_its_peaks() -> None:
    """2 ** (peak - lse) summed over the heads, and no head above 1: a looser bound would skip nothing."""
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
    """(tokens, heads, d) memory behind padding: scratch grows by no more than one tile of keys."""
    q, k = first_layer(1200, 4, 2, 64, "mixed")
    views = [np.pad(x.transpose(1, 0, 2), ((100, 0), (0, 0), (0, 0)))[100:].transpose(1, 0, 2) for x in (q, k)]
    assert not any(x.flags.c_contiguous for x in views)
    plain, plain_scratch = measured(q, k)
    found, scratch = measured(*views)
    assert same(found, plain)
    assert scratch - plain_scratch < 64 * 2**10 < k.nbytes // 4


def measured(q: Array, k: Array) -> tuple[CoAttention, int]:
    """S1, and the most that it held at a time beside its inputs, in bytes; on one thread, so that it repeats."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "cpu_count", lambda: 1)
        run(q, k)
        tracemalloc.start()
        found = run(q, k)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return found, peak


@compiled
@pytest.mark.spec("CC-ATTENTION")
def test_with_a_given_lse_only_maxima_are_left_to_find(monkeypatch: pytest.MonkeyPatch) -> None:
    """No sum is taken; without cross edges, no earlier key is read."""
    q, k = first_layer(300, 2, 1, 64, "mixed")
    lse = np.empty((2, 300))
    for i in range(300):
        logits = np.float64(0.125) * q[:, i].astype(np.float64) @ k[0, : i + 1].astype(np.float64).T
        lse[:, i] = np.log(np.exp(logits).sum(axis=1))

    def refuse(*_: object) -> None:
        raise AssertionError("a sum was taken")

    plain = run(q, k)
    monkeypatch.setattr(kernels, "running_lse", refuse)
    found = run(q, k, lse=lse)
    assert np.array_equal(found.cross, plain.cross)
    assert np.array_equal(found.intra, plain.intra)
    monkeypatch.setattr(kernels, "tile_peaks", refuse)
    assert np.array_equal(run(q, k, lse=lse, k_cross=0).intra, plain.intra)


@compiled
@pytest.mark.spec("CC-CROSS")
def test_the_bound_skips_no_edge(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every tile active the sources are the same; with the bound, most rows of tiles are skipped."""
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
@sparingly
def test_lists_are_the_strongest_of_all_tiles(weights: list[list[int]], k: int, tau: float, split: int) -> None:
    """Two tiles one after the other, many ties: the largest first, on a tie the lower key; strictly above tau."""
    W = np.array(weights, np.float32) / 8
    rows = np.arange(len(W))
    index, weight = np.full((len(W), k), -1), np.zeros((len(W), k), np.float32)
    for first, tile in ((0, W[:, :split]), (split, W[:, split:])):
        kernels.insert_best(
            np.ascontiguousarray(tile), rows, np.float32(1), np.float32(tau), first, index, weight
        )
    for row, found, kept in zip(W.tolist(), index.tolist(), weight.tolist(), strict=True):
        want = sorted((j for j, w in enumerate(row) if w > tau), key=lambda j: (-row[j], j))[:k]
        assert found == want + [-1] * (k - len(want))
        assert kept == [row[j] for j in want] + [0.0] * (k - len(want))


@pytest.mark.spec("CC-ATTENTION")
@given(row=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=70))
def test_a_maximum_of_bits_is_the_maximum_of_floats(row: list[float]) -> None:
    S, peak = np.array([row], np.float32), np.empty(1, np.float32)
    kernels.tile_peaks(S, peak)
    assert peak[0] == max(row)
