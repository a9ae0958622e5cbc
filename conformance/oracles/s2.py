"""S2 by brute force: sentences, the merge pass and the split (Section 3.3, Algorithm 2, lines 29-43)."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from conformance.oracles import added
from conformance.oracles.s1 import Edge
from spec.parameters import CrystalCacheParameters

# A sentence or a trunk is the list of its positions.
Trunk = list[int]


def sentences(ends: Sequence[bool], start: int = 0) -> list[Trunk]:
    """Return the sentences (step 1).

    An end belongs to the sentence that it ends. Tokens after the last end are one sentence.
    """
    result: list[Trunk] = [[]]
    for i, end in enumerate(ends):
        result[-1].append(start + i)
        if end:
            result.append([])
    return [sentence for sentence in result if sentence]


def last5(trunk: Trunk) -> Trunk:
    """Return the last five positions of a trunk (left side of Eq. 16)."""
    return trunk[-5:]


def first5(sentence: Trunk) -> Trunk:
    """Return the first five positions of a sentence (right side of Eq. 16)."""
    return sentence[:5]


def interface_weights(g_cur: Trunk, s_i: Trunk, E: Sequence[Edge]) -> list[float]:
    """Return the weights of the edges from last5 to first5, sorted by (a, b) (Eq. 17)."""
    inside = [(a, b, w) for a, b, w in E if a in last5(g_cur) and b in first5(s_i)]
    return [w for _, _, w in sorted(inside)]


def merges(weights: Sequence[float], size: int, next_size: int, p: CrystalCacheParameters) -> bool:
    """Return True if Eq. 18 and 19 hold. The comparison with the mean is multiplied by the number of weights."""
    return added(weights) - p.tau_merge * len(weights) > 0 and size + next_size <= p.T_max


def split(trunk: Trunk, T_max: int) -> list[Trunk]:
    """Split a trunk (step 3) into the fewest pieces, of sizes that differ by at most one, larger pieces first."""
    pieces = 1
    while pieces * T_max < len(trunk):
        pieces += 1
    sizes = [0] * pieces
    for token in range(len(trunk)):
        sizes[token % pieces] += 1
    result, at = [], 0
    for size in sizes:
        result.append(trunk[at : at + size])
        at += size
    return result


def median_strength(pieces: Sequence[Trunk], E: Sequence[Edge], tau_merge: float) -> float:
    """Return the lower median of the strengths of interfaces between sentences (F4)."""
    result = []
    for left, right in itertools.pairwise(pieces):
        weights = interface_weights(left, right, E)
        total = added(weights)
        mean = total / len(weights) if weights else 0.0
        result.append(math.nextafter(mean, 9.0) if total > mean * len(weights) else mean)
    for x in sorted(result):
        if 2 * sum(y > x for y in result) <= len(result):
            return x
    return tau_merge


def trunks(ends: Sequence[bool], E: Sequence[Edge], p: CrystalCacheParameters, start: int = 0) -> list[Trunk]:
    """Return the trunks (steps 1 to 3)."""
    first, *rest = sentences(ends, start)
    if p.merge == "median":
        p = replace(p, tau_merge=median_strength([first, *rest], E, p.tau_merge))
    done, g_cur = [], first
    for s_i in rest:
        if merges(interface_weights(g_cur, s_i, E), len(g_cur), len(s_i), p):
            g_cur = g_cur + s_i
        else:
            done.append(g_cur)
            g_cur = s_i
    done.append(g_cur)
    return [piece for trunk in done for piece in split(trunk, p.T_max)]
