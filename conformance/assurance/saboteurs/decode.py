"""Decode: wrong readings of the state, the tail, decay, breaths and segments."""

from dataclasses import replace
from typing import Any

import numpy as np

from conformance.assurance.saboteurs.registry import Array, instead_of
from reference.crystalcache import activation, hebbian, resonance
from reference.crystalcache.breath import breath, breath_protection, decay, decode_step, evict, protected_trunks_of
from reference.crystalcache.crystallization import crystallization, moments
from reference.crystalcache.graph import degree
from reference.crystalcache.live import count_seen, keep, start_state
from reference.crystalcache.segments import add_segment, extend, segment_crystallization, segment_graph
from reference.crystalcache.tail import append, edgeless_D, join_chunk, join_tail
from spec.backend import Backend
from spec.budget import Budget
from spec.decode import DecodeState, LiveTrunks, TrunkWeights
from spec.parameters import CrystalCacheParameters
from spec.records import CrystalRetention, Edges

__all__: list[str] = []

Ends = frozenset[int]
Parameters = CrystalCacheParameters


@instead_of(start_state, "CC-START")
def counts_of_the_kept(
    found: CrystalRetention, token_ids: Array, inverse_norms: Array, budget: Budget, parameters: Parameters,
) -> DecodeState:
    """Only kept tokens are counted."""
    state = start_state(found, token_ids, inverse_norms, budget, parameters)
    ids, counts = np.unique(token_ids[found.kept], return_counts=True)
    return replace(state, ids=ids, counts=counts)


@instead_of(start_state, "CC-START")
def D_before_the_eviction(
    found: CrystalRetention, token_ids: Array, inverse_norms: Array, budget: Budget, parameters: Parameters,
) -> DecodeState:
    """A partly dissolved trunk keeps its D."""
    state = start_state(found, token_ids, inverse_norms, budget, parameters)
    return replace(state, D=found.graph.D[found.ratio > 0])


@instead_of(start_state, "CC-START")
def scale_of_the_survivors(
    found: CrystalRetention, token_ids: Array, inverse_norms: Array, budget: Budget, parameters: Parameters,
) -> DecodeState:
    """mu is the mean degree of the surviving trunks."""
    state = start_state(found, token_ids, inverse_norms, budget, parameters)
    alive = found.graph.degree[found.ratio > 0]
    return replace(state, mu=float(alive.mean()) if len(alive) else 0.0)


@instead_of(keep, "CC-LIVE")
def impact_of_the_survivors(state: DecodeState, slots: Array, D: Array) -> DecodeState:
    """Mbar is taken again over what is left of a trunk."""
    after = keep(state, slots, D)
    live = after.live
    left = [np.sort(live.impact[a:b])[::-1][:3].mean() for a, b in zip(live.offsets, live.offsets[1:], strict=False)]
    return replace(after, live=replace(live, trunk_impact=np.array(left)))


@instead_of(keep, "CC-LIVE")
def graph_of_the_dead(state: DecodeState, slots: Array, D: Array) -> DecodeState:
    """Neighbours of a dead trunk are joined through it."""
    after = keep(state, slots, D)
    m = len(state.D)
    W = np.zeros((m, m))
    W[np.repeat(np.arange(m), np.diff(state.W.indptr)), state.W.indices] = state.W.weights
    there = np.bincount(np.repeat(np.arange(m), state.live.sizes)[slots], minlength=m) > 0
    through = (W[:, ~there, None] * W[None, ~there, :]).max(axis=1, initial=0.0) if m else W
    joined = np.maximum(W, through)[np.ix_(there, there)]
    np.fill_diagonal(joined, 0.0)
    row, column = np.nonzero(joined)
    indptr = np.concatenate([[0], np.cumsum((joined > 0).sum(axis=1))]).astype(np.int64)
    return replace(after, W=TrunkWeights(indptr, column, joined[row, column]))


@instead_of(count_seen, "CC-SEEN-COUNT")
def new_tokens_alone(ids: Array, counts: Array, new: Array) -> tuple[Array, Array, Array]:
    """A new token's count is that of the new tokens."""
    all_ids, total, _ = count_seen(ids, counts, new)
    nothing = np.empty(0, dtype=np.int64)
    return all_ids, total, count_seen(nothing, nothing, new)[2]


@instead_of(count_seen, "CC-SEEN-COUNT")
def one_by_one(ids: Array, counts: Array, new: Array) -> tuple[Array, Array, Array]:
    """A token counts those up to itself, not the new ones behind it."""
    all_ids, total, c = count_seen(ids, counts, new)
    later = np.array([int((new[at + 1 :] == token).sum()) for at, token in enumerate(new)], dtype=np.int64)
    return all_ids, total, c - later


@instead_of(append, "CC-TAIL")
def no_step(state: DecodeState, token_id: int, inverse_norm: float) -> DecodeState:
    """The step counter stands."""
    return replace(append(state, token_id, inverse_norm), step=state.step)


@instead_of(append, "CC-TAIL")
def newest_first(state: DecodeState, token_id: int, inverse_norm: float) -> DecodeState:
    """A token joins the tail at its front."""
    after = append(state, token_id, inverse_norm)
    return replace(after, tail_ids=(int(token_id), *state.tail_ids))


@instead_of(append, "CC-TAIL")
def any_norm(state: DecodeState, token_id: int, inverse_norm: float) -> DecodeState:
    """What is appended is not checked."""
    after = append(state, abs(token_id), 1.0)
    norms = (*state.tail_inverse_norms, float(inverse_norm))
    return replace(after, tail_ids=(*state.tail_ids, int(token_id)), tail_inverse_norms=norms)


@instead_of(edgeless_D, "CC-TAIL-D")
def new_trunks_at_one_half(mu: float, sigma: float, parameters: Parameters) -> float:
    """A trunk without an edge has D = 0.5."""
    return 0.0 if parameters.graph == "zero" else 0.5


@instead_of(edgeless_D, "CC-TAIL-D")
def new_trunks_at_one(mu: float, sigma: float, parameters: Parameters) -> float:
    """A new trunk is fully crystallised."""
    return 1.0


@instead_of(join_tail, "CC-TAIL-TRUNKS")
def one_trunk_of_the_tail(
    state: DecodeState, sentence_ends: Ends, parameters: Parameters, backend: Backend,
) -> DecodeState:
    """Sentence ends in the tail are not read."""
    return join_tail(state, frozenset(), parameters, backend)


@instead_of(join_tail, "CC-TAIL-TRUNKS")
def salience_of_nothing(
    state: DecodeState, sentence_ends: Ends, parameters: Parameters, backend: Backend,
) -> DecodeState:
    """A generated token has salience 0, not M_min."""
    if not state.tail_ids:
        return state
    return join_tail(state, sentence_ends, replace(parameters, M_min=0.0), backend)


@instead_of(join_tail, "CC-TAIL-TRUNKS")
def an_open_sentence_waits(
    state: DecodeState, sentence_ends: Ends, parameters: Parameters, backend: Backend,
) -> DecodeState:
    """A tail without a sentence end stays a tail."""
    if not set(state.tail_ids) & sentence_ends:
        return state
    return join_tail(state, sentence_ends, parameters, backend)


@instead_of(join_chunk, "CC-CHUNK-TRUNKS")
def only_stored_tokens_were_seen(
    state: DecodeState, token_ids: Array, kept: Array, norms: Array, ends: Ends, p: Parameters, backend: Backend,
) -> DecodeState:
    """The chunk has the room of its stored tokens, and rarity counts no others."""
    return join_chunk(state, token_ids[kept], np.arange(len(kept)), norms, ends, p, backend)


@instead_of(join_chunk, "CC-CHUNK-TRUNKS")
def a_chunk_goes_on_with_the_tail(
    state: DecodeState, token_ids: Array, kept: Array, norms: Array, ends: Ends, p: Parameters, backend: Backend,
) -> DecodeState:
    """No cut stands between the session's tail and the chunk."""
    tail = len(state.tail_ids)
    joined = replace(
        state, seen=state.seen - tail, tail_ids=(), tail_inverse_norms=(),
    )
    everything = np.concatenate([np.array(state.tail_ids, dtype=np.int64), token_ids])
    own = np.concatenate([np.arange(tail), tail + kept])
    return join_chunk(joined, everything, own, np.concatenate([state.tail_inverse_norms, norms]), ends, p, backend)


@instead_of(join_chunk, "CC-CHUNK-TRUNKS")
def tokens_of_a_chunk_are_steps(
    state: DecodeState, token_ids: Array, kept: Array, norms: Array, ends: Ends, p: Parameters, backend: Backend,
) -> DecodeState:
    """Each token of a spliced chunk counts as a step."""
    found = join_chunk(state, token_ids, kept, norms, ends, p, backend)
    return replace(found, step=found.step + len(token_ids))


@instead_of(decay, "CC-DECAY")
def impact_left_out(D: Array, trunk_impact: Array, parameters: Parameters) -> Array:
    """The rate depends on D alone."""
    return decay(D, np.ones_like(trunk_impact), parameters)


@instead_of(decay, "CC-DECAY")
def rate_not_times_D(D: Array, trunk_impact: Array, parameters: Parameters) -> Array:
    """rho is subtracted as it is."""
    rho = parameters.beta_0 * np.exp(-(D * trunk_impact / parameters.D_c))
    return np.maximum(0.0, D - rho)


@instead_of(protected_trunks_of, "CC-LIVE-PROTECTED")
def by_the_last_token_alone(live: LiveTrunks, seen: int, N_sink: int, W_recent: int) -> Array:
    """A trunk is in the sink when its last live token is."""
    last = live.positions[live.offsets[1:] - 1]
    return (last < N_sink) | (last >= seen - W_recent)


@instead_of(protected_trunks_of, "CC-LIVE-PROTECTED")
def window_of_live_tokens(live: LiveTrunks, seen: int, N_sink: int, W_recent: int) -> Array:
    """The window is of the last W_recent live tokens."""
    slot = np.arange(len(live.positions))
    recent = slot[live.offsets[1:] - 1] >= len(slot) - W_recent
    return (live.positions[live.offsets[:-1]] < N_sink) | recent


@instead_of(breath_protection, "CC-BREATH-PROTECTED")
def always_protected(state: DecodeState, parameters: Parameters) -> Array:
    """Sink and window are safe at every breath."""
    return protected_trunks_of(state.live, state.seen, parameters.N_sink, parameters.W_recent)


@instead_of(breath_protection, "CC-BREATH-PROTECTED")
def never_protected(state: DecodeState, parameters: Parameters) -> Array:
    """The parameter is not read."""
    return np.zeros(len(state.D), dtype=np.bool_)


@instead_of(evict, "CC-REEVICT")
def share_of_the_cache(
    state: DecodeState, protected: Array, parameters: Parameters, backend: Backend,
) -> DecodeState:
    """A fraction is taken of the live tokens."""
    fewer = replace(state, seen=len(state.live.positions))
    return replace(evict(fewer, protected, parameters, backend), seen=state.seen)


@instead_of(evict, "CC-REEVICT")
def no_floor(state: DecodeState, protected: Array, parameters: Parameters, backend: Backend) -> DecodeState:
    """B may be below sink + recent."""
    return evict(state, protected, replace(parameters, N_sink=0, W_recent=0), backend)


@instead_of(breath, "CC-BREATH")
def growth_before_pulses(
    state: DecodeState, sentence_ends: Ends, parameters: Parameters, backend: Backend,
) -> DecodeState:
    """Pulses travel on the updated graph."""
    active = activation.active_trunks(state.live, parameters.theta_act)
    W = hebbian.hebbian(state.W, active, parameters) if parameters.hebb == "additive" else state.W
    D = resonance.resonance(state.D, W, active, parameters)
    trunked = join_tail(replace(state, D=D, W=W), sentence_ends, parameters, backend)
    return evict(trunked, breath_protection(trunked, parameters), parameters, backend)


@instead_of(breath, "CC-BREATH")
def new_trunks_first(
    state: DecodeState, sentence_ends: Ends, parameters: Parameters, backend: Backend,
) -> DecodeState:
    """The tail is trunked before the activation, and takes part in it."""
    return breath(join_tail(state, sentence_ends, parameters, backend), sentence_ends, parameters, backend)


@instead_of(decode_step, "CC-STEP")
def breath_before_decay(
    state: DecodeState, token_id: int, inverse_norm: float, sentence_ends: Ends, parameters: Parameters,
    backend: Backend,
) -> DecodeState:
    """D decays after the breath."""
    still = decode_step(state, token_id, inverse_norm, sentence_ends, replace(parameters, beta_0=0.0), backend)
    return replace(still, D=backend.require_breath().decay(still.D, still.live.trunk_impact, parameters))


@instead_of(decode_step, "CC-STEP")
def a_breath_at_step_zero(
    state: DecodeState, token_id: int, inverse_norm: float, sentence_ends: Ends, parameters: Parameters,
    backend: Backend,
) -> DecodeState:
    """Steps count from 0: the first token brings a breath."""
    after = decode_step(
        replace(state, step=state.step - 1), token_id, inverse_norm, sentence_ends, parameters, backend
    )
    return replace(after, step=state.step + 1)


@instead_of(segment_graph, "CC-SEGMENT-GRAPH")
def edges_to_older_trunks_dropped(
    edges: Edges, bounds: Array, sizes: Array, W: TrunkWeights, tau_edge: float,
) -> TrunkWeights:
    """A segment's graph ends at its first token."""
    start = bounds[len(W.indptr) - 1]
    inside = (edges.first >= start) & (edges.second >= start)
    return segment_graph(Edges(*(column[inside] for column in edges)), bounds, sizes, W, tau_edge)


@instead_of(segment_graph, "CC-SEGMENT-GRAPH")
def sizes_with_the_dead(
    edges: Edges, bounds: Array, sizes: Array, W: TrunkWeights, tau_edge: float,
) -> TrunkWeights:
    """A trunk's size is the span of its positions."""
    return segment_graph(edges, bounds, np.diff(bounds), W, tau_edge)


@instead_of(segment_graph, "CC-SEGMENT-GRAPH")
def older_edges_forgotten(
    edges: Edges, bounds: Array, sizes: Array, W: TrunkWeights, tau_edge: float,
) -> TrunkWeights:
    """W begins anew with each segment."""
    nothing = TrunkWeights(np.zeros_like(W.indptr), W.indices[:0], W.weights[:0])
    return segment_graph(edges, bounds, sizes, nothing, tau_edge)


@instead_of(segment_crystallization, "CC-SEGMENT-D")
def scale_of_the_new(deg: Array, old: int, parameters: Parameters) -> Array:
    """mu and sigma run over the segment's trunks alone."""
    return segment_crystallization(deg[old:], 0, parameters)


@instead_of(segment_crystallization, "CC-SEGMENT-D")
def sample_deviation(deg: Array, old: int, parameters: Parameters) -> Array:
    """sigma is the sample standard deviation."""
    if parameters.graph == "zero" or len(deg) < 2:
        return segment_crystallization(deg, old, parameters)
    s = parameters.s * float(np.sqrt((len(deg) - 1) / len(deg)))
    found: Array = crystallization(deg, s, parameters.epsilon)[old:]
    return found


@instead_of(extend, "CC-SEGMENT")
def a_segment_decays(state: DecodeState, *given: Any, **more: Any) -> DecodeState:
    """D decays once for a segment."""
    after = extend(state, *given, **more)
    parameters = more["parameters"] if "parameters" in more else given[4]
    return replace(after, D=decay(after.D, after.live.trunk_impact, parameters))


@instead_of(extend, "CC-SEGMENT")
def a_segment_is_a_step(state: DecodeState, *given: Any, **more: Any) -> DecodeState:
    """The step counter goes on."""
    after = extend(state, *given, **more)
    return replace(after, step=after.step + 1)


@instead_of(add_segment, "CC-SEGMENT")
def rarity_of_the_segment(
    state: DecodeState, found: Any, ids: Array, ends: Ends, inverse_norms: Array, parameters: Parameters,
    backend: Backend,
) -> DecodeState:
    """A segment's token counts the segment alone."""
    nothing = np.empty(0, dtype=np.int64)
    fresh = replace(state, ids=nothing, counts=nothing)
    after = add_segment(fresh, found, ids, ends, inverse_norms, parameters, backend)
    all_ids, counts, _ = count_seen(state.ids, state.counts, ids)
    return replace(after, ids=all_ids, counts=counts)


@instead_of(add_segment, "CC-SEGMENT")
def scale_of_the_last_segment(
    state: DecodeState, found: Any, ids: Array, ends: Ends, inverse_norms: Array, parameters: Parameters,
    backend: Backend,
) -> DecodeState:
    """Each segment leaves its own mu and sigma."""
    after = add_segment(state, found, ids, ends, inverse_norms, parameters, backend)
    mu, sigma = moments(degree(after.W.indptr, after.W.weights), parameters.epsilon)
    return replace(after, mu=mu, sigma=sigma)
