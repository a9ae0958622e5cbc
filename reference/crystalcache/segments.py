"""S1 to S6 for later segments of a sequence, such as a chat turn or a chunk of a stream (Section 3.8)."""

from dataclasses import replace

import numpy as np

from reference.crystalcache.breath import evict, protected_trunks_of
from reference.crystalcache.crystallization import crystallization, moments
from reference.crystalcache.graph import degree, symmetric_csr, trunk_pairs, trunk_weights
from reference.crystalcache.live import count_seen, join
from reference.crystalcache.tail import join_tail
from spec.arrays import Float64, Int64, IntVector, Vector
from spec.backend import Backend, resolve
from spec.decode import DecodeState, LiveTrunks, TrunkWeights
from spec.errors import SpecError
from spec.parameters import PAPER, CrystalCacheParameters
from spec.policy import DeviceArray
from spec.records import CoAttention, Edges
from spec.validate import check_scaling, check_sentence_ends, check_token_ids

__all__ = ["add_segment", "extend", "segment_crystallization", "segment_graph"]


def segment_graph(
    edges: Edges, bounds: Int64[IntVector, " m_and_one"], sizes: Int64[IntVector, " m"], W: TrunkWeights,
    tau_edge: float,
) -> TrunkWeights:
    """Return the edge weights W of the trunk graph after the trunks of a segment are added.

    Weights between two old trunks are unchanged. The weights of edges to new trunks are computed from the edges of the
    segment.

    Implements: CC-SEGMENT-GRAPH

    Source: Eq. 24 and 25 with the number of cached tokens as the size of a trunk. `bounds` contains the first cached
    position of each trunk, then the end of the last trunk. All cached tokens of a trunk are between the bound of the
    trunk and the next bound, even after evictions.
    """
    pairs = trunk_pairs(edges, bounds)
    weights, kept = trunk_weights(pairs, sizes, tau_edge)
    row = np.repeat(np.arange(len(W.indptr) - 1), np.diff(W.indptr))
    once = row < W.indices
    a = np.concatenate([row[once], pairs.a[kept]])
    b = np.concatenate([W.indices[once], pairs.b[kept]])
    return TrunkWeights(*symmetric_csr(a, b, np.concatenate([W.weights[once], weights]), len(sizes)))


def segment_crystallization(
    deg: Float64[Vector, " m"], old: int, parameters: CrystalCacheParameters,
) -> Float64[Vector, " new"]:
    """Return D of all trunks except the first `old` trunks. mu and sigma are computed over all trunks.

    Implements: CC-SEGMENT-D

    Source: Eq. 27. D of the older trunks is unchanged.
    """
    D = crystallization(deg, parameters.s, parameters.epsilon)[old:]
    return D if parameters.graph == "degree" else np.zeros_like(D)


def add_segment(
    state: DecodeState, coattention: CoAttention, ids: Int64[IntVector, " n"], ends: frozenset[int],
    inverse_norms: Float64[Vector, " n"], parameters: CrystalCacheParameters, backend: Backend,
) -> DecodeState:
    """Return the state with the trunks of a segment added by S2 to S4, without eviction. `state` must have no tail."""
    crystal, breath = backend.require_crystal(), backend.require_breath()
    all_ids, counts, c = count_seen(state.ids, state.counts, ids)
    M = breath.impact(coattention.salience, c, parameters)
    trunks = crystal.trunks(coattention, M, np.isin(ids, sorted(ends)), parameters)
    live = state.live
    bounds = np.concatenate([live.positions[live.offsets[:-1]], trunks.offsets])
    W = breath.segment_graph(coattention, bounds, np.concatenate([live.sizes, trunks.sizes]), state.W, parameters)
    deg = degree(W.indptr, W.weights)
    mu, sigma = moments(deg, parameters.epsilon) if state.seen == 0 else (state.mu, state.sigma)
    added = LiveTrunks(
        np.arange(state.seen, state.seen + len(ids)), trunks.offsets - state.seen, M, inverse_norms, trunks.impact
    )
    D = breath.segment_crystallization(deg, len(state.D), parameters)
    return replace(join(state, all_ids, counts, added, D, W), mu=mu, sigma=sigma)


def extend(
    state: DecodeState, q: DeviceArray, k: DeviceArray, token_ids: Int64[IntVector, " n"],
    sentence_ends: frozenset[int], parameters: CrystalCacheParameters = PAPER, backend: str | Backend = "numpy", *,
    scaling: float | None = None, softcap: float | None = None, sinks: DeviceArray | None = None,
) -> DecodeState:
    """Return the state after a segment of n tokens. The tail of `state` is first converted into trunks.

    Implements: CC-SEGMENT

    Source: Section 3.8 and Algorithm 2. S5 and S6 are applied to all trunks. If the state is empty, `extend` keeps the
    tokens that `prefill` would keep.

    Args:
        state: state before the segment. `extend` does not change `state`.
        q: queries of the segment in the observed layer, (H, n, d).
        k: keys of the observed layer, (H_kv, stored + n, d): first the keys of `state.stored`, then the segment's keys.
        token_ids: token ids of the segment, (n,), n at least 2. Use `decode_step` for a single token.
        sentence_ends: ids of the tokens that end a sentence.
        parameters: constants of CrystalCache.
        backend: a Backend, the name of a backend, or an import path, as for `prefill`. The backend needs the stage
            families `crystal` and `breath`.
        scaling: factor that multiplies q.k in the observed layer. Default: 1 / sqrt(d).
        softcap: soft cap on the attention logits of the observed layer, or None if the layer has no soft cap.
        sinks: logits of the observed layer's attention sinks, one per query head, (H,), or None if the layer has no
            sinks.

    Raises:
        SpecError: if an input is invalid.
        BackendUnavailable: if the backend cannot run on this machine.
    """
    engine = resolve(backend).for_decoding()
    breath = engine.require_breath()
    n = _tokens("q", q)
    ids, ends = check_token_ids(token_ids, n), check_sentence_ends(sentence_ends)
    positions = np.concatenate([state.stored, np.arange(state.seen, state.seen + n)])
    if _tokens("k", k) != len(positions):
        raise SpecError("k", tuple(k.shape), f"must have {len(state.stored)} stored keys, then {n} keys of the segment")
    factor = q.shape[2] ** -0.5 if scaling is None else scaling
    check_scaling(factor, softcap)

    coattention = engine.require_crystal().coattention(q, k, positions, parameters, factor, softcap, None, sinks)
    norms = breath.inverse_key_norms(k[:, len(positions) - n :])
    before = join_tail(state, ends, parameters, engine)
    after = add_segment(before, coattention, ids, ends, norms, parameters, engine)
    safe = protected_trunks_of(after.live, after.seen, parameters.N_sink, parameters.W_recent)
    return evict(after, safe, parameters, engine)


def _tokens(name: str, x: DeviceArray) -> int:
    """Return the number of tokens of an array (heads, tokens, d). The backend makes all other checks of the array."""
    shape = tuple(getattr(x, "shape", ()))
    if len(shape) != 3:
        raise SpecError(name, shape or type(x).__name__, "must be an array (heads, tokens, d)")
    return int(shape[1])
