"""Decode: D of each trunk decays at every step, and a breath evicts tokens every T_breath steps (Section 3.8)."""

from dataclasses import replace

import numpy as np

from reference.crystalcache.live import keep
from reference.crystalcache.protection import effective_budget
from reference.crystalcache.renewal import renewed_D
from reference.crystalcache.tail import append, join_tail
from spec.arrays import Bool, BoolVector, Float64, Vector
from spec.backend import Backend
from spec.decode import DecodeState, LiveTrunks
from spec.parameters import CrystalCacheParameters
from spec.records import Trunks

__all__ = ["breath", "breath_protection", "decay", "decode_step", "evict", "protected_trunks_of"]


def decay(
    D: Float64[Vector, " m"], trunk_impact: Float64[Vector, " m"], parameters: CrystalCacheParameters,
) -> Float64[Vector, " m"]:
    """Return D of each trunk after one decode step. D decays faster if the product of D and trunk impact is small.

    Implements: CC-DECAY

    Source: Eq. 36 with dt = 1.
    """
    rho = parameters.beta_0 * np.exp(-(D * trunk_impact / parameters.D_c))
    return np.maximum(0.0, D - rho * D)


def protected_trunks_of(live: LiveTrunks, seen: int, N_sink: int, W_recent: int) -> Bool[BoolVector, " m"]:
    """Return a mask of the trunks with a cached token among the first N_sink or the last W_recent positions seen.

    Implements: CC-LIVE-PROTECTED

    Source: Section 3.7, applied to the tokens that are still cached.
    """
    first, last = live.positions[live.offsets[:-1]], live.positions[live.offsets[1:] - 1]
    protected: BoolVector = (first < N_sink) | (last >= seen - W_recent)
    return protected


def breath_protection(state: DecodeState, parameters: CrystalCacheParameters) -> Bool[BoolVector, " m"]:
    """Return a mask of the trunks that a breath (decode-time eviction) must not evict.

    If `breath_protection` is "none", no trunk is marked. Otherwise all trunks with sink or recent tokens are marked.

    Implements: CC-BREATH-PROTECTED

    Source: Section 3.8(d), "the protected set is empty". In contrast, the essay protects sink and recent tokens.
    """
    if parameters.breath_protection == "none":
        return np.zeros(len(state.D), dtype=np.bool_)
    return protected_trunks_of(state.live, state.seen, parameters.N_sink, parameters.W_recent)


def evict(
    state: DecodeState, protected: Bool[BoolVector, " m"], parameters: CrystalCacheParameters, backend: Backend,
) -> DecodeState:
    """Return the state after S5 (score) and S6 (eviction) on all trunks.

    Eq. 30 computes the budget B from the number of all tokens seen, including evicted tokens.

    Implements: CC-REEVICT

    Source: Section 3.8(d), Algorithm 1.
    """
    live, stages = state.live, backend.require_crystal()
    B = effective_budget(state.budget, state.seen, parameters.N_sink, parameters.W_recent)
    score = stages.score(state.D, live.trunk_impact, protected, parameters)
    trunks = Trunks(live.offsets, live.trunk_impact)
    dissolution = stages.dissolve(score, trunks, live.impact, state.D, protected, B, parameters)
    return keep(state, dissolution.kept, dissolution.D)


def breath(
    state: DecodeState, sentence_ends: frozenset[int], parameters: CrystalCacheParameters, backend: Backend,
) -> DecodeState:
    """Return the state after a breath (decode-time eviction).

    The steps of a breath are activation, resonance, Hebbian update, conversion of the tail into trunks, and eviction.

    After the call, the caller must evict all cached tokens whose positions are not in `stored` of the returned state.

    Implements: CC-BREATH

    Source: Section 3.8(a) to (d).
    """
    stages = backend.require_breath()
    active = stages.activation(state.live, parameters)
    renewed = renewed_D(state.D, active, parameters.renewal)
    D = stages.resonance(renewed, state.W, active, parameters)
    W = stages.hebbian(state.W, active, parameters)
    trunked = join_tail(replace(state, D=D, W=W), sentence_ends, parameters, backend)
    return evict(trunked, breath_protection(trunked, parameters), parameters, backend)


def decode_step(
    state: DecodeState, token_id: int, inverse_norm: float, sentence_ends: frozenset[int],
    parameters: CrystalCacheParameters, backend: Backend,
) -> DecodeState:
    """Return the state after a forward pass of one token. The token joins the tail, and D of each trunk decays.

    Every T_breath steps, the function also runs a breath (decode-time eviction). `inverse_norm` is the mean of 1 /
    ||k|| over the KV heads (CC-KEY-NORM).

    Implements: CC-STEP

    Source: Section 3.8.
    """
    longer, engine = append(state, token_id, inverse_norm), backend.for_decoding()
    faded = replace(longer, D=engine.require_breath().decay(longer.D, longer.live.trunk_impact, parameters))
    if faded.step % parameters.T_breath:
        return faded
    return breath(faded, sentence_ends, parameters, engine)
