"""Expected Attention in float32, with three BLAS products per KV head.

Rotations, the mean query, d x d matrices and the mean over a group are computed in float64.
"""

import math

import numpy as np
from numpy.typing import NDArray

from accelerated.numba_cpu.attention import base_2
from accelerated.numba_cpu.compiled import compiled
from accelerated.numba_cpu.kernels import FAST, exp2, largest
from accelerated.numba_cpu.threads import plain, threads
from spec.arrays import IntVector, Matrix, Vector

__all__ = ["expected_attention"]

Floats = NDArray[np.float32]
f32 = np.float32
LOG2_E = math.log2(math.e)
ROWS = 256  # number of queries in a float32 sum; these sums are added in float64


def expected_attention(
    q: NDArray[np.floating], k: NDArray[np.floating], v: NDArray[np.floating], at: IntVector, ahead: IntVector,
    inv_freq: Vector, factor: float, scaling: float, sinks: NDArray[np.floating] | None = None,
) -> Matrix:
    """Return expected attention weight times norm of the value, (H_kv, n), for keys k and values v (H_kv, n, d).

    Implements: PO-EXPECTED-ATTENTION
    """
    angle = at[:, None] * inv_freq
    cos, sin = (np.cos(angle) / factor).astype(f32), (np.sin(angle) / factor).astype(f32)
    R = _mean_rotation(ahead, inv_freq, factor)
    G = len(q) // len(k)
    beside = base_2(sinks, len(k), G)

    def of_head(h: int) -> Vector:
        group = [_statistics(plain(queries), cos, sin) for queries in q[h * G : (h + 1) * G]]
        linear = np.stack([R @ mean for mean, _ in group]) * (scaling * LOG2_E)
        quadratic = np.concatenate([R @ covariance @ R.T for _, covariance in group], axis=1)
        quadratic *= scaling**2 * LOG2_E / 2
        keys = plain(k[h])
        weights = np.zeros(len(keys))
        add_expected(keys @ quadratic.astype(f32), keys, linear.astype(f32), beside[h], weights)
        scores: Vector = weights * norms(plain(v[h])) / G
        return scores

    with threads() as pool:
        return np.stack(list(pool.map(of_head, range(len(k)))))


def _mean_rotation(ahead: IntVector, inv_freq: Vector, factor: float) -> Matrix:
    """Return the mean of the RoPE rotation matrices over the positions `ahead`, (d, d)."""
    angle, half = ahead[:, None] * inv_freq, np.arange(len(inv_freq))
    R = np.zeros((2 * len(half), 2 * len(half)))
    cos, sin = factor * np.cos(angle).mean(axis=0), factor * np.sin(angle).mean(axis=0)
    R[half, half] = R[len(half) + half, len(half) + half] = cos
    R[half, len(half) + half], R[len(half) + half, half] = -sin, sin
    return R


def _statistics(q: Floats, cos: Floats, sin: Floats) -> tuple[Vector, Matrix]:
    """Return the mean (d,) and the covariance (d, d) of one head's queries (m, d) after RoPE is removed."""
    back = np.empty(q.shape, f32)
    mean = turn_back(np.ascontiguousarray(q), cos, sin, back)
    back -= mean.astype(f32)
    return mean, np.matmul(back.T, back).astype(np.float64) / len(q)


@compiled(nogil=True, fastmath=FAST)
def turn_back(q: Floats, cos: Floats, sin: Floats, back: Floats) -> Vector:
    """Remove RoPE from each query, write the queries without RoPE to `back`, and return the mean of these queries."""
    m, half = cos.shape
    mean, some = np.zeros(2 * half), np.zeros(2 * half, np.float32)
    for first in range(0, m, ROWS):
        some[:] = f32(0.0)
        for i in range(first, min(first + ROWS, m)):
            for c in range(half):
                a, b = q[i, c], q[i, half + c]
                back[i, c] = a * cos[i, c] + b * sin[i, c]
                back[i, half + c] = b * cos[i, c] - a * sin[i, c]
            for c in range(2 * half):
                some[c] += back[i, c]
        for c in range(2 * half):
            mean[c] += some[c]
    for c in range(2 * half):
        mean[c] /= m
    return mean


@compiled(nogil=True, fastmath=FAST)
def add_expected(turned: Floats, k: Floats, linear: Floats, sinks: Floats, weights: Vector) -> None:
    """Add each query head's softmax over the keys (n, d) to `weights`.

    The logits are computed from `turned` (n, G d) and `linear` (G, d). The logits and the sinks (G,) are base 2.
    """
    n, d = k.shape
    z = np.empty(n, np.float32)
    bits = z.view(np.int32)
    for g in range(len(linear)):
        mean = linear[g]
        for j in range(n):
            key, row, logit = k[j], turned[j, g * d : (g + 1) * d], f32(0.0)
            for c in range(d):
                logit += (row[c] + mean[c]) * key[c]
            z[j] = logit
        top = max(largest(bits, 0, n), sinks[g])
        total = np.float64(exp2(sinks[g] - top))
        for j in range(n):
            z[j] = exp2(z[j] - top)
            total += z[j]
        for j in range(n):
            weights[j] += z[j] / total


@compiled(nogil=True, fastmath=FAST)
def norms(v: Floats) -> Vector:
    """Return the L2 norm of each value of v (n, d)."""
    result = np.empty(len(v))
    for j in range(len(v)):
        square = 0.0
        for x in v[j]:
            square += np.float64(x) * np.float64(x)
        result[j] = np.sqrt(square)
    return result
