"""What is said of a state after a step, a breath or a segment: complaints, none if it is right.

Each transition is judged from the state before it, so that a near tie is no complaint about what follows.
"""

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np

from conformance import tolerances
from conformance.checks import stage_checks
from conformance.oracles import decode, s6
from conformance.oracles.decode import Model
from conformance.vectors.arrays import plain
from conformance.vectors.models import STATE, model_of, results_of
from conformance.vectors.subject_decode import fields_of
from reference.crystalcache.segments import add_segment
from reference.crystalcache.tail import join_tail
from spec.arrays import IntVector, Vector
from spec.backend import Backend
from spec.decode import DecodeState
from spec.parameters import CrystalCacheParameters
from spec.records import CoAttention

__all__ = ["breath", "eviction", "forward", "model", "same_bits", "segment", "size_bounds", "state"]

# Through a logarithm, an exponential or a root; the others are the same bits.
BOUNDED = ("impact", "trunk_impact", "D", "weights")


def model(state: DecodeState) -> Model:
    """The oracle's model of a state; its budget is the exact share."""
    found = model_of({**{name: plain(value) for name, value in fields_of(state).items()}, "budget": 1})
    share = state.budget.fraction
    found.budget = int(state.budget.tokens(0)) if share is None else Fraction(share)
    return found


def same_bits(a: DecodeState, b: DecodeState) -> bool:
    """Whether two states are equal to the bit."""
    one, other = fields_of(a), fields_of(b)
    return a.budget == b.budget and all(plain(one[name]) == plain(other[name]) for name in STATE)


def state(found: DecodeState, want: Model, loose: Any = 0.0) -> Iterator[str]:
    """A state against the oracle's; `loose` is the absolute radius of each D, and of mu and sigma together."""
    got, expected = fields_of(found), results_of(want)
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
    """I.19 on live tokens: all of them up to B, the protected above it, else B less an overshoot."""
    B = s6.effective_budget(model(before).budget, before.seen, p.N_sink, p.W_recent)
    n, kept = len(before.live.positions), len(after.live.positions)
    B_prot = int(before.live.sizes[np.array(safe, dtype=np.bool_)].sum())
    low, high = (n, n) if n <= B else (B_prot, B_prot) if B_prot > B else (B - max(0, p.N_min - 1), B)
    if not low <= kept <= high:
        yield f"{kept} tokens are kept of {n}, not {low} to {high}; B is {B}, {B_prot} are protected"


def eviction(
    before: DecodeState, after: DecodeState, safe: list[bool], p: CrystalCacheParameters, backend: Backend,
) -> Iterator[str]:
    """What an eviction leaves of a given table: its scores in their bound, and from these Algorithm 1."""
    mask = np.array(safe, dtype=np.bool_)
    found = backend.require_crystal().score(before.D, before.live.trunk_impact, mask, p)
    yield from stage_checks.score(found, before.D, before.live.trunk_impact, mask, p)
    want = model(before)
    decode.evict_by(want, {g: x for g, x in enumerate(found.tolist()) if not safe[g]}, safe, p)
    yield from state(after, want)
    yield from size_bounds(before, after, safe, p)


def forward(
    before: DecodeState, after: DecodeState, token: int, norm: float, p: CrystalCacheParameters,
) -> Iterator[str]:
    """One forward without a breath."""
    want = decode.after_forward(model(before), token, norm, p)
    yield from state(after, want, tolerances.decay_radius(before.D))


def breath(
    before: DecodeState, after: DecodeState, ends: frozenset[int], p: CrystalCacheParameters, backend: Backend,
) -> Iterator[str]:
    """A breath: all but its eviction from `before`, the eviction from what the backend's stages make of it."""
    stages = backend.require_breath()
    active = stages.activation(before.live, p)
    D, W = stages.resonance(before.D, before.W, active, p), stages.hebbian(before.W, active, p)
    table = join_tail(replace(before, D=D, W=W), ends, p, backend)
    yield from state(table, decode.before_eviction(model(before), ends, p))
    yield from eviction(table, after, decode.protected(model(table), p), p, backend)


def segment(
    before: DecodeState, after: DecodeState, found: CoAttention, ids: IntVector, norms: Vector,
    ends: frozenset[int], p: CrystalCacheParameters, backend: Backend,
) -> Iterator[str]:
    """A segment whose S1 is given: the table from `before`, the eviction from the table."""
    table = add_segment(join_tail(before, ends, p, backend), found, ids, ends, norms, p, backend)
    want = model(before)
    edges = stage_checks.edges_of(found)
    decode.add_segment(want, edges, found.salience.tolist(), ids.tolist(), norms.tolist(), ends, p)
    degree = np.array(decode.degrees(want))
    yield from state(table, want, tolerances.settled_radius(degree, p.s, p.epsilon))
    yield from eviction(table, after, decode.in_windows(model(table), p), p, backend)
