"""Tests of decode: pulses, the Hebbian update and the crystallization of a segment."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance import tolerances
from conformance.oracles import decode
from conformance.oracles.decode import Model, Trunk
from conformance.strategies.trunks import csr_of_matrix, decode_parameters, flags, graphs, sixteenths
from conformance.suite.test_activation import table
from conformance.vectors.codec import csr_of, pairs_of
from spec.arrays import BoolVector, Vector
from spec.backend import BreathStages
from spec.decode import TrunkWeights
from spec.parameters import PAPER, CrystalCacheParameters


@st.composite
def networks(draw: st.DrawFn) -> tuple[Vector, TrunkWeights, BoolVector]:
    m = draw(st.integers(0, 7), label="m")
    return draw(sixteenths(m), label="D"), draw(graphs(m), label="W"), draw(flags(m), label="active")


Network = tuple[Vector, TrunkWeights, BoolVector]


def by_force(case: Network, p: CrystalCacheParameters) -> list[float]:
    D, W, active = case
    names = list(range(len(D)))
    now = Model(0, trunks=[Trunk(g, [g], 1.0, x) for g, x in enumerate(D.tolist())], W=pairs_of(rows(W), names))
    decode.resonance(now, set(np.flatnonzero(active).tolist()), p)
    return [g.D for g in now.trunks]


def rows(W: TrunkWeights) -> dict[str, Any]:
    return {name: array.tolist() for name, array in W._asdict().items()}


@pytest.mark.spec("CC-RESONANCE", "CC-PULSE", "CC-RAISE")
@given(case=networks(), p=decode_parameters())
def test_resonance_is_the_searches_one_by_one(
    breath_stages: BreathStages, case: Network, p: CrystalCacheParameters,
) -> None:
    """Check that resonance equals separate searches by ascending source, bit for bit."""
    assert breath_stages.resonance(*case, p).tolist() == by_force(case, p)


@pytest.mark.spec("CC-HEBB", "CC-RESONANCE", "CC-PULSE", "CC-RAISE")
@pytest.mark.parametrize("seed", range(12))
def test_products_are_rounded_in_the_stated_order(breath_stages: BreathStages, seed: int) -> None:
    """Check numbers that use all bits, for which a different order of the products has a different result."""
    rng, m = np.random.default_rng(seed), 9
    W = np.triu((rng.random((m, m)) < 0.5) * rng.uniform(0.3, 1.3, (m, m)), 1)
    case = rng.random(m), csr_of_matrix(W + W.T), rng.random(m) < 0.5
    p = replace(PAPER, gamma_hop=0.7, alpha_res=0.3, max_hops=4, eta_Hebb=0.07, gamma_decay=0.93, tau_pulse=0.01)
    assert breath_stages.resonance(*case, p).tolist() == by_force(case, p)
    names = list(range(m))
    want = decode.hebb(pairs_of(rows(case[1]), names), set(np.flatnonzero(case[2]).tolist()), p)
    assert rows(breath_stages.hebbian(case[1], case[2], p)) == csr_of(want, names)


@pytest.mark.spec("CC-PULSE", "CC-RESONANCE")
@pytest.mark.parametrize("m", [130, 258, 520])
def test_hundreds_of_trunks_send_and_are_reached(breath_stages: BreathStages, m: int) -> None:
    """Check hundreds of trunks: the first and the 256th send to the last, and all but the last hundred are active.

    Also check a star.
    """
    pairs = np.zeros((m, m))
    pairs[0, m - 1] = pairs[min(255, m - 2), m - 1] = 0.9
    W, active = csr_of_matrix(pairs + pairs.T), np.arange(m) < m - 100
    case = np.linspace(0, 1, m) / 2, W, active
    assert breath_stages.resonance(*case, PAPER).tolist() == by_force(case, PAPER)
    star = np.zeros((m, m))
    star[0, 1:], star[1, 2] = 0.9, 0.75
    case = np.full(m, 0.1), csr_of_matrix(star + star.T), np.arange(m) == 1
    for hops in (1, 2):
        p = replace(PAPER, max_hops=hops)
        assert breath_stages.resonance(*case, p).tolist() == by_force(case, p)


@pytest.mark.spec("CC-PULSE")
def test_a_pulse_below_tau_marks_nobody(breath_stages: BreathStages) -> None:
    """Check a pulse that arrives one hop later over two edges, because the direct edge is too weak."""
    W = np.array([[0.0, 1.0, 0.125], [1.0, 0.0, 1.0], [0.125, 1.0, 0.0]])
    p = replace(PAPER, alpha_res=1.0, tau_pulse=0.125)
    assert breath_stages.resonance(np.zeros(3), csr_of_matrix(W), np.arange(3) == 0, p).tolist() == [1.0, 0.5, 0.25]


@pytest.mark.spec("CC-HEBB")
@given(case=networks(), p=decode_parameters())
def test_edges_grow_together_and_fade_apart(
    breath_stages: BreathStages, case: Network, p: CrystalCacheParameters,
) -> None:
    """Check the update bit for bit. All weights are above tau_edge, and the input is not changed."""
    _, W, active = case
    names = list(range(len(active)))
    before = rows(W)
    actual = breath_stages.hebbian(W, active, p)
    together = set(np.flatnonzero(active).tolist())
    assert rows(actual) == csr_of(decode.hebb(pairs_of(before, names), together, p), names)
    assert rows(W) == before
    assert (actual.weights > p.tau_edge).all() or p.hebb == "static"


@pytest.mark.spec("CC-HEBB")
def test_an_edge_that_decays_to_tau_is_pruned(breath_stages: BreathStages) -> None:
    """Check that the comparison with tau_edge is strict, as in Eq. 25: 0.5 * 0.25 is 0.125."""
    W = TrunkWeights(np.array([0, 1, 2]), np.array([1, 0]), np.full(2, 0.25))
    p = replace(PAPER, gamma_decay=0.5, tau_edge=0.125)
    assert not len(breath_stages.hebbian(W, np.array([False, True]), p).weights)


@pytest.mark.spec("CC-HEBB")
def test_an_idle_edge_dies_in_299_breaths(breath_stages: BreathStages) -> None:
    """Check that an idle edge is removed at breath 299, because 0.99 ^ 299 is the first power below 0.05."""
    W = TrunkWeights(np.array([0, 1, 2]), np.array([1, 0]), np.ones(2))
    idle = np.zeros(2, dtype=np.bool_)
    for _ in range(298):
        W = breath_stages.hebbian(W, idle, PAPER)
    assert len(W.weights) == 2
    assert not len(breath_stages.hebbian(W, idle, PAPER).weights)


@pytest.mark.spec("CC-PULSE", "CC-RESONANCE")
@pytest.mark.parametrize("hops", [1, 2, 3])
def test_a_pulse_at_the_threshold_arrives(breath_stages: BreathStages, hops: int) -> None:
    """Check that the last pulse of a chain arrives if tau_pulse equals it, and not if tau_pulse is the next float.

    Each hop multiplies the pulse by 0.25.
    """
    W = csr_of_matrix(0.5 * (np.eye(6, k=1) + np.eye(6, k=-1)))
    for tau, reached in ((0.25**hops, hops), (float(np.nextafter(0.25**hops, 1)), hops - 1)):
        p = replace(PAPER, max_hops=5, gamma_hop=0.5, tau_pulse=tau, alpha_res=0.5)
        D = breath_stages.resonance(np.zeros(6), W, np.arange(6) == 0, p)
        assert np.flatnonzero(D).tolist() == list(range(reached + 1))


@pytest.mark.spec("CC-SEGMENT-D")
def test_degrees_of_all_trunks_that_are_close_have_a_spread(breath_stages: BreathStages) -> None:
    """Check degrees near 1 000 that differ by a thousandth. Moments computed in one pass give a wrong sigma."""
    degree = 1_000 + np.arange(9) / 1024
    radius = tolerances.crystallization_radius(degree, PAPER.s, PAPER.epsilon)
    assert radius < 1e-6
    z = (degree - degree.mean()) / degree.std()
    actual = breath_stages.segment_crystallization(degree, 2, PAPER)
    assert (np.abs(actual - 1 / (1 + np.exp(-PAPER.s * z[2:]))) <= radius).all()


@pytest.mark.spec("CC-DECAY", "CC-ACTIVATION", "CC-RESONANCE", "CC-HEBB")
def test_the_number_of_calls_says_nothing(breath_stages: BreathStages, every: int) -> None:
    """Check that 6 000 calls have equal results, so that no counter inside a stage overflows."""
    W, live = csr_of_matrix(np.array([[0.0, 0.5], [0.5, 0.0]])), table([1, 1], np.array([1.0, 0.5]))
    D, active = np.array([0.5, 0.25]), np.array([True, False])

    def results() -> list[list[Any]]:
        return [
            breath_stages.decay(D, D, PAPER).tolist(), breath_stages.activation(live, PAPER).tolist(),
            breath_stages.resonance(D, W, active, PAPER).tolist(),
            breath_stages.hebbian(W, active, PAPER).weights.tolist(),
        ]

    first = results()
    for _ in range(0, 6_000, every):
        assert results() == first
