"""Tests of decode at full size: wide trunks, long chains, hubs, far positions and long sequences."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from conformance import tolerances
from conformance.checks import decode_checks
from conformance.oracles.scale import decode as oracle
from conformance.oracles.scale import stages
from conformance.strategies.numbers import Numbers
from conformance.strategies.scale_attention import Shape, addressed
from conformance.strategies.scale_tables import FAR_IDS, Lists, csr, lists, network, state_at
from reference.crystalcache.breath import breath, decode_step
from reference.crystalcache.segments import extend
from spec.arrays import IntVector, Vector
from spec.backend import Backend, BreathStages
from spec.decode import DecodeState, LiveTrunks, TrunkWeights
from spec.parameters import PAPER, CrystalCacheParameters

pytestmark = pytest.mark.usefixtures("compiled")

SIZES = [15, 16, 17, 31, 32, 33, 40, 41, 63, 65, 127, 129, 255, 257, 1_023, 1_025, 65_535, 65_537, 100_000]


@pytest.mark.spec("CC-KEY-NORM")
@pytest.mark.parametrize(("H_kv", "n", "d"), [
    (1, 70_000, 8), (3, 1_025, 96), (5, 300, 80), (8, 5_000, 128), (16, 1_100, 64), (17, 65, 33), (32, 257, 128),
    (40, 130, 256), (2, 33, 1_025),
])
@pytest.mark.parametrize("kind", [np.float32, np.float16, np.float64])
def test_norms_of_every_head_and_channel(breath_stages: BreathStages, H_kv: int, n: int, d: int, kind: type) -> None:
    """Check the norms of keys whose lengths differ by head and rise along the channels; some keys are zero.

    A backend that leaves out a head or a channel gives a different norm.
    """
    numbers = Numbers(H_kv * n + d)
    k = (numbers.fractions(H_kv * n * d).reshape(H_kv, n, d) - 0.5) * np.linspace(0.1, 4, d) ** 2
    k *= np.linspace(0.5, 2, H_kv)[:, None, None]
    k[-1, n - 2] = 0.0
    k = k.astype(kind)
    actual, want = breath_stages.inverse_key_norms(k), oracle.inverse_norms(k)
    assert np.isinf(actual).tolist() == np.isinf(want).tolist()
    there = np.isfinite(want)
    assert (np.abs(actual[there] - want[there]) <= tolerances.key_norm_error(H_kv, d) * want[there]).all()


def table(sizes: IntVector, norms: Vector) -> LiveTrunks:
    n = int(sizes.sum())
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return LiveTrunks(2**33 + np.arange(n), offsets, np.ones(n), norms, np.ones(len(sizes)))


@pytest.mark.spec("CC-ACTIVATION")
@pytest.mark.parametrize("size", SIZES)
def test_more_than_half_of_a_wide_trunk(breath_stages: BreathStages, size: int) -> None:
    """Check the activation of six trunks of one size that have different numbers of members above theta_act.

    The six trunks have these numbers of members above theta_act: half, half plus one, all but one, one, none, and half
    rounded up. These members are the last members of the trunk.
    """
    above = [size // 2, size // 2 + 1, size - 1, 1, 0, (size + 1) // 2]
    norms = np.concatenate([np.repeat([0.1, 0.9], [size - a, a]) for a in above])
    norms[-1] = 1.0
    live = table(np.full(6, size), norms)
    actual = breath_stages.activation(live, PAPER)
    assert actual.tolist() == oracle.activation(norms, live.offsets, PAPER.theta_act).tolist()
    assert actual.tolist()[:4] == [False, True, True, size == 1]


@pytest.mark.spec("CC-ACTIVATION")
@pytest.mark.parametrize("m", SIZES)
def test_activation_of_many_trunks(breath_stages: BreathStages, m: int) -> None:
    numbers = Numbers(m)
    sizes = numbers.integers(1, 6, m)
    norms = numbers.fractions(int(sizes.sum()))
    live = table(sizes, norms)
    assert np.array_equal(breath_stages.activation(live, PAPER), oracle.activation(norms, live.offsets, 0.3))


@pytest.mark.spec("CC-ETA")
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("at", ["first", "last"])
def test_the_largest_norm_anywhere(breath_stages: BreathStages, n: int, at: str) -> None:
    """Check that all norms are divided by the largest norm, at any place.

    All tokens have the norm 1/2, except one. If this token has the norm 2, the quotient 0.25 is not above 0.3. If it
    has the norm 1, the quotient 0.5 is above 0.3.
    """
    for top, others in ((2.0, False), (1.0, True)):
        norms = np.full(n, 0.5)
        norms[0 if at == "first" else -1] = top
        actual = breath_stages.activation(table(np.ones(n, dtype=np.int64), norms), PAPER)
        assert actual.sum() == (n if others else 1)


@pytest.mark.spec("CC-ETA")
@pytest.mark.parametrize("n", SIZES)
def test_one_finite_norm_among_zero_keys(breath_stages: BreathStages, n: int) -> None:
    """Check that the only finite norm is the maximum at any place: its eta is 1, and the eta of a zero key is 1."""
    for place in (0, n // 2, n - 1):
        norms = np.full(n, np.inf)
        norms[place] = 1e-3
        assert breath_stages.activation(table(np.ones(n, dtype=np.int64), norms), PAPER).all()
    none = np.full(n, np.inf)
    assert breath_stages.activation(table(np.ones(n, dtype=np.int64), none), PAPER).all()


@dataclass(frozen=True)
class Net:
    """Graph with the distance between active trunks and the number of hops of a pulse."""

    name: str
    W: Callable[[], TrunkWeights]
    active: int
    hops: int
    gamma: float = 0.5

    def __str__(self) -> str:
        return self.name


def chain(m: int) -> TrunkWeights:
    return csr(m, np.arange(m - 1), np.arange(1, m), np.full(m - 1, 1.0))


def star(m: int, at: int) -> TrunkWeights:
    others = np.delete(np.arange(m), at)
    w = 0.06 + 0.9 * Numbers(m).fractions(m - 1)
    return csr(m, np.minimum(others, at), np.maximum(others, at), w)


def ladder(m: int) -> TrunkWeights:
    """Return layers of three trunks, linked to all trunks of the next layer, so that several pulses arrive at a hop."""
    low = np.repeat(np.arange(m - 3), 3)
    high = low // 3 * 3 + 3 + np.tile(np.arange(3), m - 3)
    keep = high < m
    return csr(m, low[keep], high[keep], 0.3 + 0.7 * Numbers(m).fractions(int(keep.sum())))


NETS = [
    Net("paper", lambda: network(2_100, 6, 1), 7, 2),
    Net("four-hops", lambda: network(900, 3, 2), 40, 4),
    Net("chain-of-17-hops", lambda: chain(200), 60, 17, 1.0),
    Net("chain-of-300-hops", lambda: chain(400), 150, 300, 1.0),
    Net("hub-first", lambda: star(1_100, 0), 90, 3, 1.0),
    Net("hub-last", lambda: star(1_100, 1_099), 90, 3, 1.0),
    Net("layers", lambda: ladder(150), 30, 40, 0.98),
    Net("all-active", lambda: network(700, 4, 3), 1, 2),
    Net("more-trunks-than-2^16", lambda: network(70_000, 2, 4), 700, 3),
    Net("wide-rows", lambda: network(600, 150, 5), 9, 2, 0.9),
]


@pytest.mark.spec("CC-RESONANCE")
@pytest.mark.parametrize("net", NETS, ids=str)
def test_pulses_over_large_graphs(breath_stages: BreathStages, net: Net) -> None:
    """Check that D is exact, bit for bit, after the pulses of all sources in order."""
    W = net.W()
    m = len(W.indptr) - 1
    p = replace(PAPER, max_hops=net.hops, gamma_hop=net.gamma)
    D, active = Numbers(9).fractions(m) * 0.5, np.arange(m) % net.active == net.active - 1
    assert breath_stages.resonance(D, W, active, p).tolist() == oracle.resonance(D, W, active, p).tolist()


@pytest.mark.spec("CC-PULSE")
@pytest.mark.parametrize("hops", [1, 2, 3, 4, 5, 16, 17, 33, 65, 129, 257, 299])
def test_how_far_one_pulse_goes(breath_stages: BreathStages, hops: int) -> None:
    """Check that a pulse along a chain without loss reaches exactly `hops` trunks on either side of the source."""
    D = breath_stages.resonance(
        np.zeros(600), chain(600), np.arange(600) == 300, replace(PAPER, max_hops=hops, gamma_hop=1.0)
    )
    assert np.flatnonzero(D).tolist() == list(range(300 - hops, 300 + hops + 1))


@pytest.mark.spec("CC-PULSE")
@pytest.mark.parametrize("degree", [15, 16, 17, 33, 65, 129, 257, 1_025, 65_537])
def test_the_strongest_of_many_senders(breath_stages: BreathStages, degree: int) -> None:
    """Check that a trunk receives the strongest of `degree` pulses, which arrives over the last but one path."""
    m, middle = degree + 2, np.arange(1, degree + 1)
    first, second = np.full(degree, 0.5), np.full(degree, 0.25)
    second[-2] = 0.75
    low = np.concatenate([np.zeros(degree, dtype=np.int64), middle])
    high = np.concatenate([middle, np.full(degree, m - 1)])
    W = csr(m, low, high, np.concatenate([first, second]))
    p = replace(PAPER, gamma_hop=1.0, alpha_res=0.5)
    D = breath_stages.resonance(np.zeros(m), W, np.arange(m) == 0, p)
    assert (D[0], D[1], D[-1]) == (0.5, 0.25, 0.5 * 0.375)


@pytest.mark.spec("CC-RAISE")
@pytest.mark.parametrize("sources", [16, 17, 33, 65, 129, 257, 1_025])
def test_a_pulse_of_each_of_many_sources(breath_stages: BreathStages, sources: int) -> None:
    """Check that each active neighbour raises a hub once, in the order of the neighbours, bit for bit."""
    W = star(sources + 1, sources)
    active = np.arange(sources + 1) < sources
    p = replace(PAPER, max_hops=1)
    D = np.linspace(0.1, 0.4, sources + 1)
    assert breath_stages.resonance(D, W, active, p).tolist() == oracle.resonance(D, W, active, p).tolist()


@pytest.mark.spec("CC-HEBB")
@pytest.mark.parametrize("net", [net for net in NETS if not net.name.startswith("chain")], ids=str)
def test_the_update_of_large_graphs(breath_stages: BreathStages, net: Net) -> None:
    """Check that rows, columns and weights are exact, bit for bit. Edges at the threshold are removed."""
    W = net.W()
    m = len(W.indptr) - 1
    active = np.arange(m) % 2 == 0
    p = replace(PAPER, tau_edge=0.3, gamma_decay=0.9)
    for got, want in zip(breath_stages.hebbian(W, active, p), oracle.hebbian(W, active, p), strict=True):
        assert np.array_equal(got, want)


@pytest.mark.spec("CC-HEBB")
@pytest.mark.parametrize("m", [17, 33, 65, 257, 1_025, 65_537])
def test_the_prune_after_decay_is_strict_everywhere(breath_stages: BreathStages, m: int) -> None:
    """Check that exactly the edges whose weight decays to tau_edge are removed from a chain.

    Every third weight decays to tau_edge, all others to the next float. Between active trunks all weights end at 1.
    """
    w = np.where(np.arange(m - 1) % 3 == 0, 0.5, np.nextafter(0.5, 1))
    W = csr(m, np.arange(m - 1), np.arange(1, m), w)
    p = replace(PAPER, tau_edge=0.25, gamma_decay=0.5, eta_Hebb=0.75)
    decayed = breath_stages.hebbian(W, np.zeros(m, dtype=np.bool_), p)
    stays = np.flatnonzero(np.arange(m - 1) % 3)
    rows = np.repeat(np.arange(m), np.diff(decayed.indptr))
    assert rows[rows < decayed.indices].tolist() == stays.tolist()
    assert (breath_stages.hebbian(W, np.ones(m, dtype=np.bool_), p).weights == 1).all()


@pytest.mark.spec("CC-DECAY")
@pytest.mark.parametrize("m", SIZES)
def test_decay_of_many_trunks(breath_stages: BreathStages, m: int) -> None:
    numbers = Numbers(m)
    D, M_bar = numbers.fractions(m), 20 * numbers.fractions(m)
    want = np.maximum(0, D - PAPER.beta_0 * np.exp(-D * M_bar / PAPER.D_c) * D)
    assert (np.abs(breath_stages.decay(D, M_bar, PAPER) - want) <= tolerances.decay_radius(D)).all()


@dataclass(frozen=True)
class Segment:
    """Cache of `old` trunks with gaps, and a segment of n tokens in trunks of at most `largest` tokens."""

    name: str
    old: int
    n: int
    largest: int
    start: int

    def __str__(self) -> str:
        return self.name


SEGMENTS = [
    Segment("turn", 900, 3_000, 30, 60_000), Segment("first", 0, 2_000, 20, 0),
    Segment("tokens", 40_000, 30_000, 1, 50_000),
    Segment("far-2^24", 300, 900, 9, 2**24 + 1), Segment("far-2^31", 300, 900, 9, 2**31 - 450),
    Segment("far-2^32", 300, 900, 9, 2**32 + 3),
]


@pytest.mark.spec("CC-SEGMENT-GRAPH")
@pytest.mark.parametrize("case", SEGMENTS, ids=str)
def test_edges_to_older_trunks(breath_stages: BreathStages, case: Segment) -> None:
    """Check that weights between old trunks are exact, and that all new weights satisfy Eq. 25 on live sizes."""
    numbers = Numbers(case.n)
    behind = np.unique(1 + numbers.integers(0, max(1, min(case.start, 55_000)), case.old))
    old_bounds = case.start - behind[::-1]
    old = len(old_bounds)
    shape = Lists(case.n, 5, 4, 1024, case.start, near=False)
    given = lists(shape)
    if old:  # A third of the sources is in the old cache.
        gone = numbers.integers(0, 3, given.cross.size).reshape(given.cross.shape) == 0
        far = np.sort(old_bounds[numbers.integers(0, old, given.cross.size)].reshape(given.cross.shape), axis=1)
        given = replace(given, cross=np.where(gone & (given.cross >= 0), far, given.cross))
    drawn = 1 + numbers.integers(0, case.largest, case.n)
    sizes = drawn[: int(np.searchsorted(np.cumsum(drawn), case.n)) + 1].copy()
    sizes[-1] -= sizes.sum() - case.n
    bounds = np.concatenate([old_bounds, case.start + np.concatenate([[0], np.cumsum(sizes)])]).astype(np.int64)
    live = np.concatenate([1 + numbers.integers(0, 9, old), sizes])
    nothing = np.zeros(0, dtype=np.int64)
    W = network(old, 3, 8) if old else TrunkWeights(np.zeros(1, dtype=np.int64), nothing, np.zeros(0))
    p = replace(PAPER, k_intra=5, k_cross=4, tau_edge=0.01)
    actual = breath_stages.segment_graph(given, bounds, live, W, p)
    want, _ = oracle.segment_graph(stages.edge_columns(given), bounds, live, W, p)
    assert np.array_equal(actual.indptr, want[0])
    assert np.array_equal(actual.indices, want[1])
    rows = np.repeat(np.arange(len(live)), np.diff(want[0]))
    before = (rows < old) & (want[1] < old)
    assert np.array_equal(actual.weights[before], want[2][before])
    assert tolerances.close("CC-TRUNK-WEIGHT", actual.weights, want[2])


@pytest.mark.spec("CC-SEGMENT-D")
@pytest.mark.parametrize("m", SIZES)
def test_D_of_a_segment_behind_many_trunks(breath_stages: BreathStages, m: int) -> None:
    """Check that mean and deviation are those of all trunks, and that the stage returns only D of the new trunks."""
    degree = np.linspace(0.1, 3, m) ** 2
    old = m - min(m, 5)
    actual = breath_stages.segment_crystallization(degree, old, PAPER)
    radius = tolerances.crystallization_radius(degree, PAPER.s, PAPER.epsilon)
    assert (np.abs(actual - stages.crystallization(degree, PAPER)[old:]) <= radius).all()


ENDS = frozenset({7, 2**32 + 1})
QUIET = replace(PAPER, tau_edge=0.05, max_hops=4, gamma_hop=0.9, T_max=40, N_sink=4, W_recent=128)


@dataclass(frozen=True)
class Case:
    """State of a sequence, given by the sizes of its parts."""

    name: str
    seen: int
    m: int
    largest: int
    tail: int
    budget: int
    parameters: CrystalCacheParameters = QUIET

    def __str__(self) -> str:
        return self.name

    @property
    def state(self) -> DecodeState:
        return state_at(self.seen, self.m, self.largest, self.tail, self.budget, self.parameters)


CASES = [
    Case("long-tail", 1_000_000, 60, 9, 300, 400),
    Case("many-trunks", 2**24 + 9, 400, 5, 64, 700),
    Case("long-trunks", 2**31 + 40, 12, 90, 70, 300, replace(QUIET, breath_protection="sink+recent")),
    Case("far", 2**32 + 100, 150, 6, 130, 350),
]


@pytest.mark.spec("CC-STEP", "CC-TAIL", "CC-DECAY")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_forward(decoder: Backend, case: Case) -> None:
    """Check that a step before a breath changes only D and appends one token, which has a far id, to the tail."""
    before, p = case.state, replace(case.parameters, T_breath=100)
    after = decode_step(before, int(FAR_IDS[-1]), 0.25, ENDS, p, decoder)
    assert not list(decode_checks.forward(before, after, int(FAR_IDS[-1]), 0.25, p))


@pytest.mark.spec("CC-BREATH", "CC-TAIL-TRUNKS", "CC-SEEN-COUNT", "CC-REEVICT")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_breath(decoder: Backend, case: Case) -> None:
    before, p = case.state, case.parameters
    after = breath(before, ENDS, p, decoder)
    assert not list(decode_checks.breath(before, after, ENDS, p, decoder))
    assert len(after.live.positions) < len(before.stored), "no token was evicted"


@pytest.mark.spec("CC-STEP")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_that_breathes(decoder: Backend, case: Case) -> None:
    """Check that a step with a breath equals a step without a breath, followed by a breath."""
    before, p = replace(case.state, step=99), replace(case.parameters, T_breath=100)
    quiet = decode_step(before, 3, 0.5, ENDS, replace(p, T_breath=1000), decoder)
    assert decode_checks.same_bits(decode_step(before, 3, 0.5, ENDS, p, decoder), breath(quiet, ENDS, p, decoder))


STEPS = [127, 255, 32_767, 65_535, 2**24 + 1, 2**31 - 1, 2**32 - 1, 2**53 + 1]


@pytest.mark.spec("CC-STEP")
@pytest.mark.parametrize("T_breath", [3, 7])
@pytest.mark.parametrize("step", STEPS)
def test_breaths_of_a_long_conversation(decoder: Backend, step: int, T_breath: int) -> None:
    """Check that exactly every T_breath-th step has a breath while the step number passes the width of a type."""
    p = replace(QUIET, T_breath=T_breath, N_sink=1, W_recent=2)
    state = replace(state_at(2**24, 6, 3, 2, 9, p), step=step - 5)
    for at in range(step - 4, step + 8):
        state = decode_step(state, 3, 0.5, ENDS, p, decoder)
        assert state.step == at
        assert (state.tail_ids == ()) == (at % T_breath == 0)


@pytest.mark.spec("CC-SEGMENT")
@pytest.mark.parametrize(("seen", "H", "H_kv"), [(1_500, 9, 3), (2**31 - 60, 8, 4), (2**32 - 60, 10, 5)])
def test_a_turn(decoder: Backend, seen: int, H: int, H_kv: int) -> None:
    """Check a segment of 120 tokens after 60 trunks and a tail. The segment has sources in all of them."""
    p = replace(PAPER, C=48, T_max=9, N_sink=2, W_recent=20, M_min=0.125, tau_edge=0.01)
    before = state_at(seen, 60, 7, 40, 260, p)
    stored = before.stored
    inputs = addressed(Shape("turn", H, H_kv, 64, 120, p, before=len(stored)))
    ids = np.concatenate([np.tile(FAR_IDS, 5), 3 + np.arange(90) % 31])
    positions = np.concatenate([stored, seen + np.arange(120)])
    actual = decoder.require_crystal().coattention(inputs.q, inputs.k, positions, p, inputs.scaling, None)
    norms = decoder.require_breath().inverse_key_norms(np.ascontiguousarray(inputs.k[:, len(stored) :]))
    after = extend(before, inputs.q, inputs.k, ids, ENDS, p, decoder, scaling=inputs.scaling)
    assert not list(decode_checks.segment(before, after, actual, ids, norms, ENDS, p, decoder))
