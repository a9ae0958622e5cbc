"""Decode: key norms, activation, pulses and the Hebbian update."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance import tolerances
from conformance.checks.refusals import refused
from conformance.oracles import decode
from conformance.oracles.decode import Model, Trunk
from conformance.strategies.close_numbers import TYPES, of_type
from conformance.strategies.decoding import csr_of_matrix, decode_parameters, flags, graphs, inverse_norms, sixteenths
from conformance.strategies.scale_numbers import Numbers
from conformance.vectors.models import csr_of, pairs_of
from conformance.vectors.subject_decode import weights_of
from spec.arrays import BoolVector, Vector
from spec.backend import BreathStages
from spec.decode import LiveTrunks, TrunkWeights
from spec.parameters import PAPER, CrystalCacheParameters


@st.composite
def keys(draw: st.DrawFn) -> Any:
    """Keys of any floating type, some of them zero in one head or in all."""
    H, n, d = (draw(st.integers(1, most), label=name) for name, most in (("H_kv", 3), ("n", 6), ("d", 5)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1), label="seed"))
    k = rng.standard_normal((H, n, d)) * draw(st.sampled_from([1.0, 1e-4, 100.0]), label="length")
    for i in draw(st.lists(st.integers(0, n - 1), max_size=2), label="zero tokens"):
        k[: draw(st.integers(1, H), label="zero heads"), i] = 0
    return k.astype(draw(st.sampled_from([np.float32, np.float64, np.float16, np.longdouble]), label="type"))


def table(sizes: list[int], norms: Vector) -> LiveTrunks:
    offsets, n = np.cumsum([0, *sizes]).astype(np.int64), sum(sizes)
    return LiveTrunks(np.arange(n), offsets, np.ones(n), norms, np.ones(len(sizes)))


@st.composite
def tables(draw: st.DrawFn) -> LiveTrunks:
    sizes = draw(st.lists(st.integers(1, 4), max_size=6), label="sizes")
    return table(sizes, draw(inverse_norms(sum(sizes)), label="norms"))


def active_by_force(live: LiveTrunks, p: CrystalCacheParameters) -> list[bool]:
    groups = np.split(np.arange(len(live.positions)), live.offsets[1:-1]) if len(live.sizes) else []
    trunks = [Trunk(at, g.tolist(), 1.0, 0.0) for at, g in enumerate(groups)]
    names = decode.active(Model(0, trunks=trunks, norm=dict(enumerate(live.inverse_norms.tolist()))), p)
    return [g.name in names for g in trunks]


@pytest.mark.spec("CC-KEY-NORM")
@given(k=keys())
def test_inverse_norms_lie_in_their_bound(breath_stages: BreathStages, k: Any) -> None:
    """The mean over heads of 1 / ||k||, in float64 whatever the keys' type; infinite for a zero key."""
    found = breath_stages.inverse_key_norms(k)
    want = np.array([decode.inverse_norm(list(token)) for token in k.astype(np.float64).transpose(1, 0, 2).tolist()])
    assert found.dtype == np.float64
    assert np.isinf(found).tolist() == np.isinf(want).tolist()
    finite = np.isfinite(want)
    radius = tolerances.key_norm_error(len(k), k.shape[2]) * want[finite]
    assert (np.abs(found[finite] - want[finite]) <= radius).all()


@pytest.mark.spec("CC-KEY-NORM")
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("n", [1, 17, 1_025])
def test_keys_of_every_type_and_size(breath_stages: BreathStages, kind: str, n: int) -> None:
    """Each type holds these keys, and of some neither their squares nor their inverses."""
    k, _ = of_type(kind, n, (2, n, 4))
    want = (1 / np.sqrt((k.astype(np.float64) ** 2).sum(axis=2))).mean(axis=0)
    assert (np.abs(breath_stages.inverse_key_norms(k) - want) <= tolerances.key_norm_error(2, 4) * want).all()


@pytest.mark.spec("CC-KEY-NORM")
@pytest.mark.parametrize("size", [2.0**-990, 1e-200, 1e-162, 1e-160, 1e-150, 1e150, 1.3e154, 1e155, 1e200, 2.0**990])
def test_norms_whose_squares_float64_does_not_hold(breath_stages: BreathStages, size: float) -> None:
    """Beside a head of usual length, and with a channel that is as good as 0."""
    k = np.array([[[1.0, 0.7, 0.0, 1e-30], [-0.6, 0.0, 0.0, 0.8]], [[1.0, 0.0, 2.0, 0.0], [0.0, 0.0, 0.0, 0.0]]])
    k[0] *= size
    found, radius = breath_stages.inverse_key_norms(k), tolerances.key_norm_error(2, 4)
    want = (1 / (size * math.hypot(1.0, 0.7)) + 5**-0.5) / 2
    assert abs(found[0] - want) <= radius * want
    assert found[1] == np.inf
    alone = breath_stages.inverse_key_norms(k[:1])
    lengths = size * np.hypot(k[0, :, 0] / size, np.hypot(k[0, :, 1] / size, k[0, :, 3] / size))
    assert (np.abs(alone * lengths - 1) <= radius).all()


@pytest.mark.spec("CC-KEY-NORM")
def test_norms_beyond_the_bound_are_counted_as_small_and_large(breath_stages: BreathStages) -> None:
    found = breath_stages.inverse_key_norms(np.array([[[5e-324, 0.0], [2.0**-1022, 0.0], [1.7e308, 1.7e308]]]))
    assert (found[:2] >= 2.0**1000).all()
    assert 0 <= found[2] <= 2.0**-1000


@pytest.mark.spec("CC-KEY-NORM")
@pytest.mark.parametrize(
    "k", [np.ones((2, 3)), np.ones((1, 0, 2)), np.full((1, 1, 2), np.nan), np.ones((1, 1, 2), dtype=np.int64)]
)
def test_keys_that_are_none_are_refused(breath_stages: BreathStages, k: Any) -> None:
    with refused("k", k):
        breath_stages.inverse_key_norms(k)


@pytest.mark.spec("CC-KEY-NORM")
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("n", [1, 33, 257, 1_025])
def test_keys_that_are_not_finite_are_refused_anywhere(breath_stages: BreathStages, n: int, value: float) -> None:
    for place in (0, n, -1):
        k = np.zeros((2, n, 2))
        k.flat[place] = value
        with refused("k", k):
            breath_stages.inverse_key_norms(k)


@pytest.mark.spec("CC-KEY-NORM")
def test_the_mean_is_of_inverses(breath_stages: BreathStages) -> None:
    """Heads of norms (1, 9) are above heads of norms (3, 3)."""
    k = np.array([[[1.0], [3.0]], [[9.0], [3.0]]])
    assert breath_stages.inverse_key_norms(k).round(3).tolist() == [0.556, 0.333]


@pytest.mark.spec("CC-ETA", "CC-ACTIVATION")
@given(live=tables(), p=decode_parameters())
def test_active_means_more_than_half(breath_stages: BreathStages, live: LiveTrunks, p: CrystalCacheParameters) -> None:
    assert breath_stages.activation(live, p).tolist() == active_by_force(live, p)


@pytest.mark.spec("CC-ETA")
def test_a_zero_key_is_no_maximum(breath_stages: BreathStages) -> None:
    """It is above the threshold itself, and leaves the others' eta alone."""
    norms = np.array([np.inf, 1.0, 0.25])
    assert breath_stages.activation(table([1, 1, 1], norms), PAPER).tolist() == [True, True, False]


@pytest.mark.spec("CC-ETA")
def test_zero_keys_alone_are_all_active(breath_stages: BreathStages) -> None:
    """There is no finite value, and no maximum to divide by."""
    assert breath_stages.activation(table([2, 1], np.full(3, np.inf)), PAPER).tolist() == [True, True]


FORMS: list[Callable[[Vector, float, float], Any]] = [
    lambda x, top, theta: x > theta * top, lambda x, top, theta: x * (1 / top) > theta,
    lambda x, top, theta: np.exp(np.log(x) - np.log(top)) > theta,
]
"""Other ways to ask whether x / top > theta."""


@pytest.mark.spec("CC-ETA", "CC-ACTIVATION")
@pytest.mark.parametrize("theta", [0.3, 0.1, 0.7])
@pytest.mark.parametrize("size", [1.0, 2.0**-60, 1e-3, 1e9])
def test_a_quotient_is_compared(breath_stages: BreathStages, theta: float, size: float) -> None:
    """Norms about theta times the largest, where each other form is wrong of some."""
    for form in FORMS:
        told = 0
        for top in size * (1 + Numbers(17).fractions(400)):
            x = theta * top + np.spacing(theta * top) * np.arange(-2.0, 3.0)
            if (form(x, top, theta) != (x / top > theta)).any():
                told += 1
                live = table([1] * 6, np.append(x, top))
                found = breath_stages.activation(live, replace(PAPER, theta_act=theta))
                assert found.tolist() == [*(x / top > theta).tolist(), True]
            if told == 3:
                break
        assert told, "the inputs tell nothing"


@pytest.mark.spec("CC-ACTIVATION")
def test_the_reading_per_trunk_is_rejected(breath_stages: BreathStages) -> None:
    """eta = (0.2, 0.5) is one of two; its mean of 0.35 would be active. The third token sets the maximum."""
    live = table([2, 1], np.array([0.2, 0.5, 1.0]))
    assert breath_stages.activation(live, PAPER).tolist() == [False, True]


@pytest.mark.spec("CC-ACTIVATION")
@given(live=tables())
def test_nothing_is_active_at_theta_1(breath_stages: BreathStages, live: LiveTrunks) -> None:
    assert not breath_stages.activation(live, replace(PAPER, theta_act=1.0)).any()


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


@pytest.mark.spec("CC-PULSE", "CC-RAISE", "CC-RESONANCE")
@given(case=networks(), p=decode_parameters())
def test_resonance_is_the_searches_one_by_one(
    breath_stages: BreathStages, case: Network, p: CrystalCacheParameters,
) -> None:
    """To the bit, by ascending source."""
    assert breath_stages.resonance(*case, p).tolist() == by_force(case, p)


@pytest.mark.spec("CC-PULSE", "CC-RAISE", "CC-RESONANCE", "CC-HEBB")
@pytest.mark.parametrize("seed", range(12))
def test_products_are_rounded_in_the_stated_order(breath_stages: BreathStages, seed: int) -> None:
    """Weights, D and constants of all bits, where another order of the same products is another float."""
    rng, m = np.random.default_rng(seed), 9
    W = np.triu((rng.random((m, m)) < 0.5) * rng.uniform(0.3, 1.3, (m, m)), 1)
    case = rng.random(m), csr_of_matrix(W + W.T), rng.random(m) < 0.5
    p = replace(PAPER, gamma_hop=0.7, alpha_res=0.3, max_hops=4, eta_Hebb=0.07, gamma_decay=0.93, tau_pulse=0.01)
    assert breath_stages.resonance(*case, p).tolist() == by_force(case, p)
    names = list(range(m))
    want = decode.hebb(pairs_of(rows(case[1]), names), set(np.flatnonzero(case[2]).tolist()), p)
    assert rows(breath_stages.hebbian(case[1], case[2], p)) == csr_of(want, names)


@pytest.mark.spec("CC-PULSE")
@given(case=networks(), p=decode_parameters(), data=st.data())
def test_a_pulse_can_be_read_from_D(
    breath_stages: BreathStages, case: Network, p: CrystalCacheParameters, data: st.DataObject,
) -> None:
    """From D = 0 at alpha_res = 1, D is the pulse: 1 at the source, bounded, 0 or at least tau_pulse elsewhere."""
    D, W, _ = case
    if not len(D):
        return
    source = data.draw(st.integers(0, len(D) - 1), label="source")
    only = np.arange(len(D)) == source
    found = breath_stages.resonance(np.zeros(len(D)), W, only, replace(p, alpha_res=1.0))
    arrived = decode.pulses(source, pairs_of(rows(W), list(range(len(D)))), p)
    assert found.tolist() == [min(1.0, arrived.get(g, 0.0)) for g in range(len(D))]
    assert found[source] == 1
    elsewhere = found[~only]
    assert ((elsewhere == 0) | (elsewhere >= p.tau_pulse)).all()
    assert (elsewhere <= max(1.0, W.weights.max(initial=0.0) * p.gamma_hop) ** max(1, p.max_hops)).all()


@pytest.mark.spec("CC-PULSE")
def test_a_pulse_goes_no_further_than_max_hops(breath_stages: BreathStages) -> None:
    """A chain of five at weight 1: two hops at the default."""
    W = TrunkWeights(np.array([0, 1, 3, 5, 7, 8]), np.array([1, 0, 2, 1, 3, 2, 4, 3]), np.ones(8))
    first = np.arange(5) == 0
    p = replace(PAPER, alpha_res=1.0)
    assert breath_stages.resonance(np.zeros(5), W, first, p).tolist() == [1.0, 0.5, 0.25, 0.0, 0.0]
    assert breath_stages.resonance(np.zeros(5), W, first, replace(p, max_hops=0)).tolist() == [1.0, 0, 0, 0, 0]


@pytest.mark.spec("CC-PULSE")
def test_an_isolated_source_is_renewed(breath_stages: BreathStages) -> None:
    """D = 0.2 becomes 0.32."""
    alone = TrunkWeights(np.array([0, 0]), np.empty(0, dtype=np.int64), np.empty(0))
    assert breath_stages.resonance(np.array([0.2]), alone, np.array([True]), PAPER).round(12).tolist() == [0.32]


@pytest.mark.spec("CC-PULSE")
def test_the_strongest_way_in_counts(breath_stages: BreathStages) -> None:
    """s-a 0.8, a-t 0.5; s-b 0.4, b-t 0.9: t receives 0.10, not 0.09 and not 0.19; whichever is found first."""
    for a, b in ((1, 2), (2, 1)):
        W = np.zeros((4, 4))
        for x, y, w in ((0, a, 0.8), (a, 3, 0.5), (0, b, 0.4), (b, 3, 0.9)):
            W[x, y] = W[y, x] = w
        found = breath_stages.resonance(np.zeros(4), csr_of_matrix(W), np.arange(4) == 0, replace(PAPER, alpha_res=1.0))
        assert round(float(found[3]), 12) == 0.1


@pytest.mark.spec("CC-PULSE", "CC-RESONANCE")
@pytest.mark.parametrize("m", [130, 258, 520])
def test_hundreds_of_trunks_send_and_are_reached(breath_stages: BreathStages, m: int) -> None:
    """The last trunk is reached from the first and from the 256th, all but the last hundred send; and a star."""
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


@pytest.mark.spec("CC-ACTIVATION")
@pytest.mark.parametrize("half", [128, 256, 2**15, 2**16])
def test_active_members_are_counted_to_the_last(breath_stages: BreathStages, half: int) -> None:
    """Half of a trunk's tokens are not more than half; one more are."""
    norms = np.where(np.arange(4 * half + 1) < half, 1.0, 0.1)
    norms[2 * half :][: half + 1] = 1.0
    live = table([2 * half, 2 * half, 1], norms)
    assert breath_stages.activation(live, PAPER).tolist() == [False, True, False]


@pytest.mark.spec("CC-PULSE")
def test_a_pulse_below_tau_marks_nobody(breath_stages: BreathStages) -> None:
    """The direct edge is too weak, so the way round arrives a hop later."""
    W = np.array([[0.0, 1.0, 0.125], [1.0, 0.0, 1.0], [0.125, 1.0, 0.0]])
    p = replace(PAPER, alpha_res=1.0, tau_pulse=0.125)
    assert breath_stages.resonance(np.zeros(3), csr_of_matrix(W), np.arange(3) == 0, p).tolist() == [1.0, 0.5, 0.25]


@pytest.mark.spec("CC-RAISE")
@given(D=st.integers(1, 8).flatmap(sixteenths), p=decode_parameters())
def test_without_edges_a_pulse_is_a_share_of_what_is_missing(
    breath_stages: BreathStages, D: Vector, p: CrystalCacheParameters,
) -> None:
    """D + alpha_res (1 - D), for every active trunk."""
    m = len(D)
    alone = TrunkWeights(np.zeros(m + 1, dtype=np.int64), np.empty(0, dtype=np.int64), np.empty(0))
    found = breath_stages.resonance(D, alone, np.ones(m, dtype=np.bool_), p)
    assert found.tolist() == [decode.raise_D(x, 1.0, p) for x in D.tolist()]


@pytest.mark.spec("CC-RAISE")
@given(case=networks(), p=decode_parameters())
def test_D_rises_and_stays_below_one(
    breath_stages: BreathStages, case: Network, p: CrystalCacheParameters,
) -> None:
    """D <= D' <= 1; the input is not changed; alpha_res = 0 changes nothing."""
    before = case[0].copy()
    found = breath_stages.resonance(*case, p)
    assert ((found >= before) & (found <= 1)).all()
    assert case[0].tolist() == before.tolist()
    assert breath_stages.resonance(*case, replace(p, alpha_res=0.0)).tolist() == before.tolist()


@pytest.mark.spec("CC-RESONANCE")
@given(case=networks(), p=decode_parameters(), data=st.data())
def test_the_order_of_trunks_says_nothing(
    breath_stages: BreathStages, case: Network, p: CrystalCacheParameters, data: st.DataObject,
) -> None:
    """Permuted trunks have the permuted D, up to the rounding of Eq. 38 in another order."""
    D, W, active = case
    m = len(D)
    places = data.draw(st.permutations(range(m)), label="places")
    names = list(range(m))
    pairs = {frozenset({places[a] for a in pair}): w for pair, w in pairs_of(rows(W), names).items()}
    csr, there = weights_of(csr_of(pairs, names)), np.argsort(places)
    found = breath_stages.resonance(D[there], csr, active[there], p)
    assert tolerances.close("CC-STEP", found, breath_stages.resonance(*case, p)[there])


@pytest.mark.spec("CC-RESONANCE")
def test_each_pulse_counts(breath_stages: BreathStages) -> None:
    """Two sources of p = 0.5 raise D = 0 to 0.1444, the strongest alone would give 0.075."""
    W = TrunkWeights(np.array([0, 1, 3, 4]), np.array([1, 0, 2, 1]), np.ones(4))
    found = breath_stages.resonance(np.zeros(3), W, np.array([True, False, True]), replace(PAPER, max_hops=1))
    assert found.round(6).tolist() == [0.15, 0.144375, 0.15]


@pytest.mark.spec("CC-HEBB")
@given(case=networks(), p=decode_parameters())
def test_edges_grow_together_and_fade_apart(
    breath_stages: BreathStages, case: Network, p: CrystalCacheParameters,
) -> None:
    """To the bit; W stays symmetric, above tau_edge, without new edges, and the input is not changed."""
    _, W, active = case
    names = list(range(len(active)))
    before = rows(W)
    found = breath_stages.hebbian(W, active, p)
    together = set(np.flatnonzero(active).tolist())
    assert rows(found) == csr_of(decode.hebb(pairs_of(before, names), together, p), names)
    assert rows(W) == before
    assert (found.weights > p.tau_edge).all() or p.hebb == "static"


@pytest.mark.spec("CC-HEBB")
@given(case=networks())
def test_no_growth_and_no_decay_is_the_static_graph(breath_stages: BreathStages, case: Network) -> None:
    """While no weight exceeds 1; and the static graph is W itself."""
    _, W, active = case
    low = W._replace(weights=np.minimum(W.weights, 1.0))
    still = replace(PAPER, eta_Hebb=0.0, gamma_decay=1.0)
    assert rows(breath_stages.hebbian(low, active, still)) == rows(low)
    assert rows(breath_stages.hebbian(W, active, replace(PAPER, hebb="static"))) == rows(W)


@pytest.mark.spec("CC-HEBB")
def test_two_active_trunks_without_an_edge_stay_apart(breath_stages: BreathStages) -> None:
    alone = TrunkWeights(np.zeros(3, dtype=np.int64), np.empty(0, dtype=np.int64), np.empty(0))
    assert not len(breath_stages.hebbian(alone, np.ones(2, dtype=np.bool_), PAPER).weights)


@pytest.mark.spec("CC-HEBB")
def test_an_edge_that_decays_to_tau_is_pruned(breath_stages: BreathStages) -> None:
    """Strict, as Eq. 25: 0.5 * 0.25 is 0.125."""
    W = TrunkWeights(np.array([0, 1, 2]), np.array([1, 0]), np.full(2, 0.25))
    p = replace(PAPER, gamma_decay=0.5, tau_edge=0.125)
    assert not len(breath_stages.hebbian(W, np.array([False, True]), p).weights)


@pytest.mark.spec("CC-HEBB")
def test_an_idle_edge_dies_in_299_breaths(breath_stages: BreathStages) -> None:
    """0.99 ^ 299 is the first power below 0.05."""
    W = TrunkWeights(np.array([0, 1, 2]), np.array([1, 0]), np.ones(2))
    idle = np.zeros(2, dtype=np.bool_)
    for _ in range(298):
        W = breath_stages.hebbian(W, idle, PAPER)
    assert len(W.weights) == 2
    assert not len(breath_stages.hebbian(W, idle, PAPER).weights)


@pytest.mark.spec("CC-PULSE", "CC-RESONANCE")
@pytest.mark.parametrize("hops", [1, 2, 3])
def test_a_pulse_at_the_threshold_arrives(breath_stages: BreathStages, hops: int) -> None:
    """Along a chain that halves and halves again, tau_pulse is the pulse of the last hop, or the float above it."""
    W = csr_of_matrix(0.5 * (np.eye(6, k=1) + np.eye(6, k=-1)))
    for tau, reached in ((0.25**hops, hops), (float(np.nextafter(0.25**hops, 1)), hops - 1)):
        p = replace(PAPER, max_hops=5, gamma_hop=0.5, tau_pulse=tau, alpha_res=0.5)
        D = breath_stages.resonance(np.zeros(6), W, np.arange(6) == 0, p)
        assert np.flatnonzero(D).tolist() == list(range(reached + 1))


@pytest.mark.spec("CC-KEY-NORM", "CC-ETA")
@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_a_key_of_negative_zeros_is_zero(breath_stages: BreathStages, kind: type) -> None:
    """Of one head or of all: its inverse norm is infinite."""
    k: Any = np.ones((2, 4, 3), dtype=kind)
    k[:, 1], k[1, 2] = -0.0, -0.0
    assert np.isinf(breath_stages.inverse_key_norms(k)).tolist() == [False, True, True, False]


@pytest.mark.spec("CC-SEGMENT-D")
def test_degrees_of_all_trunks_that_are_close_have_a_spread(breath_stages: BreathStages) -> None:
    """About 1 000 and a thousandth apart, where moments in one pass leave nothing of sigma."""
    degree = 1_000 + np.arange(9) / 1024
    radius = tolerances.crystallization_radius(degree, PAPER.s, PAPER.epsilon)
    assert radius < 1e-6
    z = (degree - degree.mean()) / degree.std()
    found = breath_stages.segment_crystallization(degree, 2, PAPER)
    assert (np.abs(found - 1 / (1 + np.exp(-PAPER.s * z[2:]))) <= radius).all()


@pytest.mark.spec("CC-DECAY", "CC-ACTIVATION", "CC-RESONANCE", "CC-HEBB")
def test_the_number_of_calls_says_nothing(breath_stages: BreathStages, every: int) -> None:
    """6 000 steps with their breaths: what is counted inside a stage must not end."""
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
