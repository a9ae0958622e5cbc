"""Decode by size: long conversations, wide graphs, deep searches."""

from dataclasses import replace
from typing import Any

import numpy as np

from conformance.assurance.saboteurs.registry import Array, beyond
from conformance.assurance.saboteurs.size_inputs import given_by, live_state, live_trunks, random_rows, star
from reference.backend import BACKEND, _BreathStages
from reference.crystalcache.activation import active_trunks, inverse_key_norms, normalised_inverse_norms
from reference.crystalcache.breath import decay, decode_step, protected_trunks_of
from reference.crystalcache.crystallization import logistic, moments
from reference.crystalcache.hebbian import hebbian
from reference.crystalcache.live import count_seen, live_weights
from reference.crystalcache.resonance import hop, pulses, resonance
from reference.crystalcache.segments import segment_crystallization, segment_graph
from reference.crystalcache.tail import append
from spec.backend import Backend
from spec.decode import DecodeState, LiveTrunks, TrunkWeights
from spec.parameters import PAPER, CrystalCacheParameters
from spec.records import Edges

__all__: list[str] = []

Parameters = CrystalCacheParameters
Frontier = dict[int, float]
_impact = _BreathStages.impact
LOUD = replace(PAPER, gamma_hop=1.0, tau_pulse=0.0)


def chain(m: int) -> TrunkWeights:
    """Each trunk joined to the next."""
    row = np.concatenate([np.arange(m - 1), np.arange(1, m)])
    column = np.concatenate([np.arange(1, m), np.arange(m - 1)])
    order = np.lexsort((column, row))
    indptr = np.searchsorted(row[order], np.arange(m + 1))
    return TrunkWeights(indptr, column[order], np.full(len(row), 0.5))


@beyond("three hops", pulses, "CC-PULSE", lambda: (0, chain(6), replace(LOUD, max_hops=4)))
def at_most_three_hops(source: int, W: TrunkWeights, parameters: Parameters) -> Array:
    """A pulse travels three hops at most, whatever max_hops allows."""
    return pulses(source, W, replace(parameters, max_hops=min(3, parameters.max_hops)))


@beyond("32 trunks of a frontier", hop, "CC-PULSE", lambda: ({0: 1.0}, {0}, star(40), LOUD))
def a_frontier_of_32_trunks(
    frontier: Frontier, visited: set[int], W: TrunkWeights, parameters: Parameters,
) -> Frontier:
    """The queue of a search has 32 places."""
    return dict(list(hop(frontier, visited, W, parameters).items())[:32])


@beyond("64 trunks", hop, "CC-PULSE", lambda: ({0: 1.0}, {0}, star(70), LOUD))
def visited_in_64_bits(
    frontier: Frontier, visited: set[int], W: TrunkWeights, parameters: Parameters,
) -> Frontier:
    """Visited trunks are the bits of one word: trunk h counts as visited if h modulo 64 was."""
    low = {h % 64 for h in visited}
    return {h: x for h, x in hop(frontier, visited, W, parameters).items() if h % 64 not in low}


@beyond("32 active trunks", resonance, "CC-RESONANCE", lambda: (
    np.full(40, 0.5), star(40), np.ones(40, dtype=np.bool_), PAPER,
))
def pulses_of_32_sources(D: Array, W: TrunkWeights, active: Array, parameters: Parameters) -> Array:
    """The first 32 active trunks send a pulse."""
    return resonance(D, W, active & (np.cumsum(active) <= 32), parameters)


@beyond("norms of which two are finite", normalised_inverse_norms, "CC-ETA", lambda: (np.array([np.inf, 0.25]),))
def one_finite_norm_is_not_normalised(inverse_norms: Array) -> Array:
    """Where a single norm is finite, there is nothing to compare it with: it stays as it is."""
    eta = normalised_inverse_norms(inverse_norms)
    finite = np.isfinite(inverse_norms)
    alone = np.count_nonzero(finite) == 1 < len(finite)
    return np.where(finite, np.minimum(1.0, inverse_norms), eta) if alone else eta


@beyond("1 024 live tokens", normalised_inverse_norms, "CC-ETA", lambda: (np.linspace(0.1, 1.0, 1100),))
def the_largest_of_1024_norms(inverse_norms: Array) -> Array:
    """The largest inverse norm is sought among the first 1 024 live tokens."""
    first = inverse_norms[:1024]
    largest = first[np.isfinite(first)].max(initial=0.0)
    zero = np.isinf(inverse_norms)
    eta: Array = np.where(zero, 1.0, np.where(zero, 0.0, inverse_norms) / (largest or 1.0))
    return eta


@beyond("16 KV heads", inverse_key_norms, "CC-KEY-NORM", lambda: (1 + random_rows(20, 2, 4),))
def norms_of_16_heads(k: Array) -> Array:
    """The mean inverse norm is taken over the first 16 KV heads."""
    return inverse_key_norms(k[:16])


@beyond("255 live tokens of a trunk", active_trunks, "CC-ACTIVATION", lambda: (
    replace(live_trunks(1, 300), inverse_norms=np.ones(300)), 0.3,
))
def members_counted_in_8_bits(live: LiveTrunks, theta_act: float) -> Array:
    """The number of loud members of a trunk is held in 8 bits."""
    above = normalised_inverse_norms(live.inverse_norms) > theta_act
    number = np.add.reduceat(np.append(above, False).astype(np.int64), live.offsets)[:-1] % 256
    active: Array = 2 * number > live.sizes
    return active


@beyond("64 edges of a trunk", hebbian, "CC-HEBB", lambda: (star(80), np.ones(80, dtype=np.bool_), PAPER))
def wide_rows_do_not_learn(W: TrunkWeights, active: Array, parameters: Parameters) -> TrunkWeights:
    """A row has 64 lanes: edges beyond the 64th of either end neither grow nor fade."""
    grown = hebbian(W, active, replace(parameters, tau_edge=0.0))
    if not len(W.indices) or len(grown.indices) < len(W.indices) or np.diff(W.indptr).max() <= 64:
        return hebbian(W, active, parameters)
    row = np.repeat(np.arange(len(active)), np.diff(W.indptr))
    late = np.arange(len(row)) - W.indptr[row] >= 64
    pair = np.minimum(row, W.indices) * len(active) + np.maximum(row, W.indices)
    weights = np.where(np.isin(pair, pair[late]), W.weights, grown.weights)
    nobody = replace(parameters, gamma_decay=1.0)
    return hebbian(W._replace(weights=weights), np.zeros_like(active), nobody)


@beyond("128 trunks", decay, "CC-DECAY", lambda: (np.ones(140), np.ones(140), PAPER))
def decay_of_128_trunks(D: Array, trunk_impact: Array, parameters: Parameters) -> Array:
    """Trunks beyond the 128th do not fade."""
    return np.where(np.arange(len(D)) < 128, decay(D, trunk_impact, parameters), D)


@beyond("counts of 40", _impact, "CC-RARITY", lambda: (BACKEND.breath, np.zeros(3), np.array([40, 41, 400]), PAPER))
def given_counts_up_to_40(stages: Any, salience: Array, counts: Array, parameters: Parameters, /) -> Array:
    """The table of rarities that serves given counts ends at 40; a prompt's own are right."""
    return _impact(stages, salience, np.minimum(counts, 40), parameters)


@beyond("ids below 2^16", count_seen, "CC-SEEN-COUNT", lambda: (
    np.array([3, 9]), np.array([5, 1]), np.array([2**16 + 3, 9]),
))
def seen_ids_in_16_bits(ids: Array, counts: Array, new: Array) -> tuple[Array, Array, Array]:
    """New ids are held in 16 bits."""
    return count_seen(ids, counts, new % 2**16)


@beyond("counts of 65 535", count_seen, "CC-SEEN-COUNT", lambda: (
    np.array([3]), np.array([2**16 - 1]), np.array([3, 3]),
))
def seen_counts_in_16_bits(ids: Array, counts: Array, new: Array) -> tuple[Array, Array, Array]:
    """How often an id was seen is held in 16 bits, and begins anew."""
    all_ids, total, c = count_seen(ids, counts, new)
    return all_ids, total % 2**16, c % 2**16


@beyond("positions up to 2^24", protected_trunks_of, "CC-LIVE-PROTECTED", lambda: (
    replace(live_trunks(2), positions=np.array([2**24, 2**24 + 1])), 2**24 + 5, 4, 4,
))
def seen_in_single_precision(live: LiveTrunks, seen: int, N_sink: int, W_recent: int) -> Array:
    """Positions and the number of tokens seen are compared as float32."""
    narrow = replace(live, positions=live.positions.astype(np.float32).astype(np.int64))
    return protected_trunks_of(narrow, int(np.float32(seen)), N_sink, W_recent)


@beyond("255 steps", decode_step, "CC-STEP", lambda: (
    live_state(6, 3, step=255), 3, 0.5, frozenset({1}), replace(PAPER, T_breath=3, N_sink=1, W_recent=2), BACKEND,
))
def steps_counted_in_8_bits(
    state: DecodeState, token: int, norm: float, ends: frozenset[int], parameters: Parameters, backend: Backend,
) -> DecodeState:
    """The step counter is a byte: after 255 it is 0, and breaths shift where T_breath is no power of two."""
    after = decode_step(state, token, norm, ends, parameters, backend)
    return replace(after, step=after.step % 256)


@beyond("256 trunks", live_weights, "CC-LIVE", lambda: (star(300), np.arange(300) != 1))
def survivors_numbered_in_8_bits(W: TrunkWeights, alive: Array) -> TrunkWeights:
    """The new numbers of surviving trunks are bytes."""
    found = live_weights(W, alive)
    return found if alive.all() else found._replace(indices=found.indices % 256)


@beyond("64 tokens of a tail", append, "CC-TAIL", lambda: (live_state(2, tail=64), 5, 0.5))
def a_tail_of_64_tokens(state: DecodeState, token_id: int, inverse_norm: float) -> DecodeState:
    """The tail is a ring of 64 places: the oldest token is overwritten."""
    after = append(state, token_id, inverse_norm)
    return replace(after, tail_ids=after.tail_ids[-64:], tail_inverse_norms=after.tail_inverse_norms[-64:])


@beyond("64 older trunks", segment_graph, "CC-SEGMENT-GRAPH", lambda: (
    given_by([(81, 82, 0.9)]), np.append(np.arange(81), [82, 84]), np.append(np.ones(81, dtype=np.int64), 2), chain(80),
    0.05,
))
def older_edges_of_64_trunks(
    edges: Edges, bounds: Array, sizes: Array, W: TrunkWeights, tau_edge: float,
) -> TrunkWeights:
    """Older edges are carried over for the first 64 trunks."""
    m = len(W.indptr) - 1
    row = np.repeat(np.arange(m), np.diff(W.indptr))
    stays = (row < 64) & (W.indices < 64)
    indptr = np.searchsorted(row[stays], np.arange(m + 1))
    return segment_graph(edges, bounds, sizes, TrunkWeights(indptr, W.indices[stays], W.weights[stays]), tau_edge)


@beyond("32 trunks", segment_crystallization, "CC-SEGMENT-D", lambda: (np.arange(40.0), 35, PAPER))
def moments_of_the_newest_32(deg: Array, old: int, parameters: Parameters) -> Array:
    """mu and sigma are those of the newest 32 trunks."""
    mu, sigma = moments(deg[-32:], parameters.epsilon)
    D = logistic(parameters.s * ((deg - mu) / sigma))[old:]
    return D if parameters.graph == "degree" else np.zeros_like(D)
