"""Decode: which trunks are active, by the norms of their keys (Section 3.8(a))."""

import numpy as np

from spec.arrays import Bool, BoolVector, Float, Float64, RawCube, Vector
from spec.decode import LiveTrunks

__all__ = ["active_trunks", "inverse_key_norms", "normalised_inverse_norms"]

SMALL, LARGE = 2.0**-500, 2.0**500
UP, DOWN = 2.0**600, 2.0**-600


def inverse_key_norms(k: Float[RawCube, "H_kv n d"]) -> Float64[Vector, " n"]:
    """Mean over KV heads of 1 / ||k||; infinite where one of the token's keys is zero.

    Implements: CC-KEY-NORM

    Source: Section 3.8(a). The observed layer's keys; a rotation does not change a norm. A key whose squares float64
    does not hold is scaled by a power of two, which is exact.
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
    """eta: inverse norms over the largest finite one; 1 for a zero key.

    Implements: CC-ETA

    Source: Section 3.8(a), "normalise by the per-sequence maximum".
    """
    zero = np.isinf(inverse_norms)
    largest = inverse_norms[~zero].max(initial=0.0)
    eta = np.ones(len(inverse_norms))
    eta[~zero] = inverse_norms[~zero] / largest
    return eta


def active_trunks(live: LiveTrunks, theta_act: float) -> Bool[BoolVector, " m"]:
    """Trunks of which more than half of the live tokens have eta above theta_act.

    Implements: CC-ACTIVATION

    Source: Section 3.8(a). No query enters: what is active depends on cached keys alone.
    """
    above = normalised_inverse_norms(live.inverse_norms) > theta_act
    m = len(live.trunk_impact)
    number = np.bincount(np.repeat(np.arange(m), live.sizes)[above], minlength=m)
    active: BoolVector = 2 * number > live.sizes
    return active
