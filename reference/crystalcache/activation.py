"""Decode: selection of the active trunks by the norms of their keys (Section 3.8(a))."""

import numpy as np

from spec.arrays import Bool, BoolVector, Float, Float64, RawCube, Vector
from spec.decode import LiveTrunks

__all__ = ["active_trunks", "inverse_key_norms", "normalised_inverse_norms"]

SMALL, LARGE = 2.0**-500, 2.0**500
UP, DOWN = 2.0**600, 2.0**-600


def inverse_key_norms(k: Float[RawCube, "H_kv n d"]) -> Float64[Vector, " n"]:
    """Return each token's mean of 1 / ||k|| over the KV heads. The mean is inf if a key of the token is zero.

    Implements: CC-KEY-NORM

    Source: Section 3.8(a). The paper does not state how the KV heads are combined: kvspec takes the mean. The array k
    contains the keys of the observed layer. RoPE does not change the norm of a key. If a squared channel would overflow
    or underflow float64, the key is first scaled by a power of two, without rounding error.
    """
    wide = k.astype(np.float64)
    largest = np.abs(wide).max(axis=2)
    scale = np.where(largest < SMALL, UP, np.where(largest > LARGE, DOWN, 1.0))
    scaled = wide * scale[..., None]
    norm = np.sqrt((scaled * scaled).sum(axis=2))
    with np.errstate(divide="ignore", over="ignore"):
        mean: Vector = (scale / norm).sum(axis=0) / len(k)
    return mean


def normalised_inverse_norms(inverse_norms: Float64[Vector, " live"]) -> Float64[Vector, " live"]:
    """Return eta: the inverse norms divided by the largest finite inverse norm. eta is 1 for a zero key.

    Implements: CC-ETA

    Source: Section 3.8(a), "normalise by the per-sequence maximum".
    """
    zero = np.isinf(inverse_norms)
    largest = inverse_norms[~zero].max(initial=0.0)
    eta = np.ones(len(inverse_norms))
    eta[~zero] = inverse_norms[~zero] / largest
    return eta


def active_trunks(live: LiveTrunks, theta_act: float) -> Bool[BoolVector, " m"]:
    """Return a mask of the active trunks. A trunk is active if over half of its cached tokens have eta > theta_act.

    Implements: CC-ACTIVATION

    Source: Section 3.8(a). The section also has a mean over the tokens of a trunk. The majority of tokens needs one eta
    per token, so kvspec uses no such mean. Activation depends only on the cached keys, not on queries.
    """
    above = normalised_inverse_norms(live.inverse_norms) > theta_act
    m = len(live.trunk_impact)
    number = np.bincount(np.repeat(np.arange(m), live.sizes)[above], minlength=m)
    active: BoolVector = 2 * number > live.sizes
    return active
