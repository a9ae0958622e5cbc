"""What is said of S4 at full size, item by item: complaints, none if it is right."""

from collections.abc import Iterator

import numpy as np

from conformance import tolerances
from conformance.oracles.scale import stages as oracle
from spec.arrays import BoolVector, IntVector, Vector
from spec.parameters import CrystalCacheParameters
from spec.records import CoAttention, TrunkGraph, Trunks

__all__ = ["D", "degrees", "pairs", "upper", "weights"]


def upper(found: TrunkGraph) -> tuple[IntVector, IntVector, Vector]:
    """Each pair once, ascending."""
    rows = np.repeat(np.arange(len(found.degree)), np.diff(found.indptr))
    once = rows < found.indices
    return rows[once], found.indices[once], found.weights[once]


def free_weights(given: CoAttention, among: Trunks) -> tuple[oracle.Pairs, Vector]:
    """The pairs that have an edge, and Eq. 25 of each before the prune."""
    found = oracle.pairs(oracle.edge_columns(given), among.offsets[:-1])
    return found, oracle.pair_weights(found, among.sizes)


def near(free: Vector, tau: float) -> BoolVector:
    """Weights that may fall on either side of tau_edge."""
    found: BoolVector = np.abs(free - tau) < 2.0**-40  # then by the bound itself
    found[found] = [tolerances.close("CC-TRUNK-WEIGHT", [w], [tau]) for w in free[found].tolist()]
    return found


def pairs(found: TrunkGraph, given: CoAttention, among: Trunks, p: CrystalCacheParameters) -> Iterator[str]:
    """CC-TRUNK-EDGES: each pair with an edge, unless pruned, and no other; rows ascend and are symmetric."""
    want, free = free_weights(given, among)
    a, b, _ = upper(found)
    m = len(found.degree)
    got, keys = a * m + b, want.a * m + want.b
    unsure = keys[near(free, p.tau_edge)]
    kept = keys[free > p.tau_edge]
    for word, one, other in (("lacks", kept, got), ("invents", got, kept)):
        wrong = np.setdiff1d(np.setdiff1d(one, other), unsure)
        if len(wrong):
            yield f"W {word} {len(wrong)} pairs, ({wrong[0] // m}, {wrong[0] % m}) the first"
    rows = np.repeat(np.arange(m), np.diff(found.indptr))
    if (np.diff(rows * m + found.indices) <= 0).any():
        yield "columns do not ascend"
    back = np.lexsort((rows, found.indices))
    if not np.array_equal(found.indices[back], rows) or not np.array_equal(found.weights[back], found.weights):
        yield "W is not symmetric"


def weights(found: TrunkGraph, given: CoAttention, among: Trunks) -> Iterator[str]:
    """CC-TRUNK-WEIGHT, of the pairs that are there."""
    want, free = free_weights(given, among)
    a, b, w = upper(found)
    m = len(found.degree)
    at = np.minimum(np.searchsorted(want.a * m + want.b, a * m + b), max(0, len(free) - 1))
    if len(w) and not tolerances.close("CC-TRUNK-WEIGHT", w, free[at]):
        wrong = int(np.argmax(np.abs(w - free[at])))
        yield f"W({a[wrong]}, {b[wrong]}) is {w[wrong]}, not {free[at][wrong]}"


def degrees(found: TrunkGraph) -> Iterator[str]:
    """CC-DEGREE of the rows that were found, by ascending neighbour: the same bits."""
    want = oracle.degrees(found.indptr, found.weights)
    if not tolerances.close("CC-DEGREE", found.degree, want):
        wrong = np.flatnonzero(found.degree != want)
        yield f"degree of trunk {wrong[0]} is {found.degree[wrong[0]]}, not {want[wrong[0]]} ({len(wrong)} are wrong)"


def D(found: TrunkGraph, p: CrystalCacheParameters) -> Iterator[str]:
    """CC-CRYSTALLIZATION of the degrees that were found."""
    want = oracle.crystallization(found.degree, p)
    off = np.abs(found.D - want)
    if not (off <= tolerances.crystallization_radius(found.degree, p.s, p.epsilon)).all():
        yield f"D of trunk {int(np.argmax(off))} is {found.D[np.argmax(off)]}, not {want[np.argmax(off)]}"
