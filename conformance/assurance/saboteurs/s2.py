"""S2: wrong readings of sentences, interfaces, merging and splitting."""

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np

from conformance.assurance.saboteurs.registry import Array, instead_of
from reference.crystalcache.sentences import sentence_offsets
from reference.crystalcache.trunks import (
    interface,
    interface_weights,
    merge_sentences,
    merges,
    split_sizes,
    trunk_offsets,
)
from reference.ordered import left_to_right_sum
from spec.parameters import CrystalCacheParameters
from spec.records import Edges

__all__: list[str] = []

Weights = dict[tuple[int, int], float]
Sides = tuple[range, range]


@instead_of(sentence_offsets, "CC-SENTENCES")
def an_end_begins_the_next(ends: Array) -> Array:
    """The token that ends a sentence is the first of the next one."""
    stops = np.flatnonzero(ends)
    return np.unique(np.concatenate([[0], stops, [len(ends)]])).astype(np.int64)


@instead_of(sentence_offsets, "CC-SENTENCES")
def a_run_of_ends_is_one(ends: Array) -> Array:
    """Consecutive ends close one sentence together, as in "..."."""
    last_of_run = ends & ~np.append(ends[1:], False)
    return sentence_offsets(last_of_run)


@instead_of(sentence_offsets, "CC-SENTENCES")
def the_tail_joins_the_last(ends: Array) -> Array:
    """Tokens after the last end belong to the last sentence."""
    found = sentence_offsets(ends)
    joins = len(ends) > 0 and not ends[-1] and len(found) > 2
    return np.delete(found, -2) if joins else found


@instead_of(interface, "CC-INTERFACE")
def windows_of_four(current: tuple[int, int], sentence: tuple[int, int]) -> Sides:
    """Each side has four tokens."""
    before, after = interface(current, sentence)
    return before[-4:], after[:4]


@instead_of(interface, "CC-INTERFACE")
def equal_sides(current: tuple[int, int], sentence: tuple[int, int]) -> Sides:
    """Both sides are as short as the shorter one."""
    before, after = interface(current, sentence)
    width = min(len(before), len(after))
    return before[len(before) - width :], after[:width]


@instead_of(interface, "CC-INTERFACE")
def the_whole_sentence(current: tuple[int, int], sentence: tuple[int, int]) -> Sides:
    """The second side is the whole next sentence."""
    return interface(current, sentence)[0], range(*sentence)


@instead_of(interface_weights, "CC-INTERFACE-EDGES")
def either_orientation(edges: Weights, P: Sides) -> Array:
    """An edge counts in either orientation, a mutual pair once."""
    either = [edges.get((a, b), edges.get((b, a))) for a, b in itertools.product(*P)]
    return np.array([w for w in either if w is not None], dtype=np.float64)


@instead_of(interface_weights, "CC-INTERFACE-EDGES")
def both_orientations(edges: Weights, P: Sides) -> Array:
    """An edge counts in either orientation, a mutual pair twice."""
    pairs = [pair for a, b in itertools.product(*P) for pair in ((a, b), (b, a))]
    return np.array([edges[pair] for pair in pairs if pair in edges], dtype=np.float64)


@instead_of(interface_weights, "CC-INTERFACE-EDGES")
def by_the_second_endpoint(edges: Weights, P: Sides) -> Array:
    """The weights stand by second endpoint, then by first."""
    found = [edges[a, b] for b, a in itertools.product(P[1], P[0]) if (a, b) in edges]
    return np.array(found, dtype=np.float64)


@instead_of(merges, "CC-MERGE")
def mean_compared(weights: Array, size: int, next_size: int, parameters: CrystalCacheParameters) -> bool:
    """The mean is divided out and compared with tau_merge."""
    mean = left_to_right_sum(weights) / len(weights) if len(weights) else 0.0
    return size + next_size <= parameters.T_max and mean > parameters.tau_merge


@instead_of(merges, "CC-MERGE")
def sum_rounded_once(weights: Array, size: int, next_size: int, parameters: CrystalCacheParameters) -> bool:
    """The sum is taken as by math.fsum."""
    fits = size + next_size <= parameters.T_max
    return fits and math.fsum(weights) - parameters.tau_merge * len(weights) > 0


@instead_of(merges, "CC-MERGE")
def strength_equal_to_tau(
    weights: Array, size: int, next_size: int, parameters: CrystalCacheParameters,
) -> bool:
    """A strength equal to tau_merge merges."""
    fits = size + next_size <= parameters.T_max
    enough = left_to_right_sum(weights) - parameters.tau_merge * len(weights) >= 0
    return fits and len(weights) > 0 and enough


@instead_of(merges, "CC-MERGE")
def no_edge_suffices(weights: Array, size: int, next_size: int, parameters: CrystalCacheParameters) -> bool:
    """With tau_merge = 0 an interface without an edge merges."""
    fits = size + next_size <= parameters.T_max
    return merges(weights, size, next_size, parameters) or (
        fits and len(weights) == 0 and parameters.tau_merge == 0
    )


@instead_of(merges, "CC-MERGE")
def below_T_max(weights: Array, size: int, next_size: int, parameters: CrystalCacheParameters) -> bool:
    """Trunk and sentence together must stay below T_max."""
    fits = size + next_size < parameters.T_max
    return fits and merges(weights, size, next_size, parameters)


@instead_of(merges, "CC-MERGE")
def in_single_precision(
    weights: Array, size: int, next_size: int, parameters: CrystalCacheParameters,
) -> bool:
    """Weights and tau_merge are compared as float32."""
    tau = replace(parameters, tau_merge=float(np.float32(parameters.tau_merge)))
    return merges(weights.astype(np.float32).astype(np.float64), size, next_size, tau)


@instead_of(split_sizes, "CC-SPLIT")
def steps_of_the_ceiling(size: int, T_max: int) -> list[int]:
    """Pieces of ceil(|g| / k), the last one shorter."""
    step = -(-size // -(-size // T_max))
    return [min(step, size - at) for at in range(0, size, step)]


@instead_of(split_sizes, "CC-SPLIT")
def blocks_of_T_max(size: int, T_max: int) -> list[int]:
    """Blocks of T_max, the last one shorter."""
    return [min(T_max, size - at) for at in range(0, size, T_max)]


@instead_of(split_sizes, "CC-SPLIT")
def rest_in_the_last(size: int, T_max: int) -> list[int]:
    """Steps of floor(|g| / k); the last piece takes the rest, above T_max if need be."""
    pieces = -(-size // T_max)
    step = size // pieces
    return [step] * (pieces - 1) + [size - step * (pieces - 1)]


@instead_of(split_sizes, "CC-SPLIT")
def smaller_pieces_first(size: int, T_max: int) -> list[int]:
    """The smaller pieces come first."""
    return split_sizes(size, T_max)[::-1]


def weights_by_pair(edges: Edges) -> Weights:
    columns: list[list[Any]] = [column.tolist() for column in edges]
    return {(a, b): w for a, b, w in zip(*columns, strict=True)}


def offsets_of(start: int, merged: list[int], T_max: int) -> Array:
    sizes = [piece for size in merged for piece in split_sizes(size, T_max)]
    return np.cumsum([start, *sizes]).astype(np.int64)


@instead_of(trunk_offsets, "CC-TRUNKS")
def split_before_merging(ends: Array, edges: Edges, start: int, parameters: CrystalCacheParameters) -> Array:
    """Long sentences are split first, and their pieces may merge again."""
    pieces = offsets_of(start, np.diff(sentence_offsets(ends)).tolist(), parameters.T_max)
    return offsets_of(start, merge_sentences(pieces, weights_by_pair(edges), parameters), parameters.T_max)


@instead_of(trunk_offsets, "CC-TRUNKS")
def merged_until_stable(ends: Array, edges: Edges, start: int, parameters: CrystalCacheParameters) -> Array:
    """The pass is repeated until nothing merges."""
    sizes = np.diff(sentence_offsets(ends)).tolist()
    while True:
        bounds = np.cumsum([start, *sizes])
        merged = merge_sentences(bounds, weights_by_pair(edges), parameters)
        if merged == sizes:
            return offsets_of(start, sizes, parameters.T_max)
        sizes = merged


@instead_of(trunk_offsets, "CC-TRUNKS")
def edges_of_the_first_segment(
    ends: Array, edges: Edges, start: int, parameters: CrystalCacheParameters,
) -> Array:
    """Sentences are looked up from position 0, so that a later segment finds no edge of its own."""
    return trunk_offsets(ends, edges, 0, parameters) + start


@instead_of(merge_sentences, "CC-TRUNKS")
def compared_with_the_last_sentence(
    sentences: Array, edges: Weights, parameters: CrystalCacheParameters,
) -> list[int]:
    """The next sentence is compared with the one before it, not with the trunk that is running."""
    bounds = list(itertools.pairwise(sentences.tolist()))
    sizes = [bounds[0][1] - bounds[0][0]]
    for last, following in itertools.pairwise(bounds):
        size = following[1] - following[0]
        if merges(interface_weights(edges, interface(last, following)), sizes[-1], size, parameters):
            sizes[-1] += size
        else:
            sizes.append(size)
    return sizes


@instead_of(merge_sentences, "CC-TRUNKS")
def a_refused_sentence_stands_alone(
    sentences: Array, edges: Weights, parameters: CrystalCacheParameters,
) -> list[int]:
    """A sentence that does not merge is committed alone; the next one starts afresh."""
    sizes: list[int] = []
    running = False
    for start, stop in itertools.pairwise(sentences.tolist()):
        current = (start - sizes[-1], start) if running else (start, start)
        weights = interface_weights(edges, interface(current, (start, stop)))
        if running and merges(weights, sizes[-1], stop - start, parameters):
            sizes[-1] += stop - start
        else:
            sizes.append(stop - start)
            running = not running
    return sizes
