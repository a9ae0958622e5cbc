"""What the audit predicts of decode, measured: static activation, weak resonance, pruned cross-chunk edges."""

from typing import Any, NamedTuple

import numpy as np

from conformance.measure.studies.decode.plan import PROMPT
from conformance.measure.studies.decode.rules import Reading
from reference.crystalcache import prefill, start_state
from reference.crystalcache.breath import breath_protection, decay
from reference.crystalcache.graph import trunk_pairs, trunk_weights
from reference.crystalcache.resonance import raised
from spec.arrays import BoolVector, Float64, IntVector, Vector
from spec.backend import Backend
from spec.budget import parse_budget
from spec.decode import DecodeState
from spec.parameters import CrystalCacheParameters
from spec.records import Edges

__all__ = [
    "Flags", "Survivors", "changed_flags", "fixed_points", "flags_of", "held_up", "surviving_pairs", "trunk_summary",
]


_SETTLED = 200
"""Breaths after which D moves no more."""


class Flags(NamedTuple):
    """Live positions, ascending, and whether each one's trunk is active."""

    positions: IntVector
    active: BoolVector


def flags_of(state: DecodeState, parameters: CrystalCacheParameters, backend: Backend) -> Flags:
    """What a breath would call active now."""
    active = backend.require_breath().activation(state.live, parameters)
    return Flags(state.live.positions, np.repeat(active, state.live.sizes))


def changed_flags(before: Flags, after: Flags) -> tuple[int, int]:
    """Of the positions live in both: how many changed their flag, and how many there are."""
    _, here, there = np.intersect1d(before.positions, after.positions, assume_unique=True, return_indices=True)
    return int((before.active[here] != after.active[there]).sum()), len(here)


def trunk_summary(state: DecodeState, parameters: CrystalCacheParameters, backend: Backend) -> dict[str, Any]:
    """Trunks at the end: how many are active, where D decides the score, and the prompt's with impact and D."""
    active = backend.require_breath().activation(state.live, parameters)
    safe = breath_protection(state, parameters)
    score = backend.require_crystal().score
    without = score(np.zeros_like(state.D), state.live.trunk_impact, safe, parameters)
    old = state.live.positions[state.live.offsets[:-1]] < PROMPT
    return {
        "live": len(state.D), "active": int(active.sum()), "edges": len(state.W.indices) // 2,
        "free": int((~safe).sum()), "D_decides": int((without < state.D)[~safe].sum()),
        "prompt_impact": np.round(state.live.trunk_impact[old], 3).tolist(),
        "prompt_active": active[old].astype(int).tolist(), "prompt_D": np.round(state.D[old], 4).tolist(),
    }


def fixed_points(impact: float, parameters: CrystalCacheParameters) -> tuple[float, float]:
    """Where D ends up after many breaths with a pulse of 1 in each, from D = 0 and from D = 1."""
    D, constant = np.array([0.0, 1.0]), np.full(2, impact)
    for _ in range(_SETTLED):
        for _ in range(parameters.T_breath):
            D = decay(D, constant, parameters)
        D = raised(D, np.ones(2), parameters.alpha_res)
    return float(D[0]), float(D[1])


def held_up(
    state: DecodeState, impact: float, parameters: CrystalCacheParameters, backend: Backend, breaths: int,
) -> Float64[Vector, " active"]:
    """D of the active trunks after so many breaths from D = 1, all impacts being the same and nothing evicted.

    Neighbours' pulses and the Hebbian update take part.
    """
    stages = backend.require_breath()
    active = stages.activation(state.live, parameters)
    D, W, constant = np.ones(len(state.D)), state.W, np.full(len(state.D), impact)
    for _ in range(breaths):
        for _ in range(parameters.T_breath):
            D = stages.decay(D, constant, parameters)
        D, W = stages.resonance(D, W, active, parameters), stages.hebbian(W, active, parameters)
    of_active: Vector = D[active]
    return of_active


class Survivors(NamedTuple):
    """Pairs of trunks that edges join."""

    joined: int
    above: int
    """How many of them have a weight above tau_edge."""
    later: int
    """How many of those are left after the breaths."""


def surviving_pairs(
    reading: Reading, parameters: CrystalCacheParameters, breaths: int,
) -> tuple[Survivors, Survivors]:
    """Pairs that an edge inside a chunk joins, and pairs that edges across chunks alone join."""
    view, ids, backend = reading.view, reading.ids, reading.engine
    crystal = prefill(
        view.q, view.k, ids, reading.sentence_ends, "100%", parameters, backend, scaling=view.scaling,
        softcap=view.softcap,
    )
    edges, offsets, m = crystal.coattention.edges(), crystal.trunks.offsets, len(crystal.trunks.impact)
    pairs = trunk_pairs(edges, offsets)
    inside = int((crystal.coattention.intra >= 0).sum())
    near = trunk_pairs(Edges(edges.first[:inside], edges.second[:inside], edges.weight[:inside]), offsets)
    local = np.isin(pairs.a * m + pairs.b, near.a * m + near.b)
    _, kept = trunk_weights(pairs, crystal.trunks.sizes, parameters.tau_edge)
    above = np.zeros(len(local), dtype=np.bool_)
    above[kept] = True

    stages = backend.require_breath()
    state = start_state(crystal, ids, stages.inverse_key_norms(view.k), parse_budget("100%"), parameters)
    active, W = stages.activation(state.live, parameters), state.W
    for _ in range(breaths):
        W = stages.hebbian(W, active, parameters)
    row = np.repeat(np.arange(m), np.diff(W.indptr))
    left = np.isin(pairs.a * m + pairs.b, row * m + W.indices)
    return tuple(  # type: ignore[return-value]  # two of them
        Survivors(int(of.sum()), int((of & above).sum()), int((of & left).sum())) for of in (local, ~local)
    )
