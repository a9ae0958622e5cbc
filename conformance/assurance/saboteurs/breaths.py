"""Decode: wrong readings of the order of a breath, and of what a later segment leaves as it was."""

from dataclasses import replace
from typing import Any

import numpy as np

from conformance.assurance.saboteurs.registry import Array, instead_of
from reference.crystalcache.breath import breath, breath_protection, evict
from reference.crystalcache.crystallization import crystallization
from reference.crystalcache.graph import degree
from reference.crystalcache.impact import trunk_impact
from reference.crystalcache.renewal import renewed_D
from reference.crystalcache.segments import add_segment, segment_crystallization
from reference.crystalcache.tail import edgeless_D, join_tail
from spec.backend import Backend
from spec.decode import DecodeState, TrunkWeights
from spec.parameters import CrystalCacheParameters

__all__: list[str] = []

Ends = frozenset[int]
Parameters = CrystalCacheParameters


@instead_of(breath, "CC-BREATH")
def evicted_before_the_new_trunks(
    state: DecodeState, sentence_ends: Ends, parameters: Parameters, backend: Backend,
) -> DecodeState:
    """The tail becomes trunks after the eviction, and is out of its reach."""
    stages = backend.require_breath()
    active = stages.activation(state.live, parameters)
    D = stages.resonance(renewed_D(state.D, active, parameters.renewal), state.W, active, parameters)
    older = replace(state, D=D, W=stages.hebbian(state.W, active, parameters))
    fewer = evict(older, breath_protection(older, parameters), parameters, backend)
    return join_tail(fewer, sentence_ends, parameters, backend)


@instead_of(edgeless_D, "CC-TAIL-D")
def without_a_graph_too(mu: float, sigma: float, parameters: Parameters) -> float:
    """M-only: a new trunk has the D of no edge, not 0."""
    return edgeless_D(mu, sigma, replace(parameters, graph="degree"))


@instead_of(segment_crystallization, "CC-SEGMENT-D")
def crystallized_without_a_graph(deg: Array, old: int, parameters: Parameters) -> Array:
    """M-only: a later segment's trunks have a D all the same."""
    return segment_crystallization(deg, old, replace(parameters, graph="degree"))


@instead_of(add_segment, "CC-SEGMENT")
def older_D_made_new(
    state: DecodeState, found: Any, ids: Array, ends: Ends, inverse_norms: Array, parameters: Parameters,
    backend: Backend,
) -> DecodeState:
    """Older trunks take the D of their new degree."""
    after = add_segment(state, found, ids, ends, inverse_norms, parameters, backend)
    deg = degree(after.W.indptr, after.W.weights)
    return replace(after, D=crystallization(deg, parameters.s, parameters.epsilon))


@instead_of(add_segment, "CC-SEGMENT")
def the_last_trunk_goes_on(
    state: DecodeState, found: Any, ids: Array, ends: Ends, inverse_norms: Array, parameters: Parameters,
    backend: Backend,
) -> DecodeState:
    """The segment's first trunk joins the trunk before it, where both fit T_max."""
    after = add_segment(state, found, ids, ends, inverse_norms, parameters, backend)
    live, at = after.live, len(state.D)
    if at == 0 or live.offsets[at + 1] - live.offsets[at - 1] > parameters.T_max:
        return after
    offsets = np.delete(live.offsets, at)
    table = replace(live, offsets=offsets, trunk_impact=trunk_impact(live.impact, offsets))
    return replace(after, live=table, D=np.delete(after.D, at), W=without(after.W, at))


def without(W: TrunkWeights, gone: int) -> TrunkWeights:
    """The graph with one trunk less."""
    m = len(W.indptr) - 1
    row = np.repeat(np.arange(m), np.diff(W.indptr))
    stays = (row != gone) & (W.indices != gone)
    row, column = row[stays], W.indices[stays]
    degrees = np.bincount(row - (row > gone), minlength=m - 1)
    indptr = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int64)
    return TrunkWeights(indptr, column - (column > gone), W.weights[stays])
