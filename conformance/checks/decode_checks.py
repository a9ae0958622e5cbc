"""Checks of the state after a decode step, a breath (decode-time eviction) or a segment.

Each check yields complaints, and yields none if the state is right. Each transition is checked from the state before
it, so a near tie causes no complaint about later transitions.
"""

import pickle
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from conformance import tolerances
from conformance.checks import stage_checks
from conformance.oracles import decode, s6
from conformance.oracles.decode import Model
from conformance.strategies.trunks import decode_parameters, ends, frozen_state
from conformance.vectors.codec import STATE, fields_of, model_of, plain, results_of
from reference.crystalcache import decode_step, empty_state, extend
from reference.crystalcache import tail as waiting
from reference.crystalcache.breath import evict
from reference.crystalcache.segments import add_segment
from reference.crystalcache.tail import join_tail
from spec.arrays import IntVector, Vector
from spec.backend import Backend
from spec.budget import Budget, parse_budget
from spec.decode import DecodeState, check_state
from spec.parameters import TINY, CrystalCacheParameters
from spec.records import CoAttention

# These values pass through a logarithm, an exponential or a root. All other values must have the same bits.
BOUNDED = ("impact", "trunk_impact", "D", "weights")


def model(state: DecodeState) -> Model:
    """Return the oracle's model of a state. The budget of the model is the exact fraction."""
    result = model_of({**{name: plain(value) for name, value in fields_of(state).items()}, "budget": 1})
    share = state.budget.fraction
    result.budget = int(state.budget.tokens(0)) if share is None else Fraction(share)
    return result


def same_bits(a: DecodeState, b: DecodeState) -> bool:
    """Return True if two states are equal to the bit."""
    one, other = fields_of(a), fields_of(b)
    return a.budget == b.budget and all(plain(one[name]) == plain(other[name]) for name in STATE)


def state(actual: DecodeState, want: Model, loose: Any = 0.0) -> Iterator[str]:
    """Compare a state with the oracle's state.

    `loose` is the absolute radius of each D, and of mu and sigma together.
    """
    got, expected = fields_of(actual), results_of(want)
    for name in STATE:
        a, b = plain(got[name]), expected[name]
        if name in BOUNDED:
            near = name == "D" and len(a) == len(b) and bool((np.abs(np.subtract(a, b)) <= loose).all())
            if not near and not tolerances.close("CC-STEP", a, b):
                yield f"{name} is {a}, not {b}"
        elif name in ("mu", "sigma"):
            if not abs(a - b) <= np.max(loose, initial=0.0):
                yield f"{name} is {a}, not {b}"
        elif list(np.atleast_1d(a)) != list(np.atleast_1d(b)):
            yield f"{name} is {a}, not {b}"


def size_bounds(
    before: DecodeState, after: DecodeState, safe: Any, p: CrystalCacheParameters,
) -> Iterator[str]:
    """Check I.19 for the number of live tokens n.

    If n is at most B, all tokens are kept. If the protected tokens exceed B, exactly the protected tokens are kept.
    Otherwise B tokens are kept, less an overshoot of at most N_min - 1.
    """
    B = s6.effective_budget(model(before).budget, before.seen, p.N_sink, p.W_recent)
    n, kept = len(before.live.positions), len(after.live.positions)
    B_prot = int(before.live.sizes[np.array(safe, dtype=np.bool_)].sum())
    low, high = (n, n) if n <= B else (B_prot, B_prot) if B_prot > B else (B - max(0, p.N_min - 1), B)
    if not low <= kept <= high:
        yield f"{kept} tokens are kept of {n}, not {low} to {high}; B is {B}, {B_prot} are protected"


def eviction(
    before: DecodeState, after: DecodeState, safe: list[bool], p: CrystalCacheParameters, backend: Backend,
) -> Iterator[str]:
    """Check the eviction from a given table: the scores within their bound, and Algorithm 1 with these scores."""
    mask = np.array(safe, dtype=np.bool_)
    result = backend.require_crystal().score(before.D, before.live.trunk_impact, mask, p)
    yield from stage_checks.score(result, before.D, before.live.trunk_impact, mask, p)
    want = model(before)
    decode.evict_by(want, {g: x for g, x in enumerate(result.tolist()) if not safe[g]}, safe, p)
    yield from state(after, want)
    yield from size_bounds(before, after, safe, p)


def forward(
    before: DecodeState, after: DecodeState, token: int, norm: float, p: CrystalCacheParameters,
) -> Iterator[str]:
    """Check one forward pass without a breath."""
    want = decode.after_forward(model(before), token, norm, p)
    yield from state(after, want, tolerances.decay_radius(before.D))


def breath(
    before: DecodeState, after: DecodeState, ends: frozenset[int], p: CrystalCacheParameters, backend: Backend,
) -> Iterator[str]:
    """Check a breath (decode-time eviction).

    The part before the eviction is compared with the oracle from `before`. The eviction is checked from the table that
    the backend's stages compute.
    """
    stages = backend.require_breath()
    active = stages.activation(before.live, p)
    D, W = stages.resonance(before.D, before.W, active, p), stages.hebbian(before.W, active, p)
    table = join_tail(replace(before, D=D, W=W), ends, p, backend)
    yield from state(table, decode.before_eviction(model(before), ends, p))
    yield from eviction(table, after, decode.protected(model(table), p), p, backend)


def segment(
    before: DecodeState, after: DecodeState, result: CoAttention, ids: IntVector, norms: Vector,
    ends: frozenset[int], p: CrystalCacheParameters, backend: Backend,
) -> Iterator[str]:
    """Check a segment with given co-attention: the table from `before`, and the eviction from the table."""
    table = add_segment(join_tail(before, ends, p, backend), result, ids, ends, norms, p, backend)
    want = model(before)
    edges = stage_checks.edges_of(result)
    decode.add_segment(want, edges, result.salience.tolist(), ids.tolist(), norms.tolist(), ends, p)
    degree = np.array(decode.degrees(want))
    yield from state(table, want, tolerances.settled_radius(degree, p.s, p.epsilon))
    yield from eviction(table, after, decode.in_windows(model(table), p), p, backend)


ENDS = ends()
BUDGETS = ("0.5", "0.3", "1.0", 6, 12)


class Life(RuleBasedStateMachine):
    """Life of one state under test, with the history of the state in plain Python.

    The oracle checks every transition from the state before it. The history contains the facts that no single
    transition shows: the evicted tokens, the first trunk of each token, every id and every norm.
    """

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self.backend = backend
        self.p = TINY
        self.state: DecodeState = empty_state(Budget(count=1))
        self.ids: list[int] = []
        self.norms: list[float] = []
        self.keys: list[Any] = []
        self.gone: set[int] = set()
        self.trunk_of: dict[int, int] = {}
        self.impact: dict[int, float] = {}

    @initialize(p=decode_parameters(), budget=st.sampled_from(BUDGETS))
    def begin(self, p: CrystalCacheParameters, budget: Any) -> None:
        self.p = p
        self.state = frozen_state(empty_state(parse_budget(budget)))

    def become(self, after: DecodeState, complaints: list[str]) -> None:
        assert not complaints
        known = set(self.state.stored.tolist()) | set(range(self.state.seen, after.seen))
        self.gone |= known - set(after.stored.tolist())
        self.state = frozen_state(after)

    def read(self, n: int, seed: int) -> tuple[Any, Any, Any]:
        """Return q, ids and keys of n new tokens. Half of the queries point at a stored token."""
        rng = np.random.default_rng(seed)
        q, k = rng.standard_normal((4, n, 4)), rng.standard_normal((2, n, 4))
        for row in range(0, n, 2):
            if len(self.state.stored):
                q[:, row] = 3 * np.repeat(self.keys[int(rng.choice(self.state.stored))], 2, axis=0)
        return q.astype(np.float32), rng.integers(0, 9, n), k.astype(np.float32)

    @rule(token=st.integers(0, 8), seed=st.integers(0, 99), zero=st.sampled_from([False, False, False, True]))
    def step(self, token: int, seed: int, zero: bool) -> None:
        """Run a forward pass of one token: append, decay, and a breath if it is due."""
        key = np.random.default_rng(seed).standard_normal((2, 4)).astype(np.float32) * (not zero)
        norm = float(self.backend.require_breath().inverse_key_norms(key[:, None])[0])
        before, after = self.state, decode_step(self.state, token, norm, ENDS, self.p, self.backend)
        self.remember([token], key[:, None])
        if after.step % self.p.T_breath:
            self.become(after, list(forward(before, after, token, norm, self.p)))
            assert after.live is before.live
            assert after.W is before.W
        else:
            longer = waiting.append(before, token, norm)
            D = self.backend.require_breath().decay(before.D, before.live.trunk_impact, self.p)
            faded = replace(longer, D=D)
            complaints = list(forward(before, faded, token, norm, self.p))
            self.become(after, complaints + list(breath(faded, after, ENDS, self.p, self.backend)))
            assert after.tail_ids == ()

    @rule(n=st.integers(2, 7), pieces=st.integers(1, 3), seed=st.integers(0, 999))
    def segment(self, n: int, pieces: int, seed: int) -> None:
        """Read a turn in one forward pass or in the pieces of a chunked prompt.

        No token is evicted before the end of the turn.
        """
        before = self.state
        parts = [self.read(n, seed + piece) for piece in range(pieces)]
        q, ids, new = (np.concatenate([part[at] for part in parts], axis=axis) for at, axis in ((0, 1), (1, 0), (2, 1)))
        k = np.stack([*(self.keys[i] for i in before.stored.tolist()), *new.transpose(1, 0, 2)], axis=1)
        after = extend(before, q, k, ids, ENDS, self.p, self.backend)
        self.remember(ids.tolist(), new)
        result = self.backend.require_crystal().coattention(
            q, k, np.concatenate([before.stored, np.arange(before.seen, after.seen)]), self.p, 0.5, None
        )
        norms = np.array(self.norms[before.seen :])
        complaints = list(segment(before, after, result, ids, norms, ENDS, self.p, self.backend))
        self.become(after, complaints)
        assert after.step == before.step

    def remember(self, ids: list[int], keys: Any) -> None:
        self.ids += ids
        self.keys += list(keys.transpose(1, 0, 2))
        self.norms += self.backend.require_breath().inverse_key_norms(keys).tolist()

    @precondition(lambda self: self.state.seen > 0)
    @rule(count=st.integers(1, 12), data=st.data())
    def squeeze(self, count: int, data: Any) -> None:
        """Evict at any time, to any budget, with any protection. The tail is not changed."""
        before = replace(self.state, budget=Budget(count=count))
        m = len(before.D)
        safe = data.draw(st.lists(st.booleans(), min_size=m, max_size=m), label="protected")
        after = evict(before, np.array(safe, dtype=np.bool_), self.p, self.backend)
        complaints = list(eviction(before, after, safe, self.p, self.backend))
        assert after.tail_positions.tolist() == before.tail_positions.tolist()
        self.become(replace(after, budget=self.state.budget), complaints)

    @rule()
    def copy(self) -> None:
        """Check that a pickled copy is the same state, and continue with the copy."""
        again = pickle.loads(pickle.dumps(self.state))
        assert same_bits(again, self.state)
        self.state = frozen_state(again)

    @invariant()
    def is_a_state(self) -> None:
        """Check that the state is valid: edges are pruned, and no trunk is longer than T_max.

        Trunks partition the live tokens outside the tail. D is in [0, 1]. W is symmetric and without loops.
        """
        check_state(self.state)
        assert (self.state.W.weights > self.p.tau_edge).all()
        assert (self.state.live.sizes <= self.p.T_max).all()

    @invariant()
    def the_dead_stay_dead(self) -> None:
        stored = set(self.state.stored.tolist())
        assert not stored & self.gone
        assert stored | self.gone == set(range(self.state.seen))

    @invariant()
    def everything_seen_is_counted(self) -> None:
        state = self.state
        assert state.seen == len(self.ids)
        counted = Counter(dict(zip(state.ids.tolist(), state.counts.tolist(), strict=True)))
        assert counted + Counter(state.tail_ids) == Counter(self.ids)

    @invariant()
    def tokens_keep_their_trunk_impact_and_norm(self) -> None:
        live = self.state.live
        for g in range(len(self.state.D)):
            members = live.positions[live.offsets[g] : live.offsets[g + 1]].tolist()
            known = {self.trunk_of[i] for i in members if i in self.trunk_of}
            assert len(known) <= 1
            for i in members:
                self.trunk_of.setdefault(i, known.pop() if known else members[0])
                known = {self.trunk_of[i]}
        names = [self.trunk_of[int(live.positions[at])] for at in live.offsets[:-1]]
        assert len(set(names)) == len(names)
        for i, M, norm in zip(live.positions.tolist(), live.impact.tolist(), live.inverse_norms.tolist(), strict=True):
            assert self.impact.setdefault(i, M) == M
            assert norm == self.norms[i]

    @invariant()
    def pulses_are_bounded(self) -> None:
        """Check the pulses from each trunk: 1 at the source, at most (gamma max W) ^ h elsewhere.

        No pulse is below tau_pulse.
        """
        now = model(self.state)
        top = max(now.W.values(), default=0.0) * self.p.gamma_hop
        for g in now.trunks:
            arrived = decode.pulses(g.name, now.W, self.p)
            assert arrived.pop(g.name) == 1
            assert all(self.p.tau_pulse <= x <= max(top, top ** max(1, self.p.max_hops)) for x in arrived.values())
