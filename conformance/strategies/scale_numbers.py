"""Pseudo-random integers that any language can make again: the generator of spec/vectors/README.md, SplitMix64.

Everything else here is made of these integers alone: no generator of a library, whose stream may change.
"""

import numpy as np

from spec.arrays import IntVector, Vector

__all__ = ["Numbers", "Words", "mixed"]

Words = np.ndarray[tuple[int], np.dtype[np.uint64]]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
FIRST, SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def mixed(seed: Words, t: IntVector) -> Words:
    """The t-th word of a seed, one by one; t counts from 1."""
    z = seed + t.astype(np.uint64) * GOLDEN
    z = (z ^ (z >> np.uint64(30))) * FIRST
    z = (z ^ (z >> np.uint64(27))) * SECOND
    found: Words = z ^ (z >> np.uint64(31))
    return found


class Numbers:
    """The stream of one seed; each call goes on where the last one stopped."""

    def __init__(self, seed: int) -> None:
        self.seed, self.used = np.uint64(seed), 0

    def words(self, size: int) -> Words:
        """The next numbers, 64 bits each."""
        t = np.arange(self.used + 1, self.used + size + 1)
        self.used += size
        return mixed(np.full(size, self.seed), t)

    def integers(self, low: int, high: int, size: int) -> IntVector:
        """`low` plus a number modulo `high - low`."""
        return (self.words(size) % np.uint64(high - low)).astype(np.int64) + low

    def fractions(self, size: int, bits: int = 53) -> Vector:
        """Multiples of 2^-bits in [0, 1): the number's highest bits."""
        return (self.words(size) >> np.uint64(64 - bits)).astype(np.float64) / 2.0**bits

    def below(self, high: IntVector) -> IntVector:
        """One number modulo each bound."""
        return (self.words(len(high)) % high.astype(np.uint64)).astype(np.int64)

    def permutation(self, n: int) -> IntVector:
        """0 to n - 1 in the order of n numbers, equal ones by place."""
        return np.argsort(self.words(n), kind="stable").astype(np.int64)
