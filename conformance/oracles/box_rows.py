"""Many boxes at once, for large inputs: rows, and tables of input numbers."""

from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any

import numpy as np

from conformance.oracles.box import FUNCTION, SPREAD, Box, State, Undecided, box


class Row(Sequence[Any]):
    """Many boxes in one array, for large inputs.

    Each operation gives the same boxes as the operation on single boxes.
    """

    __slots__ = ("hi", "lo", "tags")

    def __init__(self, lo: Any, hi: Any, tags: Any) -> None:
        self.lo, self.hi, self.tags = lo, hi, tags

    @property
    def exact(self) -> bool:
        """Return True if the values are inputs, so that they have no rounding error."""
        return self.lo is self.hi

    def __len__(self) -> int:
        return len(self.lo)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, int | np.integer):
            return Box(float(self.lo[at]), float(self.hi[at]), int(self.tags[at]))
        lo = self.lo[at]
        return Row(lo, lo if self.exact else self.hi[at], self.tags[at])

    def __iter__(self) -> Iterator[Box]:
        return map(Box, self.lo.tolist(), self.hi.tolist(), self.tags.tolist())

    def _with(self, other: Any, symbol: str, ends: Sequence[Any], times: float = 1.0) -> "Row":
        if isinstance(other, Row):
            tags = (self.tags * SPREAD) ^ (other.tags + np.uint64(word(symbol)))
        else:
            tags = (self.tags * SPREAD) ^ np.uint64((word(other.tag) + word(symbol)) % 2**64)
        lo, hi = _bound(np.minimum, ends), _bound(np.maximum, ends)
        unit = times * State.unit
        return Row(lo - unit * np.abs(lo) - State.tiny, hi + unit * np.abs(hi) + State.tiny, tags)

    def __mul__(self, other: Any) -> "Row":
        b = other if isinstance(other, Row) else box(other)
        if isinstance(b, Box) and b.lo == b.hi:
            return self._with(b, "*", (self.lo * b.lo, self.hi * b.lo))
        return self._with(b, "*", (self.lo * b.lo, self.lo * b.hi, self.hi * b.lo, self.hi * b.hi))

    def __add__(self, other: Any) -> "Row":
        b = other if isinstance(other, Row) else box(other)
        return self._with(b, "+", (self.lo + b.lo, self.hi + b.hi))

    def __truediv__(self, other: Any) -> "Row":
        b = other if isinstance(other, Row) else box(other)
        if np.any((b.lo <= 0) & (b.hi >= 0)):
            raise Undecided("a divisor can be zero")
        if np.all(b.lo == 1) and np.all(b.hi == 1):
            return self
        return self._with(b, "/", (self.lo / b.lo, self.lo / b.hi, self.hi / b.lo, self.hi / b.hi))

    def __sub__(self, other: Any) -> "Row":
        b = other if isinstance(other, Row) else box(other)
        result = self._with(b, "-", (self.lo - b.hi, self.hi - b.lo))
        same = self.tags == (b.tags if isinstance(b, Row) else np.uint64(word(b.tag)))
        return Row(np.where(same, 0.0, result.lo), np.where(same, 0.0, result.hi), result.tags)

    def mapped(self, of: Any) -> "Row":
        """Apply an increasing function of NumPy to each number."""
        return self._with(box(0.0), of.__name__, (of(self.lo), of(self.hi)), FUNCTION)

    def turned(self, of: Any) -> "Row":
        """Apply a NumPy function, whose slope must be at most 1, to each number."""
        error = (self.hi - self.lo) / 2 + FUNCTION * State.unit * (1 + np.abs(self.hi))
        middle = of((self.lo + self.hi) / 2)
        return Row(middle - error, middle + error, self.tags * SPREAD + np.uint64(word(of.__name__)))

    def squares(self) -> "Row":
        """Return the square of each number."""
        low, high = np.abs(self.lo), np.abs(self.hi)
        least_ = np.where((self.lo < 0) & (self.hi > 0), 0.0, np.minimum(low, high))
        return self._with(box(2.0), "**", (least_**2, np.maximum(low, high) ** 2))

    def totals(self) -> Any:
        """Return the sum of the row, or the sum of each of stacked rows."""
        size, number = np.maximum(-self.lo, self.hi).sum(axis=-1), self.lo.shape[-1]
        error, tags = State.unit * number * size + State.tiny, (self.tags * odd(number)).sum(axis=-1)
        lo, hi = self.lo.sum(axis=-1) - error, self.hi.sum(axis=-1) + error
        return Box(float(lo), float(hi), int(tags)) if self.lo.ndim == 1 else Row(lo, hi, tags)

    def moved(self, by: int, beyond: float) -> "Row":
        """Return the row shifted by `by` places to the left. Places without a number have the number `beyond`."""
        at = np.arange(len(self)) + by
        inside, at = (at >= 0) & (at < len(self)), np.clip(at, 0, len(self) - 1)
        lo, hi = (np.where(inside, ends[at], beyond) for ends in (self.lo, self.hi))
        return Row(lo, hi, np.where(inside, self.tags[at], np.uint64(0)))

    def extended(self, n: int) -> "Row":
        """Append zeros, up to n numbers."""
        rest = np.zeros(n - len(self.lo))
        lo, hi = np.concatenate([self.lo, rest]), np.concatenate([self.hi, rest])
        return Row(lo, hi, np.concatenate([self.tags, np.zeros(len(rest), np.uint64)]))


class Table(Sequence[Any]):
    """Numbers of an input array with more than one axis."""

    __slots__ = ("array", "tags")

    def __init__(self, array: Any, tags: Any) -> None:
        self.array, self.tags = array, tags

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, at: Any) -> Any:
        return part(self.array[at], self.tags[at])


def part(array: Any, tags: Any) -> Any:
    return Row(array, array, tags) if array.ndim == 1 else Table(array, tags)


def _bound(of: Any, ends: Sequence[Any]) -> Any:
    return reduce(of, ends)


def odd(number: int) -> Any:
    """Return `number` odd factors, for a tag that combines several tags in this order."""
    return (2 * np.arange(number, dtype=np.uint64) + 1) * SPREAD


def word(tag: Any) -> int:
    """Return a tag in 64 bits. A box of a row has the tag of the row's place."""
    return tag if type(tag) is int and 0 <= tag < 2**64 else hash((tag,)) % 2**64
