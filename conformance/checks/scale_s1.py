"""What is said of S1 at full size, item by item: complaints, none if it is right."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from conformance import tolerances
from conformance.oracles.scale.s1 import Ranked, Scored, coattention
from conformance.strategies.attention import AttentionInputs
from conformance.strategies.scale_attention import RANKS
from conformance.tolerances import Interval
from spec.arrays import IntMatrix, Matrix, Vector
from spec.parameters import CrystalCacheParameters

__all__ = ["DECIDED", "boxed", "chosen", "decided", "exact", "is_power_of_two", "neighbours", "salience"]

DECIDED = 0.95  # of the places of all lists, that no value inside the certified box fills otherwise
SHOWN = 3  # complaints of one kind: a thousand wrong rows say no more


def salience(found: Vector, want: Scored, p: CrystalCacheParameters, precision: str, strict: bool) -> Iterator[str]:
    """CC-SALIENCE; to the bit where attention is, but for a bound that is no float32."""
    spread = np.zeros(len(found)) if strict else want.unclipped
    radius = tolerances.moved_salience_radius(spread, want.moves, p.C, p.k_heads, p.M_min, precision)
    wrong = np.flatnonzero(~(np.abs(found - want.salience) <= radius))
    for i in wrong[:SHOWN].tolist():
        yield f"salience of token {i} is {found[i]}, not {want.salience[i]} within {radius[i]} ({len(wrong)} are wrong)"


def neighbours(
    index: IntMatrix, weight: Matrix, want: Ranked, k: int, tau: float, strict: bool,
) -> Iterator[str]:
    """Lists and weights of CC-INTRA or CC-CROSS; `strict` where all ties are exact, so that one list is right."""
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
    radius = np.where(known, np.take_along_axis(want.error, at, axis=1), 0.0) * w + _least(w)
    off = np.argwhere(~(np.abs(weight - w) <= np.where(index >= 0, radius, 0.0)) & (known | (index < 0)))
    for i, rank in off[:SHOWN].tolist():
        yield f"token {i}: weight {weight[i, rank]} of {index[i, rank]}, not {w[i, rank]} ({len(off)} are wrong)"
    keys = weight.astype(np.float32)
    falls = (keys[:, 1:] < keys[:, :-1]) | ((keys[:, 1:] == keys[:, :-1]) & (index[:, 1:] > index[:, :-1]))
    unsorted = np.flatnonzero((~falls & (index[:, 1:] >= 0)).any(axis=1))
    for i in unsorted[:SHOWN].tolist():
        yield f"token {i}: {weight[i].tolist()} of {index[i].tolist()} is not in order"


def _least(w: Matrix) -> Matrix:
    return np.where(w > 0, tolerances.SMALLEST["float32"], 0.0)


def chosen(want: Ranked, k: int, tau: float) -> IntMatrix:
    """The list of each token, padded with -1."""
    index, weight = want.index[:, :k], want.weight[:, :k]
    found: IntMatrix = np.where(weight.astype(np.float32) > np.float32(tau), index, -1)
    return found


def _realisable(index: Any, want: Ranked, i: int, k: int, tau: float) -> bool:
    if ((index[:-1] < 0) & (index[1:] >= 0)).any():
        return False
    candidates = zip(want.index[i].tolist(), want.weight[i].tolist(), want.error[i].tolist(), strict=True)
    boxes = {j: Interval.around(w, w * e + tolerances.SMALLEST["float32"]) for j, w, e in candidates if j >= 0}
    return tolerances.list_is_realisable([j for j in index.tolist() if j >= 0], boxes, k, tau)


def decided(want: Ranked, k: int, tau: float) -> tuple[int, int]:
    """How many places of all lists no value inside the boxes can fill otherwise, and how many places there are."""
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
    """The oracle on `addressed` inputs: weights and their sums are exact, cosines of one-hot rows but for a root.

    The mean over a number of heads that is no power of two rounds, and so may order equal shares of them otherwise.
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
    """The oracle on `laddered` inputs, with the certified errors.

    All but RANKS keys of a query have weight 0 in every floating type, and sums of zeros round nothing; the logits of
    the others are single products, whose mass is the largest of the query's last channels.
    """
    H, d = len(inputs.q), inputs.q.shape[2]

    def weights(q: Any, k: Any) -> Vector:
        mass = np.abs(q[:, :, d - RANKS :]).max(axis=(0, 2)).astype(np.float64) * inputs.scaling
        return tolerances.weight_error(mass, d, RANKS, inputs.softcap, precision)

    def cosines(error: Vector, Q: int) -> Matrix:
        found: Matrix = tolerances.cosine_error(error[:, None], error[None, :], min(Q, RANKS), H, precision)
        return found

    return coattention(
        inputs.q, inputs.k, inputs.positions, inputs.parameters, inputs.scaling, inputs.softcap, weights, cosines,
        tolerances.head_mean_error(H, precision),
    )
