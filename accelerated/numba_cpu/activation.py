"""Selection of the active trunks by the norms of the keys, for decode-time eviction (Section 3.8(a))."""

import numpy as np

from accelerated.numba_cpu.compiled import compiled
from spec.arrays import BoolVector, Cube, IntVector, Vector
from spec.decode import LiveTrunks
from spec.policy import DeviceArray

__all__ = ["active_trunks", "inverse_key_norms"]

SMALL, LARGE = 2.0**-1000, 2.0**1000  # between these bounds, a sum of squares is exact enough
UP, DOWN = 2.0**600, 2.0**-600


def inverse_key_norms(k: DeviceArray) -> Vector:
    """Return each token's mean of 1 / ||k|| over the KV heads, (n,) in float64. The keys have any floating dtype.

    Implements: CC-KEY-NORM
    """
    with np.errstate(over="ignore"):  # a square that overflows is computed again with scaled keys
        mean: Vector = mean_inverse(k.astype(np.float64))
    return mean


@compiled()
def mean_inverse(k: Cube) -> Vector:
    """Return the mean inverse norms. A zero key gives inf. Keys are scaled if float64 cannot represent the squares."""
    total = np.zeros(k.shape[1])
    for h in range(k.shape[0]):
        for i in range(k.shape[1]):
            scale, square = 1.0, sum_of_squares(k[h, i], 1.0)
            if not SMALL < square < LARGE:
                scale = UP if square < 1.0 else DOWN
                square = sum_of_squares(k[h, i], scale)
            total[i] += scale / np.sqrt(square) if square > 0 else np.inf
    return total / k.shape[0]


@compiled(inline="always")
def sum_of_squares(key: Vector, scale: float) -> float:
    """Return the sum of squares of the scaled channels, added from the first channel to the last."""
    square = 0.0
    for c in range(len(key)):
        square += (scale * key[c]) * (scale * key[c])
    return square


def active_trunks(live: LiveTrunks, theta_act: float) -> BoolVector:
    """Return a mask of the active trunks. In an active trunk, more than half of the live tokens have eta > theta_act.

    Implements: CC-ETA, CC-ACTIVATION
    """
    active: BoolVector = majority(live.inverse_norms, live.offsets, theta_act)
    return active


@compiled()
def majority(inverse_norms: Vector, offsets: IntVector, theta_act: float) -> BoolVector:
    """Return the mask of active trunks. One pass finds the largest finite value, and a second pass counts tokens."""
    largest = 0.0
    for x in inverse_norms:
        if x < np.inf:
            largest = max(largest, x)
    active = np.zeros(len(offsets) - 1, dtype=np.bool_)
    for g in range(len(active)):
        number = 0
        for i in range(offsets[g], offsets[g + 1]):
            eta = inverse_norms[i] / largest if inverse_norms[i] < np.inf else 1.0
            number += eta > theta_act
        active[g] = 2 * number > offsets[g + 1] - offsets[g]
    return active
