"""NestedKV's score a*. In float32, a first pass computes the mean key of a head, and a second pass the cosines.

A window sum adds two partial sums: the end of one run of W keys, and the start of the next run. Sums are therefore
never subtracted, and float32 sums have at most W or b terms. All computation after the three cosines is in float64.
"""

import math

import numpy as np
from numba import njit
from numpy.typing import NDArray

from accelerated.numba_cpu.compiled import compiled
from accelerated.numba_cpu.kernels import FAST
from spec.arrays import Matrix, Vector
from spec.errors import SpecError
from spec.parameters import NestedKVParameters

__all__ = ["anomaly_score", "in_range"]

Floats = NDArray[np.float32]
f32 = np.float32
NEGLIGIBLE = 2.0**-16
LARGEST_EXPONENT = 700.0
LARGEST_SHIFT = 125  # scaled channels between 2^-126 and 2^125 are normal float32 numbers
SMALLEST = 2.0**-126  # float32 cannot represent the inverse norm of a shorter key, so this key counts as zero


def anomaly_score(k: NDArray[np.floating], parameters: NestedKVParameters) -> Matrix:
    """Return the score a* (H_kv, n) of keys k (H_kv, n, d), computed head by head.

    Implements: NK-SCORE

    Raises:
        SpecError: if a key is zero.
    """
    p, n = parameters, k.shape[1]
    b = min(max(n // p.blocks, p.b_min), p.b_max)
    m = max(1, math.floor(p.p * n))
    score: Matrix = np.empty(k.shape[:2])
    for h, keys in enumerate(k):
        plain = np.ascontiguousarray(in_range(keys), dtype=f32)
        inverse, blocks, stable = measured(plain, b)
        if not inverse.all():
            token = int(np.flatnonzero(inverse == 0)[0])
            raise SpecError("k", 0.0, f"a zero key has no direction: KV head {h}, token {token}")
        a = anomalies(plain, inverse, blocks, stable, b, p.W)
        min_max(a)
        weights = blend_weights(a, m, np.array(p.w0), float(p.beta))
        routed(a, weights, float(p.tau), float(p.kappa), score[h])
    return score


def in_range(k: NDArray[np.floating]) -> NDArray[np.floating]:
    """Return keys (..., d) in the range of float32. If necessary, keys of a wider dtype are scaled by a power of two.

    Implements: NK-UNIT-KEYS
    """
    if k.dtype.itemsize <= 4:
        return k
    exponent = np.frexp(np.abs(k).max(axis=-1, keepdims=True))[1]
    scaled: NDArray[np.floating] = np.ldexp(k, np.where(np.abs(exponent) > LARGEST_SHIFT, -exponent, 0))
    return scaled


@compiled(nogil=True, fastmath=FAST)
def measured(k: Floats, b: int) -> tuple[Floats, Floats, Floats]:
    """Return inverse norms (n,), sums of the unit keys of each block (blocks, d), and the direction of mu_s (d,).

    The inverse norm of a zero key is 0. The direction has length 1, or is zero if mu_s is negligible. Block sums are
    added in float64.

    Implements: NK-UNIT-KEYS, NK-STABLE, NK-EPISODIC
    """
    n, d = k.shape
    inverse = np.empty(n, np.float32)
    blocks = np.zeros(((n + b - 1) // b, d), np.float32)
    total = np.zeros(d)
    for block in range(len(blocks)):
        to = blocks[block]
        for i in range(block * b, min((block + 1) * b, n)):
            key = k[i]
            square = 0.0
            for c in range(d):
                square += np.float64(key[c]) * np.float64(key[c])
            scale = f32(1.0 / np.sqrt(square)) if square >= SMALLEST * SMALLEST else f32(0.0)
            inverse[i] = scale
            for c in range(d):
                to[c] += key[c] * scale
        for c in range(d):
            total[c] += to[c]
    stable = np.empty(d, np.float32)
    for c in range(d):
        stable[c] = f32(total[c] / n)
    point(stable, f32(1.0))
    return inverse, blocks, stable


@njit(nogil=True, fastmath=FAST, inline="always")
def point(memory: Floats, share: np.float32) -> None:
    """Normalise a sum to length 1 in place. If the mean (`share` times the sum) is negligible, write zeros."""
    square = f32(0.0)
    for x in memory:
        square += x * x
    length = np.sqrt(square)
    scale = f32(1.0) / length if length * share > f32(NEGLIGIBLE) else f32(0.0)
    for c in range(len(memory)):
        memory[c] *= scale


@compiled(nogil=True, fastmath=FAST)
def anomalies(k: Floats, inverse: Floats, blocks: Floats, stable: Floats, b: int, W: int) -> Matrix:
    """Return the negative cosines of each key with the three memories, (3, n).

    The sums in `blocks` are scaled to length 1 in place. `ends[t]` is the sum of the last W - t unit keys of the
    previous run of W keys. `start` is the sum of the unit keys of the current run up to token t.

    Implements: NK-CURRENT, NK-ANOMALY
    """
    n, d = k.shape
    a = np.empty((3, n))
    for block in range(len(blocks)):
        point(blocks[block], f32(1.0) / f32(min(b, n - block * b)))
    units, ends = np.zeros((W, d), np.float32), np.zeros((W + 1, d), np.float32)
    start = np.empty(d, np.float32)
    for first in range(0, n, W):
        start[:] = f32(0.0)
        for t in range(min(W, n - first)):
            i = first + t
            key, unit, episodic, before, scale = k[i], units[t], blocks[i // b], ends[t + 1], inverse[i]
            s = e = c = length = f32(0.0)
            for x in range(d):
                u = key[x] * scale
                unit[x] = u
                start[x] += u
                window = start[x] + before[x]
                s += u * stable[x]
                e += u * episodic[x]
                c += u * window
                length += window * window
            length = np.sqrt(length)
            a[0, i], a[1, i] = -s, -e
            a[2, i] = -(c / length) if length > f32(NEGLIGIBLE) * f32(min(i + 1, W)) else 0.0
        for t in range(W - 1, 0, -1):
            for x in range(d):
                ends[t, x] = ends[t + 1, x] + units[t, x]
    return a


@compiled(nogil=True)
def min_max(a: Matrix) -> None:
    """Min-max normalise each row to [0, 1] in place. A row with a negligible range becomes 0.

    Implements: NK-MIN-MAX
    """
    for row in a:
        low, high = row.min(), row.max()
        wide = high - low > NEGLIGIBLE
        for i in range(len(row)):
            row[i] = (row[i] - low) / (high - low) if wide else 0.0


def blend_weights(a: Matrix, m: int, w0: Vector, beta: float) -> Vector:
    """Return the weights (3,) of the three memories, from the means of the m highest and m lowest values of each row.

    Implements: NK-GAP, NK-BLEND
    """
    n = a.shape[1]
    parts = np.partition(a, sorted({m - 1, n - m}), axis=1)
    gain = beta * (parts[:, n - m :].mean(axis=1) - parts[:, :m].mean(axis=1))
    w = w0 * np.exp(gain - max(gain.max() - LARGEST_EXPONENT, 0.0))
    weights: Vector = w / w.sum()
    return weights


@compiled(nogil=True)
def routed(a: Matrix, w: Vector, tau: float, kappa: float, score: Vector) -> None:
    """Write the score a* to `score` (n,), computed from the normalised rows (3, n).

    Implements: NK-BLEND, NK-SURPRISE, NK-ROUTE
    """
    n = a.shape[1]
    surprise = np.empty((1, n))
    s = surprise[0]
    for i in range(n):
        mean = (a[0, i] + a[1, i] + a[2, i]) / 3.0
        s[i] = np.sqrt(((a[0, i] - mean) ** 2 + (a[1, i] - mean) ** 2 + (a[2, i] - mean) ** 2) / 3.0)
    min_max(surprise)
    centre = s.mean()
    for i in range(n):
        alpha = 1.0 / (1.0 + np.exp(min(-kappa * (max(0.0, s[i] - centre) - tau), LARGEST_EXPONENT)))
        blended = w[0] * a[0, i] + w[1] * a[1, i] + w[2] * a[2, i]
        score[i] = (1.0 - alpha) * blended + alpha * max(a[0, i], a[1, i], a[2, i])
