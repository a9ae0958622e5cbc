"""Decode: generated tokens are collected in a tail, and become trunks at the next breath (Section 3.8)."""

from dataclasses import replace
from numbers import Real

import numpy as np

from reference.crystalcache.crystallization import logistic
from reference.crystalcache.live import count_seen, join, keep
from spec.arrays import Float64, Int64, IntVector, Vector
from spec.backend import Backend
from spec.decode import DecodeState, LiveTrunks, TrunkWeights
from spec.errors import SpecError
from spec.parameters import CrystalCacheParameters
from spec.records import CoAttention
from spec.validate import check_whole

__all__ = ["append", "edgeless", "edgeless_D", "join_chunk", "join_tail"]


def append(state: DecodeState, token_id: int, inverse_norm: float) -> DecodeState:
    """Return the state with one generated token appended to the tail, and `step` increased by 1.

    Implements: CC-TAIL

    Source: Section 3.8. `inverse_norm` is the mean of 1 / ||k|| over the KV heads (CC-KEY-NORM).

    Raises:
        SpecError: if the id is not a whole number of at least 0, or if the inverse norm is not a positive number.
    """
    check_whole("token_id", token_id)
    if not isinstance(inverse_norm, Real) or not inverse_norm > 0:
        raise SpecError("inverse_norm", inverse_norm, "must be positive; the value of a zero key is infinity")
    return DecodeState(
        state.budget, state.seen + 1, state.step + 1, state.live, state.D, state.W, state.ids, state.counts, state.mu,
        state.sigma, (*state.tail_ids, int(token_id)), (*state.tail_inverse_norms, float(inverse_norm)),
    )


def edgeless(start: int, salience: Float64[Vector, " n"]) -> CoAttention:
    """Return a co-attention record with the given salience and no edges, for tokens whose attention is unknown."""
    n = len(salience)
    index, weight = np.empty((n, 0), dtype=np.int64), np.empty((n, 0))
    return CoAttention(start, salience, index, weight, index, weight)


def edgeless_D(mu: float, sigma: float, parameters: CrystalCacheParameters) -> float:
    """Return D of a trunk without edges: Eq. 27 at degree 0, with mu and sigma of the prefill.

    Implements: CC-TAIL-D

    Source: Eq. 27.
    """
    if parameters.graph == "zero":
        return 0.0
    return float(logistic(np.array([parameters.s * ((0.0 - mu) / sigma)]))[0])


def join_tail(
    state: DecodeState, sentence_ends: frozenset[int], parameters: CrystalCacheParameters, backend: Backend,
) -> DecodeState:
    """Return the state after S2 has converted the tail into trunks. The new trunks have no edges.

    The salience of each tail token is M_min. The rarity of a tail token is computed from the counts of all tokens seen.

    Implements: CC-TAIL-TRUNKS

    Source: Section 3.3 for the trunks, Eq. 22 and 23 for the impact of the trunks. The last token of the tail always
    ends a sentence.
    """
    if not state.tail_ids:
        return state
    ids = np.array(state.tail_ids, dtype=np.int64)
    all_ids, counts, c = count_seen(state.ids, state.counts, ids)
    salience = np.full(len(ids), float(parameters.M_min))
    M = backend.require_breath().impact(salience, c, parameters)
    ends = np.array([token in sentence_ends for token in state.tail_ids])
    start = state.seen - len(ids)
    # The impacts of the tail's few trunks are not min-max normalised, because a tail is not a segment.
    as_it_is = replace(parameters, trunk_impact="mean")
    trunks = backend.require_crystal().trunks(edgeless(start, salience), M, ends, as_it_is)
    added = LiveTrunks(
        state.tail_positions, trunks.offsets - start, M, np.array(state.tail_inverse_norms), trunks.impact
    )
    D = np.full(len(trunks.impact), edgeless_D(state.mu, state.sigma, parameters))
    indptr = np.concatenate([state.W.indptr, np.full(len(D), state.W.indptr[-1])])
    return join(state, all_ids, counts, added, D, TrunkWeights(indptr, state.W.indices, state.W.weights))


def join_chunk(
    state: DecodeState, token_ids: Int64[IntVector, " n"], kept: Int64[IntVector, " k"],
    inverse_norms: Float64[Vector, " k"], sentence_ends: frozenset[int], parameters: CrystalCacheParameters,
    backend: Backend,
) -> DecodeState:
    """Return the state after an archived chunk was spliced in. The tail becomes trunks first, then the chunk.

    `kept` contains the indices of the chunk's stored tokens, ascending. `inverse_norms` contains the mean of 1 / ||k||
    for each stored token (CC-KEY-NORM). Chunk tokens that are not stored are removed from the trunks.

    Implements: CC-CHUNK-TRUNKS

    Source: none in the paper. The chunk is treated like the tail of Section 3.8, because no query of this session has
    attended to the chunk.
    """
    engine, n = backend.for_decoding(), len(token_ids)
    before = join_tail(state, sentence_ends, parameters, engine)
    norms = np.full(n, np.inf)
    norms[kept] = inverse_norms
    read = replace(
        before, seen=before.seen + n, tail_ids=tuple(token_ids.tolist()), tail_inverse_norms=tuple(norms.tolist())
    )
    after, old = join_tail(read, sentence_ends, parameters, engine), len(before.live.positions)
    return keep(after, np.concatenate([np.arange(old), old + kept]), after.D)
