"""S1, attention to rows: wrong readings of Eq. 3, 11 and 12 and of how they are composed."""

from dataclasses import replace
from typing import Any

import numpy as np

from conformance.assurance.saboteurs.registry import Array, instead_of
from reference.crystalcache.coattention import attention, coattention, intra_neighbours, row_normalise, salience
from spec.parameters import CrystalCacheParameters
from spec.records import CoAttention
from spec.validate import check_attention_inputs

__all__: list[str] = []


@instead_of(attention, "CC-ATTENTION")
def interleaved_heads(
    q: Array, k: Array, query_positions: Array, key_positions: Array, scaling: float, softcap: float | None,
) -> Array:
    """Query head h reads KV head h modulo H_kv."""
    shared = np.tile(k, (len(q) // len(k), 1, 1))
    return attention(q, shared, query_positions, key_positions, scaling, softcap)


@instead_of(attention, "CC-ATTENTION")
def top_left_mask(
    q: Array, k: Array, query_positions: Array, key_positions: Array, scaling: float, softcap: float | None,
) -> Array:
    """The mask is aligned to the top left: query i sees the first i + 1 keys."""
    return attention(q, k, key_positions[: len(query_positions)], key_positions, scaling, softcap)


@instead_of(attention, "CC-ATTENTION")
def cap_before_scaling(
    q: Array, k: Array, query_positions: Array, key_positions: Array, scaling: float, softcap: float | None,
) -> Array:
    """The soft cap is applied to the logit before it is scaled."""
    narrow = None if softcap is None else softcap * scaling
    return attention(q, k, query_positions, key_positions, scaling, narrow)


@instead_of(attention, "CC-ATTENTION")
def cap_left_out(
    q: Array, k: Array, query_positions: Array, key_positions: Array, scaling: float, softcap: float | None,
) -> Array:
    """The layer's soft cap is ignored."""
    return attention(q, k, query_positions, key_positions, scaling, None)


@instead_of(attention, "CC-ATTENTION")
def one_head_a_group(
    q: Array, k: Array, query_positions: Array, key_positions: Array, scaling: float, softcap: float | None,
) -> Array:
    """The query heads of a KV head are averaged: one head a group instead of H."""
    A: Array = attention(q, k, query_positions, key_positions, scaling, softcap)
    averaged: Array = A.reshape(len(k), -1, *A.shape[1:]).mean(axis=1)
    return averaged


@instead_of(salience, "CC-SALIENCE")
def mean_of_heads(own: Array, parameters: CrystalCacheParameters) -> Array:
    """The three heads are averaged, as in the author's essay."""
    top = np.sort(own.sum(axis=1), axis=0)[::-1][: parameters.k_heads]
    S: Array = np.clip(top.sum(axis=0) / max(1, len(top)), parameters.M_min, parameters.M_max)
    return S


@instead_of(salience, "CC-SALIENCE")
def heads_of_the_chunk(own: Array, parameters: CrystalCacheParameters) -> Array:
    """The three heads are chosen once for the chunk, not per token."""
    h = own.sum(axis=1)
    best = np.argsort(-h.sum(axis=1), kind="stable")[: parameters.k_heads]
    S: Array = np.clip(h[best].sum(axis=0), parameters.M_min, parameters.M_max)
    return S


@instead_of(salience, "CC-SALIENCE")
def row_sums(own: Array, parameters: CrystalCacheParameters) -> Array:
    """The sum runs over keys, as Algorithm 2's "query position q" suggests."""
    return salience(own.transpose(0, 2, 1), parameters)


@instead_of(salience, "CC-SALIENCE")
def clipped_heads(own: Array, parameters: CrystalCacheParameters) -> Array:
    """Each head is clipped from below before the sum."""
    h = np.maximum(own.sum(axis=1), parameters.M_min)
    top = np.sort(h, axis=0)[::-1][: parameters.k_heads]
    S: Array = np.clip(top.sum(axis=0), parameters.M_min, parameters.M_max)
    return S


@instead_of(coattention, "CC-SALIENCE")
def queries_of_later_chunks(
    q: Array, k: Array, positions: Array, parameters: CrystalCacheParameters, scaling: float,
    softcap: float | None,
) -> CoAttention:
    """The sum runs over all later queries, not over those of the key's own chunk."""
    found = coattention(q, k, positions, parameters, scaling, softcap)
    before = k.shape[1] - q.shape[1]
    A = attention(
        q.astype(np.float64), k.astype(np.float64), positions[before:], positions, scaling, softcap
    )
    return replace(found, salience=salience(A[:, :, before:], parameters))


@instead_of(row_normalise, "CC-ROW-NORM")
def no_epsilon(A: Array, epsilon: float) -> Array:
    """Epsilon is left out, as in line 13 of Algorithm 2: a row of zeros has no direction."""
    with np.errstate(invalid="ignore"):
        rows: Array = A / np.sqrt((A * A).sum(axis=1, keepdims=True))
    return rows


@instead_of(row_normalise, "CC-ROW-NORM")
def epsilon_in_the_root(A: Array, epsilon: float) -> Array:
    """Epsilon is added inside the norm."""
    rows: Array = A / np.sqrt((A * A).sum(axis=1, keepdims=True) + epsilon)
    return rows


@instead_of(row_normalise, "CC-ROW-NORM")
def unit_sum(A: Array, epsilon: float) -> Array:
    """Rows are divided by their sum."""
    rows: Array = A / (A.sum(axis=1, keepdims=True) + epsilon)
    return rows


@instead_of(coattention, "CC-ROW-NORM")
def whole_rows(
    q: Array, k: Array, positions: Array, parameters: CrystalCacheParameters, scaling: float,
    softcap: float | None,
) -> CoAttention:
    """Rows are normalised over all visible keys, then restricted to the chunk's own."""
    found = coattention(q, k, positions, parameters, scaling, softcap)
    n, before = q.shape[1], k.shape[1] - q.shape[1]
    A = attention(
        q.astype(np.float64), k.astype(np.float64), positions[before:], positions, scaling, softcap
    ).mean(axis=0)
    rows = row_normalise(A, parameters.epsilon)
    index, weight = found.intra.copy(), found.intra_weight.copy()
    for c in range(0, n, parameters.C):
        own = slice(before + c, before + min(c + parameters.C, n))
        chosen, weight[c : c + parameters.C] = intra_neighbours(rows[c : c + parameters.C, own], parameters)
        index[c : c + parameters.C] = np.where(chosen >= 0, positions[own][chosen], -1)
    return replace(found, intra=index, intra_weight=weight)


@instead_of(coattention, "CC-COATTENTION")
def slots_for_positions(
    q: Array, k: Array, positions: Array, parameters: CrystalCacheParameters, scaling: float,
    softcap: float | None,
) -> CoAttention:
    """Neighbours are slot numbers of the cache, which are wrong after the first eviction."""
    return coattention(q, k, np.arange(len(positions)), parameters, scaling, softcap)


@instead_of(coattention, "CC-COATTENTION")
def chunks_of_the_prompt(
    q: Array, k: Array, positions: Array, parameters: CrystalCacheParameters, scaling: float,
    softcap: float | None,
) -> CoAttention:
    """C is counted from position 0, not from the segment's first token."""
    before = k.shape[1] - q.shape[1]
    first = -int(positions[before]) % parameters.C
    if not 0 < first < q.shape[1]:
        return coattention(q, k, positions, parameters, scaling, softcap)
    split = before + first
    a = coattention(q[:, :first], k[:, :split], positions[:split], parameters, scaling, softcap)
    b = coattention(q[:, first:], k, positions, parameters, scaling, softcap)
    return CoAttention(a.start, *(
        np.concatenate([getattr(a, name), getattr(b, name)])
        for name in ("salience", "intra", "intra_weight", "cross", "cross_weight")
    ))


@instead_of(coattention, "CC-COATTENTION")
def segment_alone(
    q: Array, k: Array, positions: Array, parameters: CrystalCacheParameters, scaling: float,
    softcap: float | None,
) -> CoAttention:
    """A later segment sees its own keys only, not the live keys before it."""
    before = k.shape[1] - q.shape[1]
    return coattention(q, k[:, before:], positions[before:], parameters, scaling, softcap)


@instead_of(check_attention_inputs, "CC-COATTENTION")
def what_is_not_finite_passes(q: Any, k: Any) -> None:
    """NaN and infinite queries and keys are admitted."""
    check_attention_inputs(np.nan_to_num(q), np.nan_to_num(k))


@instead_of(coattention, "CC-COATTENTION")
def previous_chunk_alone(
    q: Array, k: Array, positions: Array, parameters: CrystalCacheParameters, scaling: float,
    softcap: float | None,
) -> CoAttention:
    """Cross sources of chunks before the previous one are dropped."""
    found = coattention(q, k, positions, parameters, scaling, softcap)
    row = np.arange(q.shape[1])
    before = k.shape[1] - q.shape[1]
    first = positions[np.maximum(0, before + (row // parameters.C - 1) * parameters.C)]
    near = found.cross >= first[:, None]
    order = np.argsort(~near, axis=1, kind="stable")
    index = np.where(near, found.cross, -1)
    weight = np.where(near, found.cross_weight, 0.0)
    return replace(
        found, cross=np.take_along_axis(index, order, axis=1),
        cross_weight=np.take_along_axis(weight, order, axis=1),
    )
