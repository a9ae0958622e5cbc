"""Tests of S4: the trunk graph, degrees and D."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance import tolerances
from conformance.checks import stage_checks
from conformance.strategies.numbers import Numbers
from conformance.strategies.trunks import Text, partitions, record, texts
from spec.arrays import Vector
from spec.backend import CrystalStages
from spec.parameters import PAPER, CrystalCacheParameters
from spec.records import TrunkGraph, Trunks


@st.composite
def graphs(draw: st.DrawFn) -> tuple[Text, Trunks]:
    """Draw edges and any partition into trunks, also partitions that S2 would not make."""
    text = draw(texts(), label="text")
    return text, draw(partitions(len(text.ends)), label="trunks")


def star(*weights: float) -> tuple[Text, Trunks]:
    """Return trunks of single tokens, of which trunk i + 1 has one edge to trunk 0."""
    n = len(weights) + 1
    intra: list[list[tuple[int, float]]] = [[], *([(0, w)] if w else [] for w in weights)]
    result = record([1.0] * n, intra, [[] for _ in range(n)], 8, 4)
    text = Text(result, np.ones(n), np.ones(n, dtype=np.bool_), replace(PAPER, tau_edge=0.0))
    return text, Trunks(np.arange(n + 1), np.ones(n))


def run(stages: CrystalStages, case: tuple[Text, Trunks]) -> TrunkGraph:
    text, trunks = case
    return stages.graph(text.coattention, trunks, text.parameters)


def D_of(stages: CrystalStages, degree: list[float], p: CrystalCacheParameters = PAPER) -> Vector:
    """Return D for the given degrees (at most 1). Each degree is that of a pair of trunks with one edge."""
    intra: list[list[tuple[int, float]]] = []
    for g, w in enumerate(degree):
        intra += [[(2 * g + 1, w)] if w else [], []]
    result = record([1.0] * len(intra), intra, [[] for _ in intra], 8, 4)
    trunks = Trunks(np.arange(len(intra) + 1), np.ones(len(intra)))
    return stages.graph(result, trunks, replace(p, tau_edge=0.0)).D[::2]


@pytest.mark.spec("CC-CRYSTALLIZATION", "CC-TRUNK-EDGES", "CC-TRUNK-WEIGHT", "CC-DEGREE")
@given(case=graphs())
def test_the_graph_equals_the_brute_force(stages: CrystalStages, case: tuple[Text, Trunks]) -> None:
    """S4 MUST compute Eq. 24 to 27 from given edges and trunks."""
    text, trunks = case
    assert not list(stage_checks.graph(run(stages, case), text.coattention, trunks, text.parameters))


@pytest.mark.spec("CC-TRUNK-WEIGHT", "CC-DEGREE")
@given(case=graphs())
def test_the_graph_is_symmetric_and_pruned(stages: CrystalStages, case: tuple[Text, Trunks]) -> None:
    """Check that W is symmetric with a zero diagonal and weights in (tau_edge, sqrt 2].

    Degrees satisfy 0 <= degree <= sqrt 2 (m - 1).
    """
    actual = run(stages, case)
    W = stage_checks.dense(actual)
    top = math.sqrt(2) * (1 + tolerances.gamma(8, "float64"))
    assert (W == W.T).all()
    assert not W.diagonal().any()
    assert (actual.weights > case[0].parameters.tau_edge).all()
    assert (actual.weights <= top).all()
    assert actual.degree.min() >= 0
    assert actual.degree.max() <= top * (len(W) - 1)


@pytest.mark.spec("CC-TRUNK-EDGES")
def test_a_mutual_pair_counts_twice(stages: CrystalStages) -> None:
    """Check that a mutual pair of single tokens has W = w sqrt 2, because the multiset is additive."""
    actual = record([1.0, 1.0], [[(1, 0.5)], [(0, 0.5)]], [[], []], 1, 1)
    W = stages.graph(actual, Trunks(np.arange(3), np.ones(2)), PAPER).weights
    assert tolerances.close("CC-TRUNK-WEIGHT", W, [0.5 * math.sqrt(2)] * 2)


@pytest.mark.spec("CC-TRUNK-EDGES")
def test_equal_weights_of_different_pairs_both_count(stages: CrystalStages) -> None:
    """Check that two edges of weight 1/2 between trunks of two tokens have density 2/4, not 1/4.

    Edges inside a trunk do not count.
    """
    intra = [[(1, 1.0), (2, 0.5)], [(3, 0.5)], [(3, 1.0)], []]
    actual = record([1.0] * 4, intra, [[] for _ in range(4)], 2, 1)
    W = stages.graph(actual, Trunks(np.array([0, 2, 4]), np.ones(2)), PAPER).weights
    assert tolerances.close("CC-TRUNK-WEIGHT", W, [0.5 * math.sqrt(0.5)] * 2)


@pytest.mark.spec("CC-TRUNK-WEIGHT")
@pytest.mark.parametrize(("tau_edge", "edges"), [(0.25, 0), (0.125, 2)])
def test_a_weight_must_exceed_tau_edge(stages: CrystalStages, tau_edge: float, edges: int) -> None:
    """Check that Eq. 25 is strict, so W = tau_edge is pruned.

    One edge of 1/2 between trunks of two tokens has W = 1/4.
    """
    actual = record([1.0] * 4, [[(2, 0.5)], [], [], []], [[] for _ in range(4)], 2, 1)
    graph = stages.graph(actual, Trunks(np.array([0, 2, 4]), np.ones(2)), replace(PAPER, tau_edge=tau_edge))
    assert len(graph.weights) == edges


@pytest.mark.spec("CC-TRUNK-WEIGHT")
@pytest.mark.parametrize(("near", "edges"), [(1 - 2.0**-30, 0), (1 + 2.0**-30, 2)])
@pytest.mark.parametrize("tau_edge", [0.05, 0.7])
def test_tau_edge_is_a_float64(stages: CrystalStages, tau_edge: float, near: float, edges: int) -> None:
    """Check an edge whose weight is closer to tau_edge than tau_edge rounded to float32.

    In float32, 0.05 is rounded up, and 0.7 is rounded down. W = w, because the trunks are single tokens.
    """
    text, trunks = star(tau_edge * near)
    actual = run(stages, (replace(text, parameters=replace(PAPER, tau_edge=tau_edge)), trunks))
    assert len(actual.weights) == edges


@pytest.mark.spec("CC-TRUNK-WEIGHT")
@given(case=graphs())
def test_no_edges_survive_above_the_largest_weight(stages: CrystalStages, case: tuple[Text, Trunks]) -> None:
    """Check that every degree is 0 and every D is 1/2 if tau_edge >= sqrt 2."""
    text, trunks = case
    actual = run(stages, (replace(text, parameters=replace(text.parameters, tau_edge=1.5)), trunks))
    assert actual.indptr.tolist() == [0] * (len(trunks.sizes) + 1)
    assert actual.degree.tolist() == [0.0] * len(trunks.sizes)
    assert actual.D.tolist() == [0.5] * len(trunks.sizes)


@pytest.mark.spec("CC-CRYSTALLIZATION")
@given(case=graphs())
def test_D_lies_in_the_unit_interval_and_follows_the_degree(
    stages: CrystalStages, case: tuple[Text, Trunks],
) -> None:
    """Check 0 <= D <= 1, and that D does not fall as the degree rises."""
    actual = run(stages, case)
    order = np.argsort(actual.degree, kind="stable")
    assert (np.diff(actual.D[order]) >= 0).all()
    assert actual.D.min() >= 0
    assert actual.D.max() <= 1


@pytest.mark.spec("CC-CRYSTALLIZATION")
@given(case=graphs())
def test_the_ablation_without_D_has_the_same_graph(stages: CrystalStages, case: tuple[Text, Trunks]) -> None:
    """Check the ablation of Table 10, M only: D = 0 after Eq. 27. Edges and degrees do not change, bit for bit."""
    text, trunks = case
    a = run(stages, case)
    b = run(stages, (replace(text, parameters=replace(text.parameters, graph="zero")), trunks))
    assert b.D.tolist() == [0.0] * len(trunks.sizes)
    assert (a.indptr.tolist(), a.indices.tolist(), a.weights.tolist(), a.degree.tolist()) == (
        b.indptr.tolist(), b.indices.tolist(), b.weights.tolist(), b.degree.tolist()
    )


@pytest.mark.spec("CC-CRYSTALLIZATION")
def test_the_standard_deviation_is_the_population_one(stages: CrystalStages) -> None:
    """Check that degrees (0, 1) have D (.0067, .9933), not (.0283, .9717)."""
    assert np.round(D_of(stages, [0.0, 1.0]), 4).tolist() == [0.0067, 0.9933]


@pytest.mark.spec("CC-CRYSTALLIZATION")
def test_a_vanishing_deviation_falls_back_to_1(stages: CrystalStages) -> None:
    """Check that degrees (0, 1e-9) have D (.5, .5), not (.438, .562)."""
    assert np.round(D_of(stages, [0.0, 1e-9]), 3).tolist() == [0.5, 0.5]
    assert D_of(stages, [0.0, 1e-7])[1] > 0.9


@pytest.mark.spec("CC-CRYSTALLIZATION")
def test_a_deviation_of_epsilon_stays(stages: CrystalStages) -> None:
    """Check that a deviation equal to epsilon is used, and that a deviation below epsilon is replaced by 1.

    Degrees (0, 1) have the deviation 1/2.
    """
    kept = replace(PAPER, epsilon=0.5)
    assert D_of(stages, [0.0, 1.0], kept).tolist() == D_of(stages, [0.0, 1.0]).tolist()
    fallen = replace(PAPER, epsilon=float(np.nextafter(0.5, 1)))
    assert np.round(D_of(stages, [0.0, 1.0], fallen), 4).tolist() == [0.0759, 0.9241]


@pytest.mark.spec("CC-CRYSTALLIZATION")
def test_one_trunk_and_equal_degrees_have_D_of_a_half(stages: CrystalStages) -> None:
    """Check that D is exactly 1/2 for one trunk and for three equal degrees."""
    actual = record([1.0, 1.0], [[(1, 1.0)], []], [[], []], 8, 4)
    assert stages.graph(actual, Trunks(np.array([0, 2]), np.ones(1)), PAPER).D.tolist() == [0.5]
    assert D_of(stages, [0.75, 0.75, 0.75]).tolist() == [0.5] * 3


@pytest.mark.spec("CC-CRYSTALLIZATION")
@given(w=st.floats(0.05, 1), m=st.integers(1, 12))
def test_equal_degrees_have_D_of_a_half(stages: CrystalStages, w: float, m: int) -> None:
    """Check D = 1/2: exactly for one trunk, otherwise within the bound, because the mean of equal numbers may round."""
    slack = 0 if m == 1 else tolerances.crystallization_radius(np.full(m, w), PAPER.s, PAPER.epsilon)
    assert np.abs(D_of(stages, [w] * m) - 0.5).max() <= slack


@pytest.mark.spec("CC-CRYSTALLIZATION")
@given(eighths=st.lists(st.integers(0, 8), min_size=2, max_size=9))
def test_D_ignores_the_scale_of_degrees(stages: CrystalStages, eighths: list[int]) -> None:
    """Check D(a deg) = D(deg) for a power of two, for which both are exactly equal."""
    degree = [x / 8 for x in eighths]
    assert D_of(stages, degree).tolist() == D_of(stages, [x / 2 for x in degree]).tolist()


@pytest.mark.spec("CC-CRYSTALLIZATION")
@given(eighths=st.lists(st.integers(0, 8), min_size=1, max_size=9), data=st.data())
def test_D_does_not_fall_with_its_own_degree(
    stages: CrystalStages, eighths: list[int], data: st.DataObject,
) -> None:
    """Check that D of a trunk does not fall as its degree rises and all other degrees are fixed.

    The effect on D of other trunks is not specified (FC8).
    """
    at = data.draw(st.integers(0, len(eighths) - 1), label="trunk")
    raised = [x / 8 for x in eighths]
    raised[at] = data.draw(st.integers(eighths[at], 8), label="raised eighths") / 8
    pairs = np.repeat(np.array(raised), 2)
    slack = tolerances.crystallization_radius(pairs, PAPER.s, PAPER.epsilon) * 2
    assert D_of(stages, raised)[at] >= D_of(stages, [x / 8 for x in eighths])[at] - slack


@pytest.mark.spec("CC-CRYSTALLIZATION")
def test_a_steep_logistic_does_not_overflow(stages: CrystalStages) -> None:
    """Check |s z| of several hundreds."""
    D = D_of(stages, [1.0, *[0.0] * 60], replace(PAPER, s=400.0))
    assert D[0] == 1
    assert (D[1:] < 1e-10).all()
    far_below = D_of(stages, [0.0, *[1.0] * 60], replace(PAPER, s=93.0))[:2]
    assert (far_below > 0).all(), "exp(720) is infinite, exp(-720) is not 0"


@pytest.mark.spec("CC-DEGREE")
def test_degrees_add_the_surviving_weights(stages: CrystalStages) -> None:
    """Check Eq. 26 exactly for a star of single tokens."""
    actual = run(stages, star(0.5, 0.25, 0.0, 1.0))
    assert actual.degree.tolist() == [1.75, 0.5, 0.25, 0.0, 1.0]
    assert actual.indices.tolist() == [1, 2, 4, 0, 0, 0]
    assert actual.indptr.tolist() == [0, 3, 4, 5, 5, 6]


@pytest.mark.spec("CC-TRUNK-EDGES")
@pytest.mark.parametrize("weights", [(0.1, 0.2, 0.3), (0.3, 0.2, 0.1)])
def test_weights_are_added_in_the_order_of_E(stages: CrystalStages, weights: tuple[float, float, float]) -> None:
    """Check that W is the mean of three edges to token 0, bit for bit, because the density is 1."""
    actual = record([1.0] * 4, [[], *([(0, w)] for w in weights)], [[] for _ in range(4)], 8, 4)
    W = stages.graph(actual, Trunks(np.array([0, 1, 4]), np.ones(2)), PAPER).weights
    assert W.tolist() == [(weights[0] + weights[1] + weights[2]) / 3] * 2


@pytest.mark.spec("CC-DEGREE")
@pytest.mark.parametrize("m", [17, 150, 200])
def test_a_degree_is_added_from_the_left(stages: CrystalStages, m: int) -> None:
    """Check that the weights of a hub are added by ascending neighbour.

    For m = 150, a different order has different last bits.
    """
    actual = run(stages, star(*(0.1 + 0.8 * Numbers(m).fractions(m)).tolist()))
    row = actual.weights[: actual.indptr[1]]
    assert actual.degree[0] == np.cumsum(row)[-1]
    assert m != 150 or np.cumsum(row)[-1] not in (np.sum(row), np.cumsum(row[::-1])[-1])


@pytest.mark.spec("CC-CRYSTALLIZATION")
def test_degrees_that_are_close_have_a_spread(stages: CrystalStages) -> None:
    """Check twelve linked trunks whose degrees are about 9.9 and differ by 1e-6.

    Moments computed in one pass give a wrong sigma.
    """
    n = 12
    rows = [[(j, 0.9 + 1e-7 * (i + j)) for j in range(n) if j != i] for i in range(n)]
    S1 = record([1.0] * n, [sorted(row, key=lambda edge: -edge[1]) for row in rows], [[]] * n, n, 1)
    p = replace(PAPER, k_intra=n, k_cross=1)
    text, trunks = Text(S1, np.ones(n), np.ones(n, dtype=np.bool_), p), Trunks(np.arange(n + 1), np.ones(n))
    actual = run(stages, (text, trunks))
    assert tolerances.crystallization_radius(actual.degree, p.s, p.epsilon) < 1e-6
    assert not list(stage_checks.graph(actual, S1, trunks, p))
