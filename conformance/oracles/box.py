"""Numbers with a certified error, for brute forces: all values of an expression if each operation is rounded.

A `Box` is an interval. Inside `rounding(unit)` every operation on boxes widens its result by the relative error `unit`.
The box then contains the exact value, and the result of any arithmetic with this rounding, with sums in any order. A
comparison that a box cannot decide raises `Undecided`. Two boxes with the same tag come from the same expression of the
same inputs, and count as equal. Sums of integers are exact.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, TypeAlias, Union

import numpy as np

DOUBLE, SINGLE = 2.0**-51, 2.0**-22
"""Units of the arithmetic under test: four times its unit roundoff."""
FUNCTION = 4.0
"""Maximum error of a library's exp, log, sin or cos, in units."""
WHOLE = 2.0**24
"""Bound of integers: smaller integers and their sums are exact in float32."""
LARGE = 4096
"""Minimum size of an array whose boxes are computed in rows."""
SPREAD = np.uint64(0x9E3779B97F4A7C15)
"""Odd factor that makes the tags of consecutive numbers differ in all bits."""
TINY = {DOUBLE: 2.0**-1000, SINGLE: 2.0**-120}
"""Absolute error by underflow."""


class Undecided(Exception):
    """Error of a comparison that rounding decides."""


class State:
    """Settings of the active rounding.

    `unit` is its unit roundoff (0 without rounding), and `first` orders equal tags.
    """

    unit = 0.0
    tiny = 0.0
    first = "lower"
    names = count()


@contextmanager
def rounding(unit: float, first: str = "lower") -> Iterator[None]:
    """Make `leaves` return boxes inside the block.

    Of equal boxes the "lower" index is first, the "higher", or "any".
    """
    before = State.unit, State.tiny, State.first
    State.unit, State.tiny, State.first = unit, TINY[unit], first
    try:
        yield
    finally:
        State.unit, State.tiny, State.first = before


class Box:
    """An interval, and the tag of its expression."""

    __slots__ = ("hi", "lo", "tag")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, lo: float, hi: float, tag: Any) -> None:
        self.lo, self.hi, self.tag = lo, hi, tag

    def __repr__(self) -> str:
        return f"{(self.lo + self.hi) / 2:.17g}"

    def __neg__(self) -> "Box":
        return Box(-self.hi, -self.lo, hash(("-", self.tag)))

    def __abs__(self) -> "Box":
        low = 0.0 if self.lo < 0 < self.hi else min(abs(self.lo), abs(self.hi))
        return Box(low, max(abs(self.lo), abs(self.hi)), hash(("abs", self.tag)))

    def __add__(self, other: "Number") -> "Box":
        b = box(other)
        return widened(self.lo + b.lo, self.hi + b.hi, ("+", self.tag, b.tag))

    __radd__ = __add__

    def __sub__(self, other: "Number") -> "Box":
        b = box(other)
        if b.tag == self.tag:
            return Box(0.0, 0.0, 0.0)
        return widened(self.lo - b.hi, self.hi - b.lo, ("-", self.tag, b.tag))

    def __rsub__(self, other: "Number") -> "Box":
        return box(other) - self

    def __mul__(self, other: "Number") -> "Box":
        b = box(other)
        ends = [self.lo * b.lo, self.hi * b.lo]
        if b.lo != b.hi:
            ends += [self.lo * b.hi, self.hi * b.hi]
        return widened(min(ends), max(ends), ("*", self.tag, b.tag))

    __rmul__ = __mul__

    def __truediv__(self, other: "Number") -> "Box":
        b = box(other)
        if b.tag == self.tag and b:
            return Box(1.0, 1.0, 1.0)
        if b.lo == b.hi == 1:
            return self
        if b.lo <= 0 <= b.hi:
            raise Undecided("a divisor can be zero")
        ends = (self.lo / b.lo, self.lo / b.hi, self.hi / b.lo, self.hi / b.hi)
        return widened(min(ends), max(ends), ("/", self.tag, b.tag))

    def __rtruediv__(self, other: "Number") -> "Box":
        return box(other) / self

    def __pow__(self, power: float) -> "Box":
        base = abs(self) if power == 2 else self
        if base.lo < 0:
            raise Undecided("the base of a power can be below zero")
        return widened(base.lo**power, base.hi**power, ("**", self.tag, power), FUNCTION)

    def __floordiv__(self, one: int) -> int:
        low, high = math.floor(self.lo), math.floor(self.hi)
        if one != 1 or low != high:
            raise Undecided("a whole part")
        return low

    def __mod__(self, one: int) -> "Box":
        return self - self // one

    def __bool__(self) -> bool:
        return self != 0

    def __eq__(self, other: object) -> bool:
        b = box(other)
        if self.tag == b.tag or self.lo == self.hi == b.lo == b.hi:
            return True
        return self._open(b)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: "Number") -> bool:
        b = box(other)
        return self.tag != b.tag and (self.hi < b.lo or not (self.lo >= b.hi or self._open(b)))

    def __gt__(self, other: "Number") -> bool:
        return box(other) < self

    def __le__(self, other: "Number") -> bool:
        return not self > other

    def __ge__(self, other: "Number") -> bool:
        return not self < other

    def _open(self, other: "Box") -> bool:
        """Return False if the intervals are disjoint.

        Raises:
            Undecided: if the intervals overlap.
        """
        if self.lo <= other.hi and other.lo <= self.hi:
            raise Undecided(f"{self!r} or {other!r}")
        return False


Number: TypeAlias = Union[float, Box]  # noqa: UP007


def box(x: Any) -> Box:
    if type(x) is Box:
        return x
    return Box(float(x), float(x), float(x))


def exact(x: Any, *values: Any) -> bool:
    """Return True if sums of these boxes have no rounding error, in float32 and in float64. `x` bounds their size."""
    return x < WHOLE and all(v.lo == v.hi and v.lo.is_integer() for v in values)


def widened(lo: float, hi: float, tag: Any, times: float = 1.0) -> Box:
    unit, tiny = times * State.unit, State.tiny
    return Box(lo - unit * abs(lo) - tiny, hi + unit * abs(hi) + tiny, hash(tag))
