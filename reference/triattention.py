"""TriAttention: scores of cached keys for future queries. A calibration's statistics describe the future queries.

TriAttention is Mao et al., arXiv 2604.04921. In the paper Set-Conditioned Diversity, its global mode is the scorer 1d.
"""

from typing import Literal, TypeAlias

import numpy as np

from spec.arrays import Bool, BoolVector, Cube, Float64, Matrix, Vector
from spec.errors import SpecError

__all__ = ["OFFSETS", "STD_MIN", "Mode", "band_statistics", "distance_score", "joined", "z_scores"]

OFFSETS = tuple(2**e for e in range(17))
STD_MIN = 1e-6
Mode: TypeAlias = Literal["global", "head", "layer and head"]


def band_statistics(q: Float64[Cube, "H m d"]) -> tuple[Float64[Matrix, "H d"], Float64[Matrix, "H half"]]:
    """Return each head's mean query before RoPE, and the mean norm of each rotary pair (channels f and f + d / 2).

    Implements: TA-STATISTICS

    Source: Section 4 of TriAttention, and the calibration in TriAttention's official code.

    Raises:
        SpecError: if there is no query, or if d is odd.
    """
    if q.shape[1] == 0:
        raise SpecError("q", q.shape, "a calibration needs a query")
    if q.shape[2] % 2:
        raise SpecError("q", q.shape, "rotary channels come in pairs")
    first, second = np.split(q, 2, axis=2)
    mean: Matrix = q.mean(axis=1)
    magnitude: Matrix = np.hypot(first, second).mean(axis=1)
    return mean, magnitude


def distance_score(
    c: Float64[Matrix, "n d"], t: int, mean: Float64[Matrix, "G d"], magnitude: Float64[Matrix, "G half"],
    inv_freq: Float64[Vector, " half"], factor: float,
) -> Float64[Matrix, "G n"]:
    """Return each cached key's score for each query head of one KV head. The score is a mean over future queries.

    t is the number of tokens seen. `mean` and `magnitude` are the result of `band_statistics` for the G query heads.
    `factor` is the attention factor of RoPE (1 without a scaling such as YaRN), which the cached keys `c` contain.

    The future queries have the positions t + 1, t + 2, t + 4, ..., t + 2^16. The score does not need the position of a
    key, because RoPE has already rotated the cached key. The score is linear in the rotations by the offsets 1, 2, 4,
    ..., 2^16, so the function averages the rotations once for all keys.

    Implements: TA-SCORE

    Source: Section 4 of TriAttention, and TriAttention's official code.
    """
    half = len(inv_freq)
    key, query = c[:, :half] - 1j * c[:, half:], mean[:, :half] + 1j * mean[:, half:]
    turn = np.exp(1j * inv_freq * t) * np.exp(1j * inv_freq * np.array(OFFSETS)[:, None]).mean(axis=0)
    # Each head is multiplied separately. The rounding of a joint product would depend on the number of heads.
    trigonometric = np.stack([(key @ (turn * q)).real for q in query])
    rest = np.stack([np.abs(key) @ (size - np.abs(q)) for q, size in zip(query, magnitude, strict=True)])
    score: Matrix = factor * (trigonometric + rest)
    return score


def z_scores(X: Float64[Matrix, "rows n"], candidates: Bool[BoolVector, " n"]) -> Float64[Matrix, "rows n"]:
    """Return the z-scores of the candidates in each row, and NaN for all other tokens.

    The mean and the population standard deviation of a row are computed over the candidates. A standard deviation below
    1e-6 is replaced by 1e-6.

    Implements: TA-RANKING

    Source: TriAttention's official code.
    """
    z = np.full(X.shape, np.nan)
    if candidates.any():
        x = X[:, candidates]
        centred = x - x.mean(axis=1, keepdims=True)
        z[:, candidates] = centred / np.maximum(np.sqrt((centred * centred).mean(axis=1, keepdims=True)), STD_MIN)
    return z


def joined(best: Float64[Cube, "L H_kv n"], mode: Mode) -> Float64[Matrix, "g n"]:
    """Combine the largest z-scores per KV head, (L, H_kv, n), into one row per set of kept tokens.

    Mode "global" returns one row: the maximum over layers and KV heads. Mode "head" returns the mean over layers for
    each KV head, repeated for every layer. Mode "layer and head" returns the scores unchanged, one row per layer and KV
    head.

    Implements: TA-RANKING

    Source: the three modes of TriAttention's official code.
    """
    L, H_kv, n = best.shape
    rows: Matrix = best.reshape(L * H_kv, n)
    if mode == "global":
        rows = rows.max(axis=0, keepdims=True)
    if mode == "head":
        rows = np.tile(best.mean(axis=0), (L, 1))
    return rows
