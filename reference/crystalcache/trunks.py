"""S2: trunks, the contiguous units of eviction (Section 3.3)."""

import itertools
import math
from dataclasses import replace

import numpy as np

from reference.crystalcache.sentences import sentence_offsets
from reference.sums import left_to_right_sum
from spec.arrays import Bool, BoolVector, Float64, Int64, IntVector, Vector
from spec.parameters import CrystalCacheParameters
from spec.records import Edges

__all__ = [
    "interface", "interface_weights", "median_strength", "merge_sentences", "merges", "split_sizes", "trunk_offsets",
]

WINDOW = 5  # fixed by Eq. 16


def interface(current: tuple[int, int], sentence: tuple[int, int]) -> tuple[range, range]:
    """Return P: the last five tokens of the current trunk, and the first five tokens of the next sentence.

    Implements: CC-INTERFACE

    Source: Eq. 16. The arguments `current` and `sentence` are position ranges (start, stop). If the trunk or the
    sentence has fewer than five tokens, P contains all of its tokens.
    """
    return (
        range(max(current[0], current[1] - WINDOW), current[1]),
        range(sentence[0], min(sentence[1], sentence[0] + WINDOW)),
    )


def interface_weights(
    edges: dict[tuple[int, int], float], P: tuple[range, range],
) -> Float64[Vector, " edges_in_P"]:
    """Return the weights of P's edges (a, b), sorted by (a, b). Token a is in the trunk, and token b in the sentence.

    Implements: CC-INTERFACE-EDGES

    Source: Eq. 17, taken literally. Only edges whose stored first endpoint is in the current trunk are used.
    """
    return np.array([edges[pair] for pair in itertools.product(*P) if pair in edges], dtype=np.float64)


def merges(weights: Float64[Vector, " k"], size: int, next_size: int, parameters: CrystalCacheParameters) -> bool:
    """Return True if the mean edge weight exceeds tau_merge, and trunk plus sentence have at most T_max tokens.

    Implements: CC-MERGE

    Source: Eq. 18 and 19. To avoid the rounding error of a division, the test is sum(w) - tau_merge k > 0 for k edges.
    Without edges, the mean edge weight is 0.
    """
    fits = size + next_size <= parameters.T_max
    return fits and left_to_right_sum(weights) - parameters.tau_merge * len(weights) > 0


def split_sizes(size: int, T_max: int) -> list[int]:
    """Return the sizes of the ceil(size / T_max) pieces into which a trunk is split, larger pieces first.

    Implements: CC-SPLIT

    Source: Section 3.3, Step 3. The sizes of the pieces differ by at most one token.
    """
    pieces = -(-size // T_max)
    small, larger = divmod(size, pieces)
    return [small + 1] * larger + [small] * (pieces - larger)


def merge_sentences(
    sentences: Int64[IntVector, " M_and_one"], edges: dict[tuple[int, int], float],
    parameters: CrystalCacheParameters,
) -> list[int]:
    """Return the sizes of the trunks after Step 2, which merges sentences in one pass from left to right."""
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
    """Return the adaptive merge threshold: the lower median of the strengths between neighbouring sentences.

    Implements: CC-ADAPTIVE-MERGE

    Source: Section 8, F4. The strength is the mean edge weight of the interface between two sentences, or 0 without
    edges. If rounding would make CC-MERGE merge at a strength equal to the threshold, the next larger float replaces
    this strength. For a single sentence, the threshold is tau_merge.
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
    """Return the trunk offsets of a segment that begins at position `start`.

    S2 finds sentences, merges neighbouring sentences, and splits the merged sentences into trunks of at most T_max
    tokens.

    Implements: CC-TRUNKS

    Source: Section 3.3, and lines 29-43 of Algorithm 2.
    """
    pairs = zip(edges.first.tolist(), edges.second.tolist(), strict=True)
    by_pair = dict(zip(pairs, edges.weight.tolist(), strict=True))
    sentences = sentence_offsets(ends) + start
    if parameters.merge == "median":
        parameters = replace(parameters, tau_merge=median_strength(sentences, by_pair, parameters.tau_merge))
    merged = merge_sentences(sentences, by_pair, parameters)
    sizes = [piece for size in merged for piece in split_sizes(size, parameters.T_max)]
    return np.cumsum([start, *sizes]).astype(np.int64)
