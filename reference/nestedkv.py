"""NestedKV's anomaly score. Keys that differ from the prompt's memories have high scores (Eq. 3-15, Appendix A).

Sections and equations are those of Chen et al., "NestedKV" (arXiv 2605.26678).

The score uses the keys as cached: after RoPE, and after key normalisation if the model normalises keys. A memory is a
mean of unit keys. An axis of length 3 has the memories (the paper's time scales) in the order stable, episodic,
current. The argument `a` of a function after `min_max` contains normalised anomalies, which the paper writes with a
tilde.
"""

import math
from fractions import Fraction

import numpy as np

from reference.directions import unit_keys
from spec.arrays import Cube, Float64, Matrix
from spec.parameters import NestedKVParameters
from spec.policy import DeviceArray

__all__ = [
    "anomalies", "anomaly_score", "blend", "block_size", "current_memory", "episodic_memory", "gap", "min_max",
    "rectified_surprise", "routed_score", "stable_memory",
]

NEGLIGIBLE = 2.0**-16
"""Ranges of values and lengths of memories up to this number are float32 rounding errors, and count as zero."""
LARGEST_EXPONENT = 700.0
"""Limit of exponents, because exp overflows at 709. Above this limit, all exponents of a head are reduced equally."""


def stable_memory(unit: Float64[Cube, "H_kv n d"]) -> Float64[Cube, "H_kv 1 d"]:
    """Return the stable memory mu_s of each head: the mean of all unit keys of the head.

    Implements: NK-STABLE

    Source: Eq. 5.
    """
    mean: Cube = unit.mean(axis=1, keepdims=True)
    return mean


def block_size(N: int, parameters: NestedKVParameters) -> int:
    """Return the block size of the episodic memory, in tokens: b = clip(floor(N / 32), 128, 256).

    Implements: NK-EPISODIC

    Source: Eq. 6.
    """
    return min(max(N // parameters.blocks, parameters.b_min), parameters.b_max)


def episodic_memory(unit: Float64[Cube, "H_kv n d"], b: int) -> Float64[Cube, "H_kv n d"]:
    """Return the episodic memory mu_e(i): the mean of the unit keys of the block that contains token i.

    Blocks have b tokens. The last block may have fewer tokens.

    Implements: NK-EPISODIC

    Source: Eq. 7.
    """
    starts = np.arange(0, unit.shape[1], b)
    sizes = np.diff(starts, append=unit.shape[1])
    means = np.add.reduceat(unit, starts, axis=1) / sizes[:, None]
    memory: Cube = np.repeat(means, sizes, axis=1)
    return memory


def current_memory(unit: Float64[Cube, "H_kv n d"], W: int) -> Float64[Cube, "H_kv n d"]:
    """Return the current memory mu_c(i): the mean of the last W unit keys up to and including token i.

    For the first W - 1 tokens, the mean is over fewer than W keys. The function subtracts running sums in float64,
    because in float32 this subtraction would have an error of 1e-4 at 32K tokens.

    Implements: NK-CURRENT

    Source: Eq. 8.
    """
    running = np.cumsum(unit, axis=1)
    window = running.copy()
    window[:, W:] -= running[:, :-W]
    mean: Cube = window / np.minimum(np.arange(1, unit.shape[1] + 1), W)[:, None]
    return mean


def anomalies(unit: Float64[Cube, "H_kv n d"], memory: Float64[Cube, "H_kv m d"]) -> Float64[Matrix, "H_kv n"]:
    """Return the anomaly of each token: the negative cosine of the token's unit key with the token's memory.

    Either all tokens share one memory (m = 1), or each token has a separate memory (m = n). The anomaly of a token is 0
    if the length of the token's memory is at most `NEGLIGIBLE`.

    Implements: NK-ANOMALY

    Source: Eq. 9.
    """
    dot = (unit * memory).sum(axis=2)
    length = np.broadcast_to(np.sqrt((memory * memory).sum(axis=2)), dot.shape)
    cosine: Matrix = np.divide(dot, length, out=np.zeros_like(dot), where=length > NEGLIGIBLE)
    return -cosine


def min_max(a: Float64[Matrix, "H_kv n"]) -> Float64[Matrix, "H_kv n"]:
    """Return each head's values, min-max normalised to [0, 1].

    If the range of a head's values is at most `NEGLIGIBLE`, all values of the head become 0.

    Implements: NK-MIN-MAX

    Source: Section 2.3, below Eq. 9.
    """
    above = a - a.min(axis=1, keepdims=True)
    spread = np.broadcast_to(above.max(axis=1, keepdims=True), a.shape)
    normalised: Matrix = np.divide(above, spread, out=np.zeros_like(a), where=spread > NEGLIGIBLE)
    return normalised


def gap(a: Float64[Cube, "3 H_kv n"], p: Fraction) -> Float64[Matrix, "3 H_kv"]:
    """Return Delta (the reliability gap) per memory and head: mean of the m largest a, minus mean of the m smallest a.

    For n tokens, m is max(1, floor(p n)).

    Implements: NK-GAP

    Source: Eq. 10.
    """
    m = max(1, math.floor(p * a.shape[2]))
    ordered = np.sort(a, axis=2)
    delta: Matrix = ordered[:, :, -m:].mean(axis=2) - ordered[:, :, :m].mean(axis=2)
    return delta


def blend(
    a: Float64[Cube, "3 H_kv n"], delta: Float64[Matrix, "3 H_kv"], parameters: NestedKVParameters,
) -> Float64[Matrix, "H_kv n"]:
    """Return a_blend: a weighted mean of the three anomalies. A head's weights are proportional to w0 exp(beta Delta).

    Implements: NK-BLEND

    Source: Eq. 11 and 12. w0 exp(beta Delta) is exp(log w0 + beta Delta) of Eq. 11.
    """
    gain = parameters.beta * delta
    w = np.array(parameters.w0)[:, None] * np.exp(gain - np.maximum(gain.max(axis=0) - LARGEST_EXPONENT, 0.0))
    w = w / w.sum(axis=0)
    blended: Matrix = (w[:, :, None] * a).sum(axis=0)
    return blended


def rectified_surprise(a: Float64[Cube, "3 H_kv n"]) -> Float64[Matrix, "H_kv n"]:
    """Return the rectified surprise s of each token.

    The surprise of a token is the population standard deviation of the token's three anomalies, min-max normalised per
    head. The rectified surprise s is max(0, surprise - mean surprise of the head).

    Implements: NK-SURPRISE

    Source: Eq. 13, and "Hyperparameters" in Appendix A. Without the normalisation of the appendix the gate would never
    open. The standard deviation of three numbers in [0, 1] is at most 0.58, and tau is 0.6.
    """
    s = min_max(a.std(axis=0))
    rectified: Matrix = np.maximum(0.0, s - s.mean(axis=1, keepdims=True))
    return rectified


def routed_score(
    a: Float64[Cube, "3 H_kv n"], blended: Float64[Matrix, "H_kv n"], s: Float64[Matrix, "H_kv n"],
    parameters: NestedKVParameters,
) -> Float64[Matrix, "H_kv n"]:
    """Return a* = (1 - alpha) a_blend + alpha max(a), with the gate alpha = sigma(kappa (s - tau)).

    Implements: NK-ROUTE

    Source: Eq. 14 and 15.
    """
    with np.errstate(over="ignore"):  # if exp overflows to inf, the gate is 0
        alpha = 1.0 / (1.0 + np.exp(-parameters.kappa * (s - parameters.tau)))
    routed: Matrix = (1.0 - alpha) * blended + alpha * a.max(axis=0)
    return routed


def anomaly_score(k: DeviceArray, parameters: NestedKVParameters) -> Float64[Matrix, "H_kv n"]:
    """Return the score a* of one layer's keys k (H_kv, n, d), computed in float64.

    Implements: NK-SCORE

    Source: Eq. 3 to 15.

    Raises:
        SpecError: if a key is zero.
    """
    unit = unit_keys(np.asarray(k, dtype=np.float64))
    memories = (
        stable_memory(unit), episodic_memory(unit, block_size(unit.shape[1], parameters)),
        current_memory(unit, parameters.W),
    )
    a = np.stack([min_max(anomalies(unit, memory)) for memory in memories])
    blended = blend(a, gap(a, parameters.p), parameters)
    return routed_score(a, blended, rectified_surprise(a), parameters)
