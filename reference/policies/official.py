"""The allocators of official codes, which miss the stated budget: for comparison; the policies do not use them."""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from spec.arrays import Int64, IntVector
from spec.errors import SpecError

__all__ = ["adakv_official", "pyramidkv_official"]


def pyramidkv_official(capacity: int, W: int, L: int, n: int, beta: int = 20) -> Int64[IntVector, " L"]:
    """Tokens per layer, the window among them: integer steps, so that the sum exceeds L * capacity.

    Implements: PO-PYRAMID-OFFICIAL

    Source: KVCache-Factory, `pyramidkv_utils.py`. Below 2 (capacity - W) tokens every layer gets the capacity.

    Raises:
        SpecError: for fewer than two layers (the code divides by zero), or a capacity that is not above W.
    """
    if L < 2:
        raise SpecError("L", L, "must be at least 2: the step is divided by L - 1")
    base = capacity - W
    if base <= 0:
        raise SpecError("capacity", capacity, f"must exceed the window of {W}")
    if n < capacity or n < 2 * base:
        return np.full(L, min(n, capacity), dtype=np.int64)
    least = base // beta
    most = 2 * base - least
    if most >= n - W:
        most = n - W
        least = 2 * base - most
    step = (most - least) // (L - 1)
    return W + most - step * np.arange(L, dtype=np.int64)


def adakv_official(wins: Sequence[int], base: int, safeguard: Fraction) -> Int64[IntVector, " h"]:
    """Tokens per head beyond the window: each blend is rounded by itself, a half to the even neighbour.

    Implements: PO-ADAKV-OFFICIAL

    Source: Ada-KV's official code. The sum may miss len(wins) * base on either side.
    """
    floor = int(base * safeguard)
    return np.array([round(won * (1 - safeguard) + floor) for won in wins], dtype=np.int64)
