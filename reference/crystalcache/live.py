"""Decode: new tokens are added to the trunk table, and evicted tokens are removed from the table (Section 3.8)."""

import numpy as np

from reference.crystalcache.crystallization import moments
from spec.arrays import Bool, BoolVector, Float64, Int64, IntVector, Vector
from spec.budget import Budget
from spec.decode import DecodeState, LiveTrunks, TrunkWeights
from spec.errors import SpecError
from spec.parameters import CrystalCacheParameters
from spec.records import CrystalRetention

__all__ = ["count_seen", "empty_state", "join", "keep", "live_weights", "start_state"]


def empty_state(budget: Budget) -> DecodeState:
    """Return the decode state before the first token. mu is 0 and sigma is 1, so a trunk without edges has D = 0.5."""
    none, nothing = np.empty(0, dtype=np.int64), np.empty(0)
    zero = np.zeros(1, dtype=np.int64)
    live = LiveTrunks(none, zero, nothing, nothing, nothing)
    return DecodeState(budget, 0, 0, live, nothing, TrunkWeights(zero, none, nothing), none, none, 0.0, 1.0)


def start_state(
    retention: CrystalRetention, token_ids: Int64[IntVector, " n"], inverse_norms: Float64[Vector, " n"],
    budget: Budget, parameters: CrystalCacheParameters,
) -> DecodeState:
    """Return the decode state after a prefill of n tokens: the kept trunks, and the counts of all token ids.

    Implements: CC-START

    Source: Algorithm 2 computes the records in `retention`, and Section 3.8 uses the records. `inverse_norms` contains
    the mean of 1 / ||k|| over the KV heads for each token (CC-KEY-NORM).

    Raises:
        SpecError: if `token_ids` or `inverse_norms` does not have a value for each token of the prompt.
    """
    for name, values in (("token_ids", token_ids), ("inverse_norms", inverse_norms)):
        if np.shape(values) != (retention.seen,):
            raise SpecError(name, np.shape(values), f"must have the shape ({retention.seen},), that of the prompt")
    graph, trunks = retention.graph, retention.trunks
    ids, counts = np.unique(token_ids, return_counts=True)
    live = LiveTrunks(np.arange(len(token_ids)), trunks.offsets, retention.impact, inverse_norms, trunks.impact)
    state = DecodeState(
        budget, len(token_ids), 0, live, graph.D, TrunkWeights(graph.indptr, graph.indices, graph.weights),
        ids, counts.astype(np.int64), *moments(graph.degree, parameters.epsilon),
    )
    return keep(state, retention.kept, retention.D)


def keep(state: DecodeState, slots: Int64[IntVector, " kept"], D: Float64[Vector, " m"]) -> DecodeState:
    """Return the state with only the tokens at the table indices `slots` (ascending). Empty trunks are removed.

    Implements: CC-LIVE

    Source: Section 3.8(d). A removed trunk is excluded from the graph, and from all later minima, maxima and means.
    """
    live, m = state.live, len(D)
    left = np.bincount(np.repeat(np.arange(m), live.sizes)[slots], minlength=m)
    alive = left > 0
    table = LiveTrunks(
        live.positions[slots], np.concatenate([[0], np.cumsum(left[alive])]).astype(np.int64), live.impact[slots],
        live.inverse_norms[slots], live.trunk_impact[alive],
    )
    W = live_weights(state.W, alive)
    return DecodeState(
        state.budget, state.seen, state.step, table, D[alive], W, state.ids, state.counts, state.mu, state.sigma,
        state.tail_ids, state.tail_inverse_norms,
    )


def live_weights(W: TrunkWeights, alive: Bool[BoolVector, " m"]) -> TrunkWeights:
    """Return the edges of W that join two trunks marked in `alive`. The marked trunks are renumbered from 0."""
    if alive.all():
        return W
    stays = np.repeat(alive, np.diff(W.indptr)) & alive[W.indices]
    number = np.cumsum(alive) - 1
    # The row of a removed trunk is empty, so the rows of the remaining trunks are contiguous.
    before = np.concatenate([[0], np.cumsum(stays)])[W.indptr]
    indptr = np.append(before[:-1][alive], before[-1])
    return TrunkWeights(indptr, number[W.indices[stays]], W.weights[stays])


def join(
    state: DecodeState, ids: Int64[IntVector, " distinct"], counts: Int64[IntVector, " distinct"],
    added: LiveTrunks, D: Float64[Vector, " added"], W: TrunkWeights,
) -> DecodeState:
    """Return the state with the trunks `added` in the trunk table, and `W` as the edges of old and added trunks."""
    live = state.live
    table = LiveTrunks(
        np.concatenate([live.positions, added.positions]),
        np.concatenate([live.offsets, live.offsets[-1] + added.offsets[1:]]),
        np.concatenate([live.impact, added.impact]),
        np.concatenate([live.inverse_norms, added.inverse_norms]),
        np.concatenate([live.trunk_impact, added.trunk_impact]),
    )
    return DecodeState(
        state.budget, int(added.positions[-1]) + 1, state.step, table, np.concatenate([state.D, D]), W, ids, counts,
        state.mu, state.sigma,
    )


def count_seen(
    ids: Int64[IntVector, " distinct"], counts: Int64[IntVector, " distinct"], new: Int64[IntVector, " n"],
) -> tuple[IntVector, IntVector, IntVector]:
    """Return all distinct token ids seen, the count of each id, and the count of each new token's id.

    Implements: CC-SEEN-COUNT

    Source: Eq. 20. During decoding, the counts of Eq. 20 include evicted tokens.
    """
    fresh, number = np.unique(new, return_counts=True)
    at = np.searchsorted(ids, fresh)
    known = np.append(ids, -1)[at] == fresh
    total = counts.copy()
    total[at[known]] += number[known]
    all_ids = np.insert(ids, at[~known], fresh[~known])
    total = np.insert(total, at[~known], number[~known])
    c: IntVector = total[np.searchsorted(all_ids, new)]
    return all_ids, total, c
