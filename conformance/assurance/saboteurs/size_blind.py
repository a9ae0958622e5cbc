"""Saboteurs by size of other kinds than limits and widths: what changes its way of working on large inputs.

Blocks that do not meet, algorithms that are switched, state that is read too late, hashes that collide. They were
written before the suite judged at size, and apart from those tests.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from conformance.assurance.saboteurs.registry import Array, beyond
from conformance.assurance.saboteurs.size_inputs import (
    attended,
    equal_trunks,
    given_by,
    live_state,
    random_rows,
    scored,
    segment,
    star,
    whole_line,
)
from reference.crystalcache.coattention import attention, coattention, cross_neighbours, intra_neighbours, salience
from reference.crystalcache.dissolution import Allocation, allocate, carried_out
from reference.crystalcache.graph import TrunkPairs, trunk_pairs
from reference.crystalcache.hebbian import hebbian
from reference.crystalcache.impact import token_counts
from reference.crystalcache.live import keep
from reference.crystalcache.resonance import pulses, raised, resonance
from reference.crystalcache.score import normalised_impact
from reference.crystalcache.trunks import interface_weights, trunk_offsets
from reference.diversity import diverse as greedy
from reference.nestedkv import current_memory
from reference.policies.attention import average_pool
from reference.policies.selectors import top_units
from spec.decode import DecodeState, TrunkWeights
from spec.parameters import PAPER, CrystalCacheParameters
from spec.policy import Scores, Selection
from spec.records import CoAttention, Dissolution, Edges

__all__: list[str] = []

Parameters = CrystalCacheParameters


@beyond("one block of 64 queries", attention, "CC-ATTENTION", lambda: attended(100, 2, 1))
def later_blocks_do_not_see_themselves(
    q: Array, k: Array, query_positions: Array, key_positions: Array, scaling: float, softcap: float | None,
) -> Array:
    """From the second block of 64 queries on the diagonal tile is masked strictly: no query sees its own key."""
    A = attention(q, k, query_positions, key_positions, scaling, softcap)
    later = np.arange(len(query_positions)) >= 64
    alone = later[:, None] & (key_positions == query_positions[:, None])
    rows = np.where(alone, 0.0, A)
    return np.where(later[:, None], rows / rows.sum(axis=2, keepdims=True), A)


@beyond("one tile of 64 keys", attention, "CC-ATTENTION", lambda: attended(150, 2, 1))
def tiles_are_not_rescaled(
    q: Array, k: Array, query_positions: Array, key_positions: Array, scaling: float, softcap: float | None,
) -> Array:
    """Softmax over tiles of 64 keys: when a later tile has a higher logit, the running sum is not rescaled."""
    A = attention(q, k, query_positions, key_positions, scaling, softcap)
    tiles = [A[:, :, at : at + 64] for at in range(0, A.shape[2], 64)]
    peaks = np.maximum.accumulate([tile.max(axis=2) for tile in tiles], axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        total = sum(tile.sum(axis=2) * (peaks[-1] / peak) for tile, peak in zip(tiles, peaks, strict=True))
    rows: Array = A / total[:, :, None] if len(tiles) > 1 else A
    return rows


@beyond("64 queries of a chunk", salience, "CC-SALIENCE", lambda: (random_rows(3, 100, 100) / 100, PAPER))
def the_last_tile_counts_twice(own: Array, parameters: Parameters) -> Array:
    """Column sums go by tiles of 64 queries; an incomplete last one is moved back, and overlaps."""
    Q = own.shape[1]
    if Q <= 64 or Q % 64 == 0:
        return salience(own, parameters)
    times = np.ones((Q, 1))
    times[Q - 64 : Q // 64 * 64] = 2.0
    return salience(own * times, parameters)


@beyond("distances of 128", intra_neighbours, "CC-INTRA", lambda: (np.eye(300)[np.arange(300) // 100 % 2], PAPER))
def neighbours_within_a_band(rows: Array, parameters: Parameters) -> tuple[Array, Array]:
    """Cosines are computed in a band about the diagonal: tokens 128 apart are never compared."""
    if len(rows) <= 128:
        return intra_neighbours(rows, parameters)
    index, weight = intra_neighbours(rows, replace(parameters, k_intra=len(rows)))
    near = (index >= 0) & (np.abs(index - np.arange(len(rows))[:, None]) < 128)
    order = np.argsort(~near, axis=1, kind="stable")[:, : parameters.k_intra]
    width = ((0, 0), (0, parameters.k_intra - order.shape[1]))
    found = np.take_along_axis(np.where(near, index, -1), order, axis=1)
    values = np.take_along_axis(np.where(near, weight, 0.0), order, axis=1)
    return np.pad(found, width, constant_values=-1), np.pad(values, width)


@beyond("one tile of 128 keys", cross_neighbours, "CC-CROSS", lambda: (np.tile(np.arange(200, 0, -1.0), (2, 1)), PAPER))
def each_tile_nominates_two(earlier: Array, parameters: Parameters) -> tuple[Array, Array]:
    """Beyond 128 keys a tile of 128 nominates its two best sources, and the best of these are taken."""
    if earlier.shape[1] <= 128:
        return cross_neighbours(earlier, parameters)
    nominated = np.zeros_like(earlier)
    for at in range(0, earlier.shape[1], 128):
        tile = earlier[:, at : at + 128]
        best = np.argsort(-tile.astype(np.float32), axis=1, kind="stable")[:, :2]
        np.put_along_axis(nominated[:, at : at + 128], best, np.take_along_axis(tile, best, axis=1), axis=1)
    return cross_neighbours(nominated, parameters)


@beyond("32 chunks", coattention, "CC-COATTENTION", lambda: segment(80, 2, 1, replace(PAPER, C=2)))
def a_ring_of_32_chunks(
    q: Array, k: Array, positions: Array, parameters: Parameters, scaling: float, softcap: float | None,
) -> CoAttention:
    """Sources are sought in the last 32 chunks: a ring overwrites what is older."""
    if q.shape[1] <= 32 * parameters.C:
        return coattention(q, k, positions, parameters, scaling, softcap)
    found = coattention(q, k, positions, replace(parameters, k_cross=k.shape[1]), scaling, softcap)
    before = k.shape[1] - q.shape[1]
    oldest = before + (np.arange(q.shape[1]) // parameters.C - 32) * parameters.C
    near = (found.cross >= 0) & (found.cross >= positions[np.maximum(0, oldest)][:, None])
    order = np.argsort(~near, axis=1, kind="stable")[:, : parameters.k_cross]
    cross = np.take_along_axis(np.where(near, found.cross, -1), order, axis=1)
    weight = np.take_along_axis(np.where(near, found.cross_weight, 0.0), order, axis=1)
    width = ((0, 0), (0, parameters.k_cross - order.shape[1]))
    return replace(found, cross=np.pad(cross, width, constant_values=-1), cross_weight=np.pad(weight, width))


@beyond("one block of 512 tokens", trunk_offsets, "CC-TRUNKS", lambda: (
    whole_line(1200, 25), given_by([(1, 2, 0.5)]), 0, PAPER,
))
def blocks_of_512_tokens_do_not_meet(ends: Array, edges: Edges, start: int, parameters: Parameters) -> Array:
    """Trunks are cut block by block of 512 tokens: none reaches across."""
    if len(ends) <= 512:
        return trunk_offsets(ends, edges, start, parameters)
    parts = [
        trunk_offsets(ends[at : at + 512], edges, start + at, parameters) for at in range(0, len(ends), 512)
    ]
    return np.concatenate([parts[0], *(part[1:] for part in parts[1:])])


@beyond("4 096 edges", interface_weights, "CC-INTERFACE-EDGES", lambda: (
    {(at, at + 33): 0.5 for at in range(5000)}, (range(95, 100), range(100, 105)),
))
def pairs_that_share_a_slot(edges: dict[tuple[int, int], float], P: tuple[range, range]) -> Array:
    """Above 4 096 edges a pair is looked up by its slot of a hash table, not by itself."""
    if len(edges) <= 4096:
        return interface_weights(edges, P)
    table = {(31 * a + b) % 2**16: weight for (a, b), weight in edges.items()}
    slots = [(31 * a + b) % 2**16 for a, b in itertools.product(*P)]
    return np.array([table[slot] for slot in slots if slot in table], dtype=np.float64)


@beyond("1 024 distinct ids", token_counts, "CC-COUNT", lambda: (np.arange(2100) % 1050 * 1024,))
def a_full_table_counts_nothing_new(token_ids: Array) -> Array:
    """The table of ids has 1 024 places: an id that comes when it is full counts once."""
    counts = token_counts(token_ids)
    ids, first = np.unique(token_ids, return_index=True)
    late = ids[np.argsort(first, kind="stable")[1024:]]
    return np.where(np.isin(token_ids, late), 1, counts)


@beyond("1 024 edges", trunk_pairs, "CC-TRUNK-EDGES", lambda: (
    given_by([(at % 40, 40 + at % 39, 0.5) for at in range(1100)]), equal_trunks(2, 40),
))
def batches_of_1024_edges_do_not_add_up(edges: Edges, offsets: Array) -> TrunkPairs:
    """Edges are read in batches of 1 024: what a later batch finds for a pair replaces what was there."""
    found = trunk_pairs(edges, offsets)
    number, total, m = found.edges.copy(), found.total.copy(), len(offsets) - 1
    key = found.a * m + found.b
    for at in range(1024, len(edges.first), 1024):
        own_edges = slice(at, at + 1024)
        batch = trunk_pairs(
            Edges(edges.first[own_edges], edges.second[own_edges], edges.weight[own_edges]), offsets
        )
        own = np.searchsorted(key, batch.a * m + batch.b)
        number[own], total[own] = batch.edges, batch.total
    return found._replace(edges=number, total=total)


@beyond("32 trunks", normalised_impact, "CC-NORMALISED-IMPACT", lambda: (
    1 + np.arange(80.0), np.zeros(80, dtype=np.bool_), 1e-8,
))
def each_block_of_32_is_normalised(M_bar: Array, protected: Array, epsilon: float) -> Array:
    """The bounds are those of a trunk's own block of 32."""
    if len(M_bar) <= 32:
        return normalised_impact(M_bar, protected, epsilon)
    return np.concatenate([
        normalised_impact(M_bar[at : at + 32], protected[at : at + 32], epsilon) for at in range(0, len(M_bar), 32)
    ])


def nearly_tied(m: int) -> tuple[Any, ...]:
    """Scores that fall by less than float32 can tell, so that the last trunk goes first."""
    score = 0.5 - np.arange(m) * 1e-12
    return (
        allocate, score, equal_trunks(m, 3), np.ones(3 * m), np.ones(m), np.zeros(m, dtype=np.bool_), 3 * m - 9, 3,
    )


@beyond("32 trunks", carried_out, "CC-DISSOLVE", lambda: nearly_tied(50))
def a_radix_sort_of_single_precision(
    allocation: Allocation, score: Array, offsets: Array, M: Array, D: Array, protected: Array, B: int, N_min: int,
) -> Dissolution:
    """Above 32 trunks scores are sorted by their float32 bits."""
    keys = score.astype(np.float32).astype(np.float64) if len(score) > 32 else score
    return carried_out(allocation, keys, offsets, M, D, protected, B, N_min)


@beyond("one block of 32 trunks", allocate, "CC-ALLOCATE", lambda: (np.full(50, 5), 5 * 34, 3))
def the_carry_lacks_a_trunk(sizes: Array, c_0: int, N_min: int) -> Array:
    """Sizes are summed in blocks of 32, and what is carried to the next block lacks the last trunk of this one."""
    r, c = np.ones(len(sizes)), c_0
    for at in range(0, len(sizes), 32):
        block = sizes[at : at + 32]
        r[at : at + 32] = allocate(block, max(0, c), N_min)
        c -= round(float(((1 - r[at : at + 32]) * block).sum()))
        c += int(block[-1]) if c > 0 else 0
    return r


@beyond("32 active trunks", resonance, "CC-RESONANCE", lambda: (
    np.full(70, 0.5), star(70), np.ones(70, dtype=np.bool_), PAPER,
))
def sources_side_by_side(D: Array, W: TrunkWeights, active: Array, parameters: Parameters) -> Array:
    """Beyond 32 active trunks, those that follow read D as it was after the first 32: the strongest pulse wins."""
    sources = np.flatnonzero(active)
    first = resonance(D, W, np.isin(np.arange(len(D)), sources[:32]), parameters)
    late = [raised(first, pulses(source, W, parameters), parameters.alpha_res) for source in sources[32:].tolist()]
    return np.max(late, axis=0) if late else first


@beyond("32 trunks", hebbian, "CC-HEBB", lambda: (star(40), np.arange(40) != 3, PAPER))
def flags_of_the_row_s_block(W: TrunkWeights, active: Array, parameters: Parameters) -> TrunkWeights:
    """A block of 32 trunks that holds an active one counts as active, where there is more than one block."""
    if len(active) <= 32:
        return hebbian(W, active, parameters)
    blocks = np.logical_or.reduceat(active, np.arange(0, len(active), 32))
    return hebbian(W, np.repeat(blocks, 32)[: len(active)], parameters)


@beyond("256 live tokens", keep, "CC-LIVE", lambda: (live_state(3, 100), np.arange(7, 290), random_rows(3)))
def norms_of_a_block_are_not_moved(state: DecodeState, slots: Array, D: Array) -> DecodeState:
    """Above 256 kept tokens, norms are gathered in place, and slots that were overwritten are read."""
    after = keep(state, slots, D)
    if len(slots) <= 256:
        return after
    norms = state.live.inverse_norms.copy()
    for at in range(len(slots) - 1, -1, -1):
        norms[at] = norms[slots[at]]
    return replace(after, live=replace(after.live, inverse_norms=norms[: len(slots)]))


@beyond("64 units", top_units, "PO-TOP-UNITS", lambda: (
    scored(1 + np.arange(200.0)[None] / 1e4), np.array([50]), np.zeros(200, dtype=np.bool_),
))
def a_histogram_of_scores(scores: Scores, budgets: Array, protected: Array) -> Selection:
    """Above 64 units scores are sorted into 64 bins, and those of one bin are taken as tied."""
    values = scores.values
    if values.shape[1] <= 64 or not np.isfinite(values).any():
        return top_units(scores, budgets, protected)
    low, high = np.nanmin(values), np.nanmax(values)
    bins = np.floor((values - low) / (high - low or 1.0) * 63)
    return top_units(replace(scores, values=bins), budgets, protected)


@beyond("64 tokens", greedy, "DV-GREEDY", lambda: (
    random_rows(200) - np.arange(200) % 2, np.eye(2)[np.arange(200) % 2], np.zeros(200, dtype=np.bool_), 40, 2.0,
))
def only_the_front_is_brought_up_to_date(s: Array, V: Array, retained: Array, k: int, lam: float) -> Array:
    """Above 64 tokens the choice goes on among the 2 k best by score alone."""
    if len(s) <= 64:
        return greedy(s, V, retained, k, lam)
    worth = np.where(retained, np.inf, np.where(np.isnan(s), -np.inf, s))
    front = np.sort(np.argsort(-worth, kind="stable")[: 2 * k])
    chosen: Array = front[greedy(s[front], V[front], retained[front], k, lam)]
    return chosen


@beyond("one block of 1 024 keys", current_memory, "NK-CURRENT", lambda: (random_rows(1, 1100, 2), 64))
def running_sums_begin_anew(unit: Array, W: int) -> Array:
    """Running sums begin anew every 1 024 keys, and so does the window."""
    if unit.shape[1] <= 1024:
        return current_memory(unit, W)
    return np.concatenate([
        current_memory(unit[:, at : at + 1024], W) for at in range(0, unit.shape[1], 1024)
    ], axis=1)


@beyond("one block of 256 entries", average_pool, "PO-POOL", lambda: (random_rows(1, 300), 7))
def pooling_stops_at_a_block(x: Array, kernel: int) -> Array:
    """Averages are taken in blocks of 256 entries: at a block's edge there seems to be nothing beyond."""
    if x.shape[1] <= 256:
        return average_pool(x, kernel)
    parts: Sequence[Array] = [average_pool(x[:, at : at + 256], kernel) for at in range(0, x.shape[1], 256)]
    return np.concatenate(parts, axis=1)
