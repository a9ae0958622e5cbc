"""Sums in a fixed order, so that every backend can return the same bits."""

from functools import reduce
from operator import add

from spec.arrays import Float64, Vector

__all__ = ["left_to_right_sum"]


def left_to_right_sum(values: Float64[Vector, " n"]) -> float:
    """Return values[0] + values[1] + ..., rounded after each addition. np.sum and math.fsum round differently."""
    return reduce(add, values.tolist(), 0.0)
