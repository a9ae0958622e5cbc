"""S1 at full size: one head and one chunk at a time, so that the largest array is (C, live)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from spec.arrays import IntMatrix, IntVector, Matrix, Vector
from spec.parameters import CrystalCacheParameters

# Number of candidates stored after the last place of a list. In the scale tests, no more than these tie.
BEHIND = 16

RowError = Callable[[Any, Any], Vector]
CosineError = Callable[[Vector, int], Matrix]


@dataclass(frozen=True)
class Ranked:
    """Strongest candidates of each token as float32, best first. The lower position comes first on a tie.

    Positions are absolute. Empty places have position -1, weight 0 and error 0.
    """

    index: IntMatrix
    weight: Matrix
    error: Matrix
    """Relative errors."""


@dataclass(frozen=True)
class Scored:
    """Result of S1 for each token, and the allowed errors of a correct implementation."""

    start: int
    salience: Vector
    unclipped: Vector
    moves: Vector
    """Sum of a token's k_heads largest column sums, with each row's weights multiplied by the row's error."""
    intra: Ranked
    cross: Ranked


def coattention(
    q: Any, k: Any, positions: IntVector, p: CrystalCacheParameters, scaling: float, softcap: float | None,
    row_error: RowError, cosine_error: CosineError, mean_error: float, sinks: Any = None, behind: int = BEHIND,
) -> Scored:
    """Return the result of CC-ATTENTION to CC-CROSS.

    Args:
        q: queries (H, Q, d).
        k: keys (H_kv, n, d).
        positions: positions of the keys.
        p: parameters of CrystalCache.
        scaling: factor of the logits.
        softcap: soft cap of the logits, or None.
        row_error: function that returns a bound on the relative error of weights, by query row.
        cosine_error: function that returns a bound on the relative error of cosines (Q, Q) of rows with such errors.
        mean_error: relative error that the mean over heads adds.
        sinks: attention sinks of the heads, or None.
        behind: number of candidates that are stored beyond the end of a list.
    """
    n, before = q.shape[1], k.shape[1] - q.shape[1]
    unclipped, moves, inside, across = [], [], [], []
    for c in range(0, n, p.C):
        stop = min(c + p.C, n)
        first, last = before + c, before + stop
        error = row_error(q[:, c:stop], k[:, :last])
        mean, sums, wide = _chunk(
            q[:, c:stop], k[:, :last], positions[first:last], positions[:last], first, scaling, softcap, error, sinks
        )
        top = np.sort(sums, axis=0)[::-1][: p.k_heads]
        share = max(1, min(p.k_heads, len(q))) if p.heads == "mean" else 1
        unclipped.append(top.sum(axis=0) / share)
        moves.append(np.sort(wide, axis=0)[::-1][: p.k_heads].sum(axis=0) / share)
        square = mean[:, first:]
        rows = square / (np.sqrt((square * square).sum(axis=1)) + p.epsilon)[:, None]
        cosines = rows @ rows.T
        np.fill_diagonal(cosines, -1.0)
        inside.append(_ranked(cosines, cosine_error(error, stop - c), positions[first:last], p.k_intra, behind))
        shares = np.broadcast_to(error[:, None] + mean_error, (stop - c, first))
        across.append(_ranked(mean[:, :first], shares, positions[:first], p.k_cross, behind))
    total = np.concatenate(unclipped)
    salience = np.clip(total, p.M_min, p.M_max)
    return Scored(
        int(positions[before]), salience, total, np.concatenate(moves), _joined(inside), _joined(across)
    )


def _chunk(
    q: Any, k: Any, at: IntVector, keys_at: IntVector, first: int, scaling: float, softcap: float | None,
    error: Vector, sinks: Any,
) -> tuple[Matrix, Matrix, Matrix]:
    """Return the head means (Q, live), and two sums by head (H, Q).

    Both arrays contain column sums of the chunk's keys. In the second, each row is multiplied by its error.
    """
    H, group = len(q), len(q) // len(k)
    hidden = keys_at[None, :] > at[:, None]
    mean = np.zeros((len(at), len(keys_at)))
    sums, wide = np.empty((H, len(at))), np.empty((H, len(at)))
    for g in range(len(k)):
        keys = k[g].astype(np.float64).T
        for h in range(g * group, (g + 1) * group):
            x = q[h].astype(np.float64) @ keys
            x *= scaling
            if softcap is not None:
                x = softcap * np.tanh(x / softcap)
            x[hidden] = -np.inf
            top = x.max(axis=1, keepdims=True)
            np.exp(x - top, out=x)
            x /= x.sum(axis=1, keepdims=True) + (0.0 if sinks is None else np.exp(float(sinks[h]) - top))
            mean += x
            square = x[:, first:]
            sums[h], wide[h] = square.sum(axis=0), error @ square
    mean /= H
    return mean, sums, wide


def _ranked(weights: Matrix, error: Matrix, positions: IntVector, k: int, behind: int) -> Ranked:
    """Return the best of each row as float32. Candidates are numbered by ascending position."""
    wide = k + behind
    width = min(wide, weights.shape[1])
    order = _best(weights.astype(np.float32), width)
    best = np.take_along_axis(weights, order, axis=1)
    real = best > 0
    padded = [
        np.where(real, positions[order] if width else order, -1), np.where(real, best, 0.0),
        np.where(real, np.take_along_axis(error, order, axis=1), 0.0),
    ]
    index, weight, bound = (
        np.pad(x, ((0, 0), (0, wide - width)), constant_values=-1 if x.dtype.kind == "i" else 0) for x in padded
    )
    return Ranked(index, weight, bound)


def _best(keys: Any, width: int) -> IntMatrix:
    """Return the columns of the `width` largest of each row, descending, lower column first."""
    if not width:
        return np.zeros((len(keys), 0), dtype=np.int64)
    # One integer gives a total order: the bits of the float (0 for no candidate), then the column counted from the end.
    bits = np.where(keys > 0, keys, 0).astype(np.float32).view(np.int32).astype(np.int64)
    packed = bits << 32 | np.arange(keys.shape[1] - 1, -1, -1)
    if width < keys.shape[1]:
        packed = np.partition(packed, keys.shape[1] - width, axis=1)[:, -width:]
    packed = np.sort(packed, axis=1)[:, ::-1]
    order: IntMatrix = keys.shape[1] - 1 - (packed & 0xFFFFFFFF)
    return order


def _joined(parts: list[Ranked]) -> Ranked:
    return Ranked(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("index", "weight", "error")))


def log_sum_exp(q: Any, k: Any, positions: IntVector, scaling: float, softcap: float | None) -> Matrix:
    """Return the natural logarithm of the denominators of Eq. 3 without sinks, (H, n)."""
    n, group = q.shape[1], len(q) // len(k)
    hidden = positions[None, :] > positions[len(positions) - n :, None]
    result = np.empty(q.shape[:2])
    for h in range(len(q)):
        x = q[h].astype(np.float64) @ k[h // group].astype(np.float64).T * scaling
        if softcap is not None:
            x = softcap * np.tanh(x / softcap)
        x[hidden] = -np.inf
        top = x.max(axis=1)
        result[h] = top + np.log(np.exp(x - top[:, None]).sum(axis=1))
    return result
