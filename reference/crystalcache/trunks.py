"""S2: trunks, the contiguous units of eviction (Section 3.3)."""

import itertools
import math
from dataclasses import replace

import numpy as np

from reference.crystalcache.sentences import sentence_offsets
from reference.ordered import left_to_right_sum
from spec.arrays import Bool, BoolVector, Float64, Int64, IntVector, Vector
from spec.parameters import CrystalCacheParameters
from spec.records import Edges

__all__ = [
    "interface", "interface_weights", "median_strength", "merge_sentences", "merges", "split_sizes", "trunk_offsets",
]

WINDOW = 5  # Eq. 16 fixes it


def interface(current: tuple[int, int], sentence: tuple[int, int]) -> tuple[range, range]:
    """P: the last five tokens of the running trunk and the first five of the next sentence.

    Implements: CC-INTERFACE

    Source: Eq. 16. Each side is given as (start, stop); a shorter side is taken whole.
    """
    return (
        range(max(current[0], current[1] - WINDOW), current[1]),
        range(sentence[0], min(sentence[1], sentence[0] + WINDOW)),
    )


def interface_weights(
    edges: dict[tuple[int, int], float], P: tuple[range, range],
) -> Float64[Vector, " edges_in_P"]:
    """Weights of the edges (a, b) with a in the trunk and b in the sentence, by a and then b.

    Implements: CC-INTERFACE-EDGES

    Source: Eq. 17, in its literal orientation: the stored first endpoint lies in the running trunk.
    """
    return np.array([edges[pair] for pair in itertools.product(*P) if pair in edges], dtype=np.float64)


def merges(weights: Float64[Vector, " k"], size: int, next_size: int, parameters: CrystalCacheParameters) -> bool:
    """Whether the sentence joins the trunk: their interface is strong enough and they fit.

    Implements: CC-MERGE

    Source: Eq. 18 and 19. The mean exceeds tau where sum(w) - tau k > 0, so that no division rounds; with no edge the
    strength is 0.
    """
    fits = size + next_size <= parameters.T_max
    return fits and left_to_right_sum(weights) - parameters.tau_merge * len(weights) > 0


def split_sizes(size: int, T_max: int) -> list[int]:
    """Sizes of the ceil(size / T_max) pieces of a trunk; they differ by at most one, larger first.

    Implements: CC-SPLIT

    Source: Section 3.3, Step 3.
    """
    pieces = -(-size // T_max)
    small, larger = divmod(size, pieces)
    return [small + 1] * larger + [small] * (pieces - larger)


def merge_sentences(
    sentences: Int64[IntVector, " M_and_one"], edges: dict[tuple[int, int], float],
    parameters: CrystalCacheParameters,
) -> list[int]:
    """Sizes of the trunks of Step 2: one pass from left to right."""
    start, stop = int(sentences[0]), int(sentences[1])
    sizes = []
    for next_start, next_stop in itertools.pairwise(sentences[1:].tolist()):
        weights = interface_weights(edges, interface((start, stop), (next_start, next_stop)))
        if not merges(weights, stop - start, next_stop - next_start, parameters):
            sizes.append(stop - start)
            start = next_start
        stop = next_stop
    return [*sizes, stop - start]


def median_strength(
    sentences: Int64[IntVector, " M_and_one"], edges: dict[tuple[int, int], float], tau_merge: float,
) -> float:
    """The threshold in place of tau_merge: the lower median of the strengths between neighbouring sentences.

    Implements: CC-ADAPTIVE-MERGE

    Source: the paper's F4. An interface without an edge has strength 0. A quotient that CC-MERGE's products would put
    above itself is taken as the next float. One sentence alone has no interface: tau_merge.
    """
    bounds = sentences.tolist()
    strengths = []
    for start, stop, next_stop in zip(bounds, bounds[1:], bounds[2:], strict=False):
        weights = interface_weights(edges, interface((start, stop), (stop, next_stop)))
        total, k = left_to_right_sum(weights), max(1, len(weights))
        strength = total / k
        strengths.append(strength if total - strength * k <= 0 else math.nextafter(strength, math.inf))
    return sorted(strengths)[(len(strengths) - 1) // 2] if strengths else tau_merge


def trunk_offsets(
    ends: Bool[BoolVector, " n"], edges: Edges, start: int, parameters: CrystalCacheParameters,
) -> Int64[IntVector, " m_and_one"]:
    """S2 over a segment that begins at position `start`: sentences, merged, then split to at most T_max tokens.

    Implements: CC-TRUNKS

    Source: Section 3.3; Algorithm 2, lines 29-43.
    """
    pairs = zip(edges.first.tolist(), edges.second.tolist(), strict=True)
    by_pair = dict(zip(pairs, edges.weight.tolist(), strict=True))
    sentences = sentence_offsets(ends) + start
    if parameters.merge == "median":
        parameters = replace(parameters, tau_merge=median_strength(sentences, by_pair, parameters.tau_merge))
    merged = merge_sentences(sentences, by_pair, parameters)
    sizes = [piece for size in merged for piece in split_sizes(size, parameters.T_max)]
    return np.cumsum([start, *sizes]).astype(np.int64)
