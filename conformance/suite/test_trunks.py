"""S2: sentences, the merge pass, the split."""

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
    """Trunks of a text whose tokens at `ends` end a sentence."""
    n = len(intra)
    found = record([1.0] * n, intra, [[] for _ in range(n)], 8, 4)
    mask = np.isin(np.arange(n), ends)
    return stages.trunks(found, np.ones(n), mask, p).offsets.tolist()


def linked(n: int, *edges: tuple[int, int, float]) -> Intra:
    return [[(j, w) for i, j, w in edges if i == owner] for owner in range(n)]


@pytest.mark.spec(
    "CC-TRUNKS", "CC-SENTENCES", "CC-INTERFACE", "CC-INTERFACE-EDGES", "CC-MERGE", "CC-SPLIT", "CC-TRUNK-IMPACT",
)
@given(text=texts())
def test_trunks_equal_the_brute_force(stages: CrystalStages, text: Text) -> None:
    """S2 MUST give the trunks of Section 3.3 from given edges, exactly."""
    found = run(stages, text)
    assert not list(stage_checks.trunks(found, text.coattention, text.impact, text.ends, text.parameters))
    assert found.offsets.dtype == np.int64


@pytest.mark.spec("CC-TRUNKS")
@given(text=texts(), start=st.integers(1, 50))
def test_a_later_segment_has_the_same_trunks_further_on(stages: CrystalStages, text: Text, start: int) -> None:
    """S2 runs on the segment alone: positions shift, sizes and impacts do not."""
    def moved(index: IntMatrix) -> IntMatrix:
        return np.where(index >= 0, index + start, -1)

    S1 = text.coattention
    later = replace(S1, start=start, intra=moved(S1.intra), cross=moved(S1.cross))
    a, b = run(stages, text), run(stages, replace(text, coattention=later))
    assert (a.offsets + start).tolist() == b.offsets.tolist()
    assert a.impact.tolist() == b.impact.tolist()


@pytest.mark.spec("CC-INTERFACE-EDGES")
def test_an_interface_is_read_in_its_literal_orientation(stages: CrystalStages) -> None:
    """(2, 1) does not join [0, 2) and [2, 4); (1, 2) does."""
    assert offsets(stages, linked(4, (2, 1, 0.9)), [1, 3], PAPER) == [0, 2, 4]
    assert offsets(stages, linked(4, (1, 2, 0.9)), [1, 3], PAPER) == [0, 4]


@pytest.mark.spec("CC-INTERFACE-EDGES", "CC-MERGE")
def test_weights_are_compared_as_they_are_given(stages: CrystalStages) -> None:
    """0.3 is not above tau_merge = 0.3; in float32 it would be."""
    assert float(np.float32(0.3)) > PAPER.tau_merge == 0.3
    assert offsets(stages, linked(4, (1, 2, 0.3)), [1, 3], PAPER) == [0, 2, 4]


@pytest.mark.spec("CC-INTERFACE-EDGES", "CC-MERGE")
def test_a_backward_edge_does_not_enter_the_mean(stages: CrystalStages) -> None:
    """(1, 2, .9), (0, 3, .31): mean .605; with the mirror edge it would be .703."""
    intra = linked(4, (1, 2, 0.9), (2, 1, 0.9), (0, 3, 0.31))
    assert offsets(stages, intra, [1, 3], replace(PAPER, tau_merge=0.65)) == [0, 2, 4]
    assert offsets(stages, intra, [1, 3], replace(PAPER, tau_merge=0.6)) == [0, 4]


@pytest.mark.spec("CC-MERGE")
@pytest.mark.parametrize(("tau_merge", "merged"), [(0.25, True), (0.5, False)])
def test_the_strength_must_exceed_tau_merge(stages: CrystalStages, tau_merge: float, merged: bool) -> None:
    """Eq. 19 is strict: a mean equal to tau_merge does not merge."""
    found = offsets(stages, linked(2, (0, 1, 0.5)), [0, 1], replace(PAPER, tau_merge=tau_merge))
    assert found == ([0, 2] if merged else [0, 1, 2])


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
    """Sum(w) - tau k > 0 in the order of (a, b), which is not the order of E: neighbours stand by rank.

    For the first two cases the mean says the contrary; the last two are one multiset in two orders.
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
    """Eq. 19: |g| + |s| <= T_max, inclusive."""
    found = offsets(stages, linked(5, (1, 2, 1.0)), [1, 4], replace(PAPER, T_max=T_max))
    assert found == ([0, 5] if merged else [0, 2, 5])


@pytest.mark.spec("CC-TRUNKS")
def test_the_running_trunk_grows_and_restarts(stages: CrystalStages) -> None:
    """A refused sentence becomes the running trunk; the pass is single, from left to right."""
    chain = linked(6, (0, 1, 1.0), (1, 2, 1.0), (2, 3, 1.0), (3, 4, 1.0), (4, 5, 1.0))
    assert offsets(stages, chain, list(range(6)), replace(PAPER, T_max=4)) == [0, 4, 6]


@pytest.mark.spec("CC-INTERFACE")
@pytest.mark.parametrize(("a", "b", "merged"), [(1, 6, True), (0, 6, False), (5, 10, True), (5, 11, False)])
def test_the_interface_is_five_tokens_on_each_side(stages: CrystalStages, a: int, b: int, merged: bool) -> None:
    """Eq. 16: sentences [0, 6) and [6, 12); token 0 and token 11 stand outside the window."""
    assert offsets(stages, linked(12, (a, b, 1.0)), [5, 11], PAPER) == ([0, 12] if merged else [0, 6, 12])


@pytest.mark.spec("CC-INTERFACE")
def test_the_interface_is_of_the_running_trunk(stages: CrystalStages) -> None:
    """Token 0 is among the last five of the trunk that [0, 2) and [2, 4) have become, not of its last sentence."""
    assert offsets(stages, linked(6, (1, 2, 1.0), (0, 4, 1.0)), [1, 3, 5], PAPER) == [0, 6]


@pytest.mark.spec("CC-SENTENCES")
@pytest.mark.parametrize(
    ("ends", "expected"),
    [([], [0, 5]), ([4], [0, 5]), ([0], [0, 1, 5]), ([1, 2], [0, 2, 3, 5]), (list(range(5)), [0, 1, 2, 3, 4, 5])],
)
def test_an_end_closes_its_sentence(stages: CrystalStages, ends: list[int], expected: list[int]) -> None:
    """Consecutive ends are sentences of their own; what follows the last end is a sentence."""
    assert offsets(stages, linked(5), ends, PAPER) == expected


@pytest.mark.spec("CC-SPLIT")
@given(n=st.integers(1, 150), T_max=st.integers(1, 40))
def test_split_sizes_are_as_equal_as_can_be(stages: CrystalStages, n: int, T_max: int) -> None:
    """Step 3: ceil(n / T_max) pieces, larger first, differing by at most 1, none below (T_max + 1) // 2 if split."""
    found = offsets(stages, linked(n), [], replace(PAPER, T_max=T_max))
    sizes = np.diff(found).tolist()
    assert sizes == [len(piece) for piece in np.array_split(np.arange(n), -(-n // T_max))]
    assert len(sizes) == 1 or min(sizes) >= (T_max + 1) // 2


@pytest.mark.spec("CC-SPLIT")
def test_pieces_are_counted_in_whole_tokens(stages: CrystalStages) -> None:
    """n = q T_max tokens where n times 1 / T_max, in floats, is more than q, or less; and a token more or less."""
    pairs = [(T, q) for T in range(2, 260) for q in range(2, 40) if q * T * (1 / T) != q and q * T < 900]
    assert {q * T * (1 / T) > q for T, q in pairs} == {True, False}
    for T, q in [*[(T, q) for T, q in pairs if q * T * (1 / T) > q][:4], *pairs[:4]]:
        for n in (q * T - 1, q * T, q * T + 1):
            found = offsets(stages, linked(n), [], replace(PAPER, T_max=T))
            assert np.diff(found).tolist() == [len(piece) for piece in np.array_split(np.arange(n), -(-n // T))]


@pytest.mark.spec("CC-TRUNKS")
def test_the_pass_is_not_repeated(stages: CrystalStages) -> None:
    """[0, 2) refuses [2, 3), which then takes [3, 5) in: only a second pass would see the edge (1, 3) at its side."""
    assert offsets(stages, linked(5, (1, 3, 0.9), (2, 3, 0.9)), [1, 2, 4], PAPER) == [0, 2, 5]


@pytest.mark.spec("CC-INTERFACE-EDGES")
@pytest.mark.parametrize("third", [(0, 7), (1, 5)])
def test_weights_stand_by_first_endpoint_then_by_second(stages: CrystalStages, third: tuple[int, int]) -> None:
    """Added as .4, .2, .3 they exceed 3 * .3, as their mean does; by rank or by second endpoint first they do not."""
    E = linked(10, (0, 5, 0.4), (*third, 0.3), (0, 6, 0.2))
    assert offsets(stages, E, [4, 9], PAPER) == [0, 10]


def forward(weights: Vector) -> tuple[CoAttention, BoolVector]:
    """Two sentences of five tokens; the first's tokens have edges to the second's, by first and second endpoint."""
    index, weight = np.full((10, 5), -1), np.zeros((10, 5))
    for a, row in enumerate(weights.reshape(5, 5)):
        order = np.argsort(-row, kind="stable")
        index[a], weight[a] = 5 + order, row[order]
    ends = np.zeros(10, dtype=np.bool_)
    ends[4] = True
    return CoAttention(0, np.ones(10), index, weight, np.full((10, 1), -1), np.zeros((10, 1))), ends


def other_sums(w: Vector) -> list[float]:
    """Pairwise, backwards, compensated, in the order of the lists, in float32."""
    by_rank = np.concatenate([row[np.argsort(-row, kind="stable")] for row in w.reshape(5, 5)])
    halves = float(np.cumsum(w[:13])[-1]) + float(np.cumsum(w[13:])[-1])
    return [
        float(np.sum(w)), float(np.cumsum(w[::-1])[-1]), float(np.cumsum(by_rank)[-1]), halves,
        float(np.cumsum(w.astype(np.float32))[-1]),
    ]


@pytest.mark.spec("CC-MERGE", "CC-INTERFACE-EDGES")
def test_the_order_of_25_weights_decides(stages: CrystalStages) -> None:
    """Sums one rounding apart from tau_merge times 25: each other order errs in some of them."""
    numbers, seen = Numbers(5), [0] * 5
    while min(seen) < 3:
        w = 0.31 + 0.5 * numbers.fractions(25)
        tau = float(np.cumsum(w)[-1]) / 25
        merges = oracle.interface_sums(w.tolist(), tau)
        differ = [(x - tau * 25 > 0) != merges for x in other_sums(w)]
        if not any(differ):
            continue
        seen = [a + b for a, b in zip(seen, differ, strict=True)]
        found, ends = forward(w)
        p = replace(PAPER, C=16, k_intra=5, k_cross=1, tau_merge=tau)
        got = stages.trunks(found, np.ones(10), ends, p).offsets
        assert got.tolist() == ([0, 10] if merges else [0, 5, 10])
