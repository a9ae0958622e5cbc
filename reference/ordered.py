"""Sums in a stated order, so that every backend can reproduce their bits."""

from functools import reduce
from operator import add

from spec.arrays import Float64, Vector

__all__ = ["left_to_right_sum"]


def left_to_right_sum(values: Float64[Vector, " n"]) -> float:
    """values[0] + values[1] + ..., rounding after each term; np.sum would pair terms, math.fsum round once."""
    return reduce(add, values.tolist(), 0.0)
