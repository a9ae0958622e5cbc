"""Tests of S2: sentences, the merge pass and the split."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.checks import stage_checks
from conformance.oracles import s2
from conformance.oracles.scale import stages as oracle
from conformance.strategies.numbers import Numbers
from conformance.strategies.trunks import Text, record, texts
from spec.arrays import BoolVector, IntMatrix, Vector
from spec.backend import CrystalStages
from spec.parameters import PAPER, CrystalCacheParameters
from spec.records import CoAttention, Trunks

Intra = list[list[tuple[int, float]]]


def run(stages: CrystalStages, text: Text) -> Trunks:
    return stages.trunks(text.coattention, text.impact, text.ends, text.parameters)


def offsets(stages: CrystalStages, intra: Intra, ends: list[int], p: CrystalCacheParameters) -> list[int]:
    """Return the trunk offsets of a text whose tokens at `ends` end a sentence."""
    n = len(intra)
    result = record([1.0] * n, intra, [[] for _ in range(n)], 8, 4)
    mask = np.isin(np.arange(n), ends)
    return stages.trunks(result, np.ones(n), mask, p).offsets.tolist()


def linked(n: int, *edges: tuple[int, int, float]) -> Intra:
    return [[(j, w) for i, j, w in edges if i == owner] for owner in range(n)]


@pytest.mark.spec(
    "CC-TRUNKS", "CC-SENTENCES", "CC-INTERFACE", "CC-INTERFACE-EDGES", "CC-MERGE", "CC-SPLIT", "CC-TRUNK-IMPACT",
)
@given(text=texts())
def test_trunks_equal_the_brute_force(stages: CrystalStages, text: Text) -> None:
    """S2 MUST return exactly the trunks of Section 3.3 for given edges."""
    actual = run(stages, text)
    assert not list(stage_checks.trunks(actual, text.coattention, text.impact, text.ends, text.parameters))
    assert actual.offsets.dtype == np.int64


@pytest.mark.spec("CC-TRUNKS")
@given(text=texts(), start=st.integers(1, 50))
def test_a_later_segment_has_the_same_trunks_further_on(stages: CrystalStages, text: Text, start: int) -> None:
    """Check that a later segment has shifted positions, and equal sizes and impacts.

    S2 reads only the segment.
    """
    def moved(index: IntMatrix) -> IntMatrix:
        return np.where(index >= 0, index + start, -1)

    S1 = text.coattention
    later = replace(S1, start=start, intra=moved(S1.intra), cross=moved(S1.cross))
    a, b = run(stages, text), run(stages, replace(text, coattention=later))
    assert (a.offsets + start).tolist() == b.offsets.tolist()
    assert a.impact.tolist() == b.impact.tolist()


@pytest.mark.spec("CC-INTERFACE-EDGES")
def test_an_interface_is_read_in_its_literal_orientation(stages: CrystalStages) -> None:
    """Check that the edge (1, 2) merges [0, 2) and [2, 4), and that the edge (2, 1) does not."""
    assert offsets(stages, linked(4, (2, 1, 0.9)), [1, 3], PAPER) == [0, 2, 4]
    assert offsets(stages, linked(4, (1, 2, 0.9)), [1, 3], PAPER) == [0, 4]


@pytest.mark.spec("CC-INTERFACE-EDGES", "CC-MERGE")
def test_weights_are_compared_as_they_are_given(stages: CrystalStages) -> None:
    """Check that a weight of 0.3 is not above tau_merge = 0.3. In float32 it would be above."""
    assert float(np.float32(0.3)) > PAPER.tau_merge == 0.3
    assert offsets(stages, linked(4, (1, 2, 0.3)), [1, 3], PAPER) == [0, 2, 4]


@pytest.mark.spec("CC-INTERFACE-EDGES", "CC-MERGE")
def test_a_backward_edge_does_not_enter_the_mean(stages: CrystalStages) -> None:
    """Check that the mean of (1, 2, .9) and (0, 3, .31) is .605. With the edge (2, 1) it would be .703."""
    intra = linked(4, (1, 2, 0.9), (2, 1, 0.9), (0, 3, 0.31))
    assert offsets(stages, intra, [1, 3], replace(PAPER, tau_merge=0.65)) == [0, 2, 4]
    assert offsets(stages, intra, [1, 3], replace(PAPER, tau_merge=0.6)) == [0, 4]


@pytest.mark.spec("CC-MERGE")
@pytest.mark.parametrize(("tau_merge", "merged"), [(0.25, True), (0.5, False)])
def test_the_strength_must_exceed_tau_merge(stages: CrystalStages, tau_merge: float, merged: bool) -> None:
    """Check that Eq. 19 is strict, so a mean equal to tau_merge does not merge."""
    actual = offsets(stages, linked(2, (0, 1, 0.5)), [0, 1], replace(PAPER, tau_merge=tau_merge))
    assert actual == ([0, 2] if merged else [0, 1, 2])


@pytest.mark.spec("CC-MERGE")
@pytest.mark.parametrize(
    ("tau_merge", "weights", "merged"),
    [
        (0.3, [0.3, 0.3, math.nextafter(0.3, 1)], True), (0.1, [math.nextafter(0.1, 0), 0.1, 0.1], False),
        (0.3, [math.nextafter(0.3, 1)] * 9, True), (0.3, [math.nextafter(0.3, 1)] * 10, False),
        (0.3, [0.25, 0.3, 0.35], True), (0.3, [0.35, 0.3, 0.25], False),
    ],
)
def test_the_comparison_is_multiplied_out(
    stages: CrystalStages, tau_merge: float, weights: list[float], merged: bool,
) -> None:
    """Check that Sum(w) - tau k > 0 is evaluated in the order of (a, b).

    The edges in E have a different order, which is the rank of neighbours. In the first two cases the mean would have
    the opposite result. The last two cases have equal weights in different orders.
    """
    cells = [(a, b) for a in range(5) for b in range(5, 10)]
    E = [(a, b, w) for (a, b), w in zip(cells, weights, strict=False)]
    intra = linked(10, *sorted(E, key=lambda edge: -edge[2]))
    p = replace(PAPER, tau_merge=tau_merge)
    assert s2.merges(weights, 5, 5, p) is merged
    assert offsets(stages, intra, [4, 9], p) == ([0, 10] if merged else [0, 5, 10])


@pytest.mark.spec("CC-MERGE")
@pytest.mark.parametrize(("T_max", "merged"), [(5, True), (4, False)])
def test_a_trunk_may_reach_T_max(stages: CrystalStages, T_max: int, merged: bool) -> None:
    """Check |g| + |s| <= T_max of Eq. 19, with equality allowed."""
    actual = offsets(stages, linked(5, (1, 2, 1.0)), [1, 4], replace(PAPER, T_max=T_max))
    assert actual == ([0, 5] if merged else [0, 2, 5])


@pytest.mark.spec("CC-TRUNKS")
def test_the_running_trunk_grows_and_restarts(stages: CrystalStages) -> None:
    """Check that a sentence that does not merge becomes the running trunk, in a single pass from left to right."""
    chain = linked(6, (0, 1, 1.0), (1, 2, 1.0), (2, 3, 1.0), (3, 4, 1.0), (4, 5, 1.0))
    assert offsets(stages, chain, list(range(6)), replace(PAPER, T_max=4)) == [0, 4, 6]


@pytest.mark.spec("CC-INTERFACE")
@pytest.mark.parametrize(("a", "b", "merged"), [(1, 6, True), (0, 6, False), (5, 10, True), (5, 11, False)])
def test_the_interface_is_five_tokens_on_each_side(stages: CrystalStages, a: int, b: int, merged: bool) -> None:
    """Check Eq. 16 for the sentences [0, 6) and [6, 12): token 0 and token 11 are outside the interface."""
    assert offsets(stages, linked(12, (a, b, 1.0)), [5, 11], PAPER) == ([0, 12] if merged else [0, 6, 12])


@pytest.mark.spec("CC-INTERFACE")
def test_the_interface_is_of_the_running_trunk(stages: CrystalStages) -> None:
    """Check that the interface has the last five tokens of the running trunk, not of its last sentence.

    Token 0 is in the interface of the trunk that [0, 2) and [2, 4) became.
    """
    assert offsets(stages, linked(6, (1, 2, 1.0), (0, 4, 1.0)), [1, 3, 5], PAPER) == [0, 6]


@pytest.mark.spec("CC-SENTENCES")
@pytest.mark.parametrize(
    ("ends", "expected"),
    [([], [0, 5]), ([4], [0, 5]), ([0], [0, 1, 5]), ([1, 2], [0, 2, 3, 5]), (list(range(5)), [0, 1, 2, 3, 4, 5])],
)
def test_an_end_closes_its_sentence(stages: CrystalStages, ends: list[int], expected: list[int]) -> None:
    """Check that consecutive ends are separate sentences, and that the tokens after the last end are a sentence."""
    assert offsets(stages, linked(5), ends, PAPER) == expected


@pytest.mark.spec("CC-SPLIT")
@given(n=st.integers(1, 150), T_max=st.integers(1, 40))
def test_split_sizes_are_as_equal_as_can_be(stages: CrystalStages, n: int, T_max: int) -> None:
    """Check step 3: ceil(n / T_max) pieces whose sizes differ by at most 1, larger pieces first.

    If there is more than one piece, each has at least (T_max + 1) // 2 tokens.
    """
    actual = offsets(stages, linked(n), [], replace(PAPER, T_max=T_max))
    sizes = np.diff(actual).tolist()
    assert sizes == [len(piece) for piece in np.array_split(np.arange(n), -(-n // T_max))]
    assert len(sizes) == 1 or min(sizes) >= (T_max + 1) // 2


@pytest.mark.spec("CC-SPLIT")
def test_pieces_are_counted_in_whole_tokens(stages: CrystalStages) -> None:
    """Check n = q T_max tokens, and one token more or less, if n times 1 / T_max in floats is not q."""
    pairs = [(T, q) for T in range(2, 260) for q in range(2, 40) if q * T * (1 / T) != q and q * T < 900]
    assert {q * T * (1 / T) > q for T, q in pairs} == {True, False}
    for T, q in [*[(T, q) for T, q in pairs if q * T * (1 / T) > q][:4], *pairs[:4]]:
        for n in (q * T - 1, q * T, q * T + 1):
            actual = offsets(stages, linked(n), [], replace(PAPER, T_max=T))
            assert np.diff(actual).tolist() == [len(piece) for piece in np.array_split(np.arange(n), -(-n // T))]


@pytest.mark.spec("CC-TRUNKS")
def test_the_pass_is_not_repeated(stages: CrystalStages) -> None:
    """Check that the pass is not repeated: [2, 3) does not merge with [0, 2), and then merges with [3, 5).

    Only a second pass would use the edge (1, 3).
    """
    assert offsets(stages, linked(5, (1, 3, 0.9), (2, 3, 0.9)), [1, 2, 4], PAPER) == [0, 2, 5]


@pytest.mark.spec("CC-INTERFACE-EDGES")
@pytest.mark.parametrize("third", [(0, 7), (1, 5)])
def test_weights_stand_by_first_endpoint_then_by_second(stages: CrystalStages, third: tuple[int, int]) -> None:
    """Check that weights are added by first, then by second endpoint: .4 + .2 + .3 exceeds 3 * .3.

    Added by rank, or by second endpoint first, the sum does not exceed it.
    """
    E = linked(10, (0, 5, 0.4), (*third, 0.3), (0, 6, 0.2))
    assert offsets(stages, E, [4, 9], PAPER) == [0, 10]


def forward(weights: Vector) -> tuple[CoAttention, BoolVector]:
    """Return edges from the tokens of a sentence to the next sentence, of five tokens each, and the sentence ends."""
    index, weight = np.full((10, 5), -1), np.zeros((10, 5))
    for a, row in enumerate(weights.reshape(5, 5)):
        order = np.argsort(-row, kind="stable")
        index[a], weight[a] = 5 + order, row[order]
    ends = np.zeros(10, dtype=np.bool_)
    ends[4] = True
    return CoAttention(0, np.ones(10), index, weight, np.full((10, 1), -1), np.zeros((10, 1))), ends


def other_sums(w: Vector) -> list[float]:
    """Return sums of `w` with wrong orders or types: pairwise, backwards, by rank, as two halves, and in float32."""
    by_rank = np.concatenate([row[np.argsort(-row, kind="stable")] for row in w.reshape(5, 5)])
    halves = float(np.cumsum(w[:13])[-1]) + float(np.cumsum(w[13:])[-1])
    return [
        float(np.sum(w)), float(np.cumsum(w[::-1])[-1]), float(np.cumsum(by_rank)[-1]), halves,
        float(np.cumsum(w.astype(np.float32))[-1]),
    ]


@pytest.mark.spec("CC-MERGE", "CC-INTERFACE-EDGES")
def test_the_order_of_25_weights_decides(stages: CrystalStages) -> None:
    """Check sums of 25 weights that differ from tau_merge times 25 by one rounding.

    Each different order of addition has a wrong result for some of these sums.
    """
    numbers, seen = Numbers(5), [0] * 5
    while min(seen) < 3:
        w = 0.31 + 0.5 * numbers.fractions(25)
        tau = float(np.cumsum(w)[-1]) / 25
        merges = oracle.interface_sums(w.tolist(), tau)
        differ = [(x - tau * 25 > 0) != merges for x in other_sums(w)]
        if not any(differ):
            continue
        seen = [a + b for a, b in zip(seen, differ, strict=True)]
        actual, ends = forward(w)
        p = replace(PAPER, C=16, k_intra=5, k_cross=1, tau_merge=tau)
        got = stages.trunks(actual, np.ones(10), ends, p).offsets
        assert got.tolist() == ([0, 10] if merges else [0, 5, 10])
