"""Checks of the records of S1 to S6 at full size, item by item: complaints, or none if a record is right."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from conformance import tolerances
from conformance.oracles.scale import stages as oracle
from conformance.oracles.scale.s1 import Ranked, Scored, coattention
from conformance.strategies.prompts import AttentionInputs
from conformance.strategies.scale_attention import RANKS
from conformance.tolerances import Interval
from spec.arrays import BoolVector, IntMatrix, IntVector, Matrix, Vector
from spec.parameters import CrystalCacheParameters
from spec.records import CoAttention, TrunkGraph, Trunks

# Share of the places of all lists that only one neighbour can fill, for all values inside the certified box.
DECIDED = 0.95
SHOWN = 3  # Complaints of one kind: more wrong rows add no information.


def salience(result: Vector, want: Scored, p: CrystalCacheParameters, precision: str, strict: bool) -> Iterator[str]:
    """Check CC-SALIENCE.

    If attention is exact, salience must be exact too, unless float32 cannot represent a bound of the clip.
    """
    spread = np.zeros(len(result)) if strict else want.unclipped
    radius = tolerances.moved_salience_radius(spread, want.moves, p.C, p.k_heads, p.M_min, precision)
    wrong = np.flatnonzero(~(np.abs(result - want.salience) <= radius))
    for i in wrong[:SHOWN].tolist():
        expected = f"{want.salience[i]} within {radius[i]}"
        yield f"salience of token {i} is {result[i]}, not {expected} ({len(wrong)} are wrong)"


def neighbours(
    index: IntMatrix, weight: Matrix, want: Ranked, k: int, tau: float, strict: bool,
) -> Iterator[str]:
    """Check the lists and weights of CC-INTRA or CC-CROSS.

    If `strict`, all ties are exact, so exactly one list is right.
    """
    if index.shape != (len(want.index), k) or weight.shape != index.shape:
        yield f"shapes {index.shape} and {weight.shape}, not {(len(want.index), k)}"
        return
    right = chosen(want, k, tau)
    same = (index == right).all(axis=1)
    wrong = np.flatnonzero(~same)
    refused = [i for i in wrong.tolist() if strict or not _realisable(index[i], want, i, k, tau)]
    for i in refused[:SHOWN]:
        yield f"token {i}: {index[i].tolist()}, not {right[i].tolist()} ({len(refused)} lists are wrong)"
    at = np.where(index[:, :, None] == want.index[:, None, :], np.arange(want.index.shape[1]), -1).max(axis=2)
    known = (at >= 0) & (index >= 0)
    w = np.where(known, np.take_along_axis(want.weight, at, axis=1), 0.0)
    radius = np.where(known, np.take_along_axis(want.error, at, axis=1), 0.0) * w
    radius = radius + np.where(w > 0, tolerances.SMALLEST["float32"], 0.0)
    off = np.argwhere(~(np.abs(weight - w) <= np.where(index >= 0, radius, 0.0)) & (known | (index < 0)))
    for i, rank in off[:SHOWN].tolist():
        yield f"token {i}: weight {weight[i, rank]} of {index[i, rank]}, not {w[i, rank]} ({len(off)} are wrong)"
    keys = weight.astype(np.float32)
    falls = (keys[:, 1:] < keys[:, :-1]) | ((keys[:, 1:] == keys[:, :-1]) & (index[:, 1:] > index[:, :-1]))
    unsorted = np.flatnonzero((~falls & (index[:, 1:] >= 0)).any(axis=1))
    for i in unsorted[:SHOWN].tolist():
        yield f"token {i}: {weight[i].tolist()} of {index[i].tolist()} is not in order"


def chosen(want: Ranked, k: int, tau: float) -> IntMatrix:
    """Return the list of each token, padded with -1."""
    index, weight = want.index[:, :k], want.weight[:, :k]
    result: IntMatrix = np.where(weight.astype(np.float32) > np.float32(tau), index, -1)
    return result


def _realisable(index: Any, want: Ranked, i: int, k: int, tau: float) -> bool:
    if ((index[:-1] < 0) & (index[1:] >= 0)).any():
        return False
    candidates = zip(want.index[i].tolist(), want.weight[i].tolist(), want.error[i].tolist(), strict=True)
    boxes = {j: Interval.around(w, w * e + tolerances.SMALLEST["float32"]) for j, w, e in candidates if j >= 0}
    return tolerances.list_is_realisable([j for j in index.tolist() if j >= 0], boxes, k, tau)


def decided(want: Ranked, k: int, tau: float) -> tuple[int, int]:
    """Return the number of decided places of all lists, and the number of all places.

    A place is decided if only one neighbour can fill it, for all values inside the boxes.
    """
    low = (want.weight * (1 - want.error)).astype(np.float32)
    high = (want.weight * (1 + want.error)).astype(np.float32)
    low, high = low[:, : k + 1], high[:, : k + 1]
    limit = np.float32(tau)
    above = np.pad(high[:, 1:] < low[:, :-1], ((0, 0), (0, 1)), constant_values=True) | (high <= limit)[:, : k + 1]
    apart = above[:, :k] & np.pad(above[:, : k - 1], ((0, 0), (1, 0)), constant_values=True)
    sure = apart & (low[:, :k] > limit)
    filled = high[:, :k] > limit
    return int((sure & filled).sum()), int(filled.sum())


def exact(inputs: AttentionInputs, precision: str) -> Scored:
    """Return the oracle's result for `addressed` inputs.

    The weights and their sums are exact. Cosines of one-hot rows are exact except for a root. The mean over the heads
    rounds if the number of heads is not a power of two, and may then reorder equal shares.
    """
    H = len(inputs.q)
    mean_error = 0.0 if is_power_of_two(H) else tolerances.head_mean_error(H, precision)

    def cosines(error: Vector, Q: int) -> Matrix:
        one: Matrix = np.broadcast_to(tolerances.cosine_error(0.0, 0.0, Q, H, precision), (Q, Q))
        return one

    return coattention(
        inputs.q, inputs.k, inputs.positions, inputs.parameters, inputs.scaling, inputs.softcap,
        lambda q, k: np.zeros(q.shape[1]), cosines, mean_error,
    )


def is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def boxed(inputs: AttentionInputs, precision: str) -> Scored:
    """Return the oracle's result for `laddered` inputs, with the certified errors.

    All but RANKS keys of a query have weight 0 in every floating type, and sums of zeros are exact. The logits of the
    RANKS keys are single products. The mass of the logits is the largest of the query's last channels.
    """
    H, d = len(inputs.q), inputs.q.shape[2]

    def weights(q: Any, k: Any) -> Vector:
        mass = np.abs(q[:, :, d - RANKS :]).max(axis=(0, 2)).astype(np.float64) * inputs.scaling
        return tolerances.weight_error(mass, d, RANKS, inputs.softcap, precision, inputs.sinks)

    def cosines(error: Vector, Q: int) -> Matrix:
        result: Matrix = tolerances.cosine_error(error[:, None], error[None, :], min(Q, RANKS), H, precision)
        return result

    return coattention(
        inputs.q, inputs.k, inputs.positions, inputs.parameters, inputs.scaling, inputs.softcap, weights, cosines,
        tolerances.head_mean_error(H, precision), inputs.sinks,
    )


def upper(result: TrunkGraph) -> tuple[IntVector, IntVector, Vector]:
    """Return each pair of trunks once, ascending, with its weight."""
    rows = np.repeat(np.arange(len(result.degree)), np.diff(result.indptr))
    once = rows < result.indices
    return rows[once], result.indices[once], result.weights[once]


def free_weights(given: CoAttention, among: Trunks) -> tuple[oracle.Pairs, Vector]:
    """Return the pairs of trunks with an edge, and Eq. 25 of each pair before the prune."""
    result = oracle.pairs(oracle.edge_columns(given), among.offsets[:-1])
    return result, oracle.pair_weights(result, among.sizes)


def near(free: Vector, tau: float) -> BoolVector:
    """Return a mask of the weights that are so near tau_edge that rounding decides the comparison."""
    result: BoolVector = np.abs(free - tau) < 2.0**-40  # A coarse selection; the bound itself decides below
    result[result] = [tolerances.close("CC-TRUNK-WEIGHT", [w], [tau]) for w in free[result].tolist()]
    return result


def pairs(result: TrunkGraph, given: CoAttention, among: Trunks, p: CrystalCacheParameters) -> Iterator[str]:
    """Check CC-TRUNK-EDGES: W contains exactly the pairs with an edge that are not pruned.

    Rows ascend and W is symmetric.
    """
    want, free = free_weights(given, among)
    a, b, _ = upper(result)
    m = len(result.degree)
    got, keys = a * m + b, want.a * m + want.b
    unsure = keys[near(free, p.tau_edge)]
    kept = keys[free > p.tau_edge]
    for word, one, other in (("lacks", kept, got), ("invents", got, kept)):
        wrong = np.setdiff1d(np.setdiff1d(one, other), unsure)
        if len(wrong):
            yield f"W {word} {len(wrong)} pairs, ({wrong[0] // m}, {wrong[0] % m}) the first"
    rows = np.repeat(np.arange(m), np.diff(result.indptr))
    if (np.diff(rows * m + result.indices) <= 0).any():
        yield "columns do not ascend"
    back = np.lexsort((rows, result.indices))
    if not np.array_equal(result.indices[back], rows) or not np.array_equal(result.weights[back], result.weights):
        yield "W is not symmetric"


def weights(result: TrunkGraph, given: CoAttention, among: Trunks) -> Iterator[str]:
    """Check CC-TRUNK-WEIGHT for the pairs in W."""
    want, free = free_weights(given, among)
    a, b, w = upper(result)
    m = len(result.degree)
    at = np.minimum(np.searchsorted(want.a * m + want.b, a * m + b), max(0, len(free) - 1))
    if len(w) and not tolerances.close("CC-TRUNK-WEIGHT", w, free[at]):
        wrong = int(np.argmax(np.abs(w - free[at])))
        yield f"W({a[wrong]}, {b[wrong]}) is {w[wrong]}, not {free[at][wrong]}"


def degrees(result: TrunkGraph) -> Iterator[str]:
    """Check CC-DEGREE of the rows in W, summed by ascending neighbour: the bits must be equal."""
    want = oracle.degrees(result.indptr, result.weights)
    if not tolerances.close("CC-DEGREE", result.degree, want):
        wrong = np.flatnonzero(result.degree != want)
        yield f"degree of trunk {wrong[0]} is {result.degree[wrong[0]]}, not {want[wrong[0]]} ({len(wrong)} are wrong)"


def D(result: TrunkGraph, p: CrystalCacheParameters) -> Iterator[str]:
    """Check CC-CRYSTALLIZATION of the degrees in the record."""
    want = oracle.crystallization(result.degree, p)
    off = np.abs(result.D - want)
    if not (off <= tolerances.crystallization_radius(result.degree, p.s, p.epsilon)).all():
        yield f"D of trunk {int(np.argmax(off))} is {result.D[np.argmax(off)]}, not {want[np.argmax(off)]}"
