"""S1 by size: what is right on a few dozen tokens and a few heads, and wrong on a real prompt."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from conformance.assurance.saboteurs.registry import Array, beyond
from conformance.assurance.saboteurs.size_inputs import attended, one_sided, ramp, random_rows, segment
from reference.backend import BACKEND, _CrystalStages
from reference.crystalcache.coattention import (
    attention,
    coattention,
    cross_neighbours,
    intra_neighbours,
    mean_salience,
    row_normalise,
    salience,
    strongest,
)
from spec.parameters import PAPER, CrystalCacheParameters
from spec.records import CoAttention, Edges

__all__: list[str] = []

Attend = Callable[[slice, int], Array]
SMALL_CHUNKS = replace(PAPER, C=2)
_coattention, _edges = _CrystalStages.coattention, CoAttention.edges


@beyond("32 earlier keys", cross_neighbours, "CC-CROSS", lambda: (ramp(2, 40), PAPER))
def sources_among_32_keys(earlier: Array, parameters: CrystalCacheParameters) -> tuple[Array, Array]:
    """One tile of 32 earlier keys is searched for sources."""
    return cross_neighbours(earlier[:, :32], parameters)


@beyond("128 earlier keys", cross_neighbours, "CC-CROSS", lambda: (ramp(2, 140), PAPER))
def sources_among_128_keys(earlier: Array, parameters: CrystalCacheParameters) -> tuple[Array, Array]:
    """One tile of 128 earlier keys is searched for sources."""
    return cross_neighbours(earlier[:, :128], parameters)


@beyond("64 earlier keys", cross_neighbours, "CC-CROSS", lambda: (np.full((1, 70), 0.5), PAPER))
def key_0_is_no_source_behind_64(earlier: Array, parameters: CrystalCacheParameters) -> tuple[Array, Array]:
    """Behind 64 keys the search begins at key 1."""
    if earlier.shape[1] <= 64:
        return cross_neighbours(earlier, parameters)
    return cross_neighbours(np.where(np.arange(earlier.shape[1]) == 0, 0.0, earlier), parameters)


@beyond("three sources", cross_neighbours, "CC-CROSS", lambda: (ramp(2, 8), PAPER))
def the_fourth_source_is_lost(earlier: Array, parameters: CrystalCacheParameters) -> tuple[Array, Array]:
    """A row has room for three sources: the fourth of k_cross is dropped."""
    index, weight = cross_neighbours(earlier, parameters)
    index[:, 3:], weight[:, 3:] = -1, 0.0
    return index, weight


def ties_reversed(weights: Array, k: int, tau: float) -> tuple[Array, Array]:
    """`strongest` with the higher column first on a tie."""
    index, weight = strongest(weights[:, ::-1], k, tau)
    return np.where(index >= 0, weights.shape[1] - 1 - index, -1), weight


@beyond("32 earlier keys", cross_neighbours, "CC-CROSS", lambda: (np.full((1, 40), 0.5), PAPER))
def late_sources_first_above_32_keys(earlier: Array, parameters: CrystalCacheParameters) -> tuple[Array, Array]:
    """Above 32 columns the sort is not stable: of equal sources the later key wins."""
    if earlier.shape[1] <= 32:
        return cross_neighbours(earlier, parameters)
    return ties_reversed(earlier, parameters.k_cross, parameters.tau_cross)


@beyond("32 tokens of a chunk", intra_neighbours, "CC-INTRA", lambda: (np.full((40, 40), 40**-0.5), PAPER))
def late_neighbours_first_above_32(rows: Array, parameters: CrystalCacheParameters) -> tuple[Array, Array]:
    """Above 32 columns the sort is not stable: of equal neighbours the later token wins."""
    if len(rows) <= 32:
        return intra_neighbours(rows, parameters)
    cosine = np.matmul(rows, rows.T)
    np.fill_diagonal(cosine, -1.0)
    return ties_reversed(cosine, parameters.k_intra, parameters.tau_intra)


@beyond(
    "weights that float32 tells from tau", cross_neighbours, "CC-CROSS",
    lambda: (np.full((1, 2), PAPER.tau_cross * (1 + 1e-12)), PAPER),
)
def tau_in_double_precision(earlier: Array, parameters: CrystalCacheParameters) -> tuple[Array, Array]:
    """The weight itself is compared with tau, not its float32: one just above tau passes."""
    index, weight = strongest(earlier, parameters.k_cross, -1.0)
    passes = weight > parameters.tau_cross
    return np.where(passes, index, -1), np.where(passes, weight, 0.0)


@beyond("256 tokens of a chunk", intra_neighbours, "CC-INTRA", lambda: (np.full((260, 260), 260**-0.5), PAPER))
def rows_beyond_256_stay_empty(rows: Array, parameters: CrystalCacheParameters) -> tuple[Array, Array]:
    """A block of 256 threads has a row each: later tokens of the chunk get no neighbour."""
    index, weight = intra_neighbours(rows, parameters)
    index[256:], weight[256:] = -1, 0.0
    return index, weight


@beyond("64 tokens of a chunk", row_normalise, "CC-ROW-NORM", lambda: (random_rows(70, 70), PAPER.epsilon))
def norm_of_64_columns(A: Array, epsilon: float) -> Array:
    """The norm of a row is taken over its first 64 columns."""
    norm = np.sqrt((A[:, :64] * A[:, :64]).sum(axis=1, keepdims=True))
    rows: Array = A / (norm + epsilon)
    return rows


@beyond("16 heads", salience, "CC-SALIENCE", lambda: (random_rows(32, 4, 4), PAPER))
def best_of_16_heads(own: Array, parameters: CrystalCacheParameters) -> Array:
    """The top heads are sought among the first 16."""
    return salience(own[:16], parameters)


@beyond("four heads of a token", salience, "CC-SALIENCE", lambda: (random_rows(8, 4, 4), replace(PAPER, k_heads=6)))
def at_most_four_heads_summed(own: Array, parameters: CrystalCacheParameters) -> Array:
    """The running top list has four places, whatever k_heads asks for."""
    return salience(own, replace(parameters, k_heads=min(4, parameters.k_heads)))


@beyond("128 queries of a chunk", salience, "CC-SALIENCE", lambda: (random_rows(3, 140, 140) / 140, PAPER))
def first_128_queries_counted(own: Array, parameters: CrystalCacheParameters) -> Array:
    """The column sum stops after a tile of 128 queries."""
    return salience(np.where(np.arange(own.shape[1])[:, None] < 128, own, 0.0), parameters)


@beyond("16 heads", mean_salience, "CC-MEAN-SALIENCE", lambda: (random_rows(24, 4, 4), PAPER))
def mean_of_the_best_of_16_heads(own: Array, parameters: CrystalCacheParameters) -> Array:
    """The essay's top heads are sought among the first 16."""
    return mean_salience(own[:16], parameters)


@beyond("two KV heads", attention, "CC-ATTENTION", lambda: attended(6, 6, 3))
def three_kv_heads_interleaved(
    q: Array, k: Array, query_positions: Array, key_positions: Array, scaling: float, softcap: float | None,
) -> Array:
    """From three KV heads on, query head h reads KV head h modulo H_kv."""
    shared = k if len(k) < 3 else np.tile(k, (len(q) // len(k), 1, 1))
    return attention(q, shared, query_positions, key_positions, scaling, softcap)


@beyond("position 63", attention, "CC-ATTENTION", lambda: attended(70, 2, 1))
def key_0_hidden_from_position_64(
    q: Array, k: Array, query_positions: Array, key_positions: Array, scaling: float, softcap: float | None,
) -> Array:
    """The second block of 64 queries starts its keys at 1."""
    A = attention(q, k, query_positions, key_positions, scaling, softcap)
    late = np.flatnonzero(query_positions >= 64)
    if len(late):
        rows = np.where(key_positions == 0, 0.0, A[:, late])
        A[:, late] = rows / rows.sum(axis=2, keepdims=True)
    return A


@beyond("256 keys", attention, "CC-ATTENTION", lambda: attended(300, 2, 1))
def denominator_of_256_keys(
    q: Array, k: Array, query_positions: Array, key_positions: Array, scaling: float, softcap: float | None,
) -> Array:
    """The softmax's denominator is summed over the first 256 keys."""
    A = attention(q, k, query_positions, key_positions, scaling, softcap)
    if A.shape[2] > 256:
        A = A / A[:, :, :256].sum(axis=2, keepdims=True)
    return A


def composed(attend: Attend, n: int, positions: Array, parameters: CrystalCacheParameters) -> CoAttention:
    """S1 of a segment from the weights of each of its chunks: `attend` of the rows and of the number of keys."""
    before, S = len(positions) - n, np.empty(n)
    index: dict[str, list[Array]] = {"intra": [], "cross": []}
    weight: dict[str, list[Array]] = {"intra": [], "cross": []}
    for c in range(0, n, parameters.C):
        rows = slice(c, min(c + parameters.C, n))
        first, last = before + rows.start, before + rows.stop
        A = attend(rows, last)
        S[rows] = (salience if parameters.heads == "sum" else mean_salience)(A[:, :, first:], parameters)
        mean = A.mean(axis=0)
        found = {
            "intra": (intra_neighbours(row_normalise(mean[:, first:], parameters.epsilon), parameters), first),
            "cross": (cross_neighbours(mean[:, :first], parameters), 0),
        }
        for kind, ((columns, weights), offset) in found.items():
            index[kind].append(np.where(columns >= 0, positions[columns + offset * (columns >= 0)], -1))
            weight[kind].append(weights)
    intra, cross = (
        (np.concatenate(index[kind]), np.concatenate(weight[kind])) for kind in ("intra", "cross")
    )
    return CoAttention(int(positions[before]), S, *intra, *cross)


@beyond("16 heads", coattention, "CC-COATTENTION", lambda: segment(12, 32, 8, SMALL_CHUNKS))
def mean_of_16_heads(
    q: Array, k: Array, positions: Array, parameters: CrystalCacheParameters, scaling: float,
    softcap: float | None,
) -> CoAttention:
    """The mean of the heads, from which neighbours and sources come, is taken over the first 16."""
    found = coattention(q, k, positions, parameters, scaling, softcap)
    if len(q) <= 16:
        return found
    shared = np.repeat(k, len(q) // len(k), axis=0)[:16]
    fewer = coattention(q[:16], shared, positions, parameters, scaling, softcap)
    return replace(fewer, salience=found.salience)


@beyond("64 chunks", coattention, "CC-COATTENTION", lambda: segment(140, 2, 1, SMALL_CHUNKS))
def chunks_beyond_64_have_no_sources(
    q: Array, k: Array, positions: Array, parameters: CrystalCacheParameters, scaling: float,
    softcap: float | None,
) -> CoAttention:
    """The table of chunks has 64 rows: tokens of later chunks get no cross sources."""
    found = coattention(q, k, positions, parameters, scaling, softcap)
    found.cross[64 * parameters.C :], found.cross_weight[64 * parameters.C :] = -1, 0.0
    return found


def with_lse(stages: Any) -> tuple[Any, ...]:
    """Three KV heads of two query heads each, and the right lse."""
    q, k, places, parameters, scaling, softcap = segment(8, 6, 3, SMALL_CHUNKS)
    logits = np.matmul(q, np.repeat(k, 2, axis=0).transpose(0, 2, 1)) * scaling
    seen = np.where(places <= places[:, None], np.exp(logits), 0.0)
    return stages, q, k, places, parameters, scaling, softcap, np.log(seen.sum(axis=2))


@beyond("two KV heads", _coattention, "CC-COATTENTION", lambda: with_lse(BACKEND.crystal))
def lse_of_three_kv_heads_interleaved(
    stages: Any, q: Any, k: Any, positions: Array, parameters: CrystalCacheParameters, scaling: float,
    softcap: float | None, lse: Any = None, /,
) -> CoAttention:
    """From three KV heads on, a given lse is read in the order of the groups' members."""
    found: CoAttention = _coattention(stages, q, k, positions, parameters, scaling, softcap, lse)
    if lse is None or len(k) < 3:
        return found
    before, wide_q, wide_k = k.shape[1] - q.shape[1], q.astype(np.float64), k.astype(np.float64)
    swapped = lse.reshape(len(k), -1, lse.shape[1]).transpose(1, 0, 2).reshape(lse.shape)

    def attend(rows: slice, last: int) -> Array:
        asked = positions[before:][rows]
        A = attention(wide_q[:, rows], wide_k[:, :last], asked, positions[:last], scaling, softcap)
        scaled: Array = A * np.exp(lse[:, rows] - swapped[:, rows])[:, :, None]
        return scaled

    return composed(attend, q.shape[1], positions, parameters)


@beyond("positions below 2^31", _edges, "CC-EDGES", lambda: (one_sided(3, 1, 2**31),))
def positions_in_32_bits(record: CoAttention) -> Edges:
    """Endpoints of edges are held in 32 bits."""
    first, second, weight = _edges(record)
    return Edges(first.astype(np.int32).astype(np.int64), second.astype(np.int32).astype(np.int64), weight)


@beyond("65 536 tokens", _edges, "CC-EDGES", lambda: (one_sided(2**16 + 2, 1),))
def owners_in_16_bits(record: CoAttention) -> Edges:
    """The owner's row is held in 16 bits."""
    first, second, weight = _edges(record)
    own = np.count_nonzero(record.intra >= 0)
    row = first[:own] - record.start
    return Edges(np.concatenate([row % 2**16 + record.start, first[own:]]), second, weight)
