"""Functions of boxes (see `box`), of floats, and of rows, which are many boxes at once.

For floats, they are the functions of `math`.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import chain, count
from operator import mul
from typing import Any

import numpy as np

from conformance.oracles.box import FUNCTION, LARGE, SPREAD, WHOLE, Box, State, Undecided, box, exact, widened
from conformance.oracles.box_rows import Row, Table, odd, part, word


def leaves(array: Any, large: bool = False) -> Any:
    """Return an array as nested lists: exact boxes while rounding is on, otherwise floats. Large arrays become rows."""
    if not State.unit:
        return array.tolist()
    if array.size < LARGE and not large:
        return _leaves(array.tolist())
    first = next(State.names)
    State.names = count(first + array.size)
    names = np.arange(first, first + array.size, dtype=np.uint64).reshape(array.shape) * SPREAD
    return part(np.asarray(array, np.float64), names)


class Vector(list[Box]):
    """Boxes of input numbers, with the numbers. A dot product of two vectors needs no operation for each box."""

    __slots__ = ("chooses", "numbers", "tags", "whole")

    def __init__(self, numbers: list[float]) -> None:
        self.numbers, self.tags = numbers, [("leaf", next(State.names)) for _ in numbers]
        self.whole = all(x.is_integer() for x in numbers)
        self.chooses = self.whole and numbers.count(0) == len(numbers) - 1 and 1 in numbers
        super().__init__(map(Box, numbers, numbers, self.tags))


def _leaves(x: Any) -> Any:
    if not isinstance(x, list):
        return Box(x, x, ("leaf", next(State.names)))
    return Vector(x) if x and isinstance(x[0], float) else [_leaves(inner) for inner in x]


def fsum(terms: Iterable[Any]) -> Any:
    """Return the sum of floats or boxes."""
    if isinstance(terms, Row):
        return terms.totals()
    terms = list(terms)
    with suppress(TypeError):  # a box is not a float
        return math.fsum(terms)
    boxes = [box(x) for x in terms]
    size = math.fsum([max(-x.lo, x.hi) for x in boxes])
    error = 0.0 if exact(size, *boxes) else State.unit * len(boxes) * size + State.tiny
    low, high = math.fsum([x.lo for x in boxes]), math.fsum([x.hi for x in boxes])
    return Box(low - error, high + error, hash(tuple(x.tag for x in boxes)))


def dot(a: Sequence[Any], b: Sequence[Any]) -> Any:
    """Return the sum of products."""
    if isinstance(a, Row) and isinstance(b, Row):
        return dots(a, Table(b.lo[None], b.tags[None]))[0] if a.exact and b.exact else (a * b).totals()
    if type(a) is Vector and type(b) is Vector and not a.chooses:
        return _dot_of_numbers(a.numbers, b.numbers, a.tags, b.tags, a.whole and b.whole)
    if not (a and (isinstance(a[0], Box) or isinstance(b[0], Box))):
        return math.fsum(x * y for x, y in zip(a, b, strict=True))
    pairs = [(box(x), box(y)) for x, y in zip(a, b, strict=True)]
    telling = [(x, y) for x, y in pairs if x != 0] if all(exact(0, x) for x, _ in pairs) else []
    if len(telling) == 1 and telling[0][0] == 1:
        return telling[0][1]
    if any(x.lo != x.hi or y.lo != y.hi for x, y in pairs):
        return fsum([x * y for x, y in pairs])
    firsts, seconds = ([pair[at] for pair in pairs] for at in (0, 1))
    return _dot_of_numbers(
        [x.lo for x in firsts], [y.lo for y in seconds], [x.tag for x in firsts], [y.tag for y in seconds],
        exact(0, *firsts, *seconds),
    )


def _dot_of_numbers(
    a: Sequence[float], b: Sequence[float], tags: Sequence[Any], others: Sequence[Any], whole: bool,
) -> Box:
    """Return the sum of products of numbers. It is exact if the numbers are whole, and the products are small."""
    products = list(map(mul, a, b))
    size, total = math.fsum(map(abs, products)), math.fsum(products)
    error = 0.0 if whole and size < WHOLE else State.unit * (len(products) + 1) * size + State.tiny
    return Box(total - error, total + error, hash(("dot", *chain.from_iterable(zip(tags, others, strict=True)))))


def _function(of: Callable[[float], float]) -> Callable[[Any], Any]:
    """Extend an increasing function of `math` to boxes and rows."""
    def applied(x: Any) -> Any:
        if isinstance(x, Box):
            return widened(of(x.lo), of(x.hi), (of.__name__, x.tag), FUNCTION)
        if isinstance(x, Row):
            with np.errstate(over="ignore"):
                return x.mapped(getattr(np, of.__name__))
        return of(x)

    return applied


exp, log, tanh = _function(math.exp), _function(math.log), _function(math.tanh)


def sqrt(x: Any) -> Any:
    """Return the square root. A number below zero, which is due to rounding, counts as zero."""
    if isinstance(x, Row):
        return Row(np.maximum(x.lo, 0.0), np.maximum(x.hi, 0.0), x.tags).mapped(np.sqrt)
    if not isinstance(x, Box):
        return math.sqrt(x)
    if exact(x.hi, x) and x.lo >= 0 and math.isqrt(int(x.lo)) ** 2 == x.lo:
        return box(math.sqrt(x.lo))
    # The root depends only on the value, because it is correctly rounded in every library.
    tag = x.lo if x.lo == x.hi else x.tag
    return widened(math.sqrt(max(0.0, x.lo)), math.sqrt(max(0.0, x.hi)), ("sqrt", tag))


def around(values: Sequence[Any], units: float) -> list[Any]:
    """Return boxes with an error of `units` times the largest value, as an item of the specification bounds it.

    Without rounding, return the values.
    """
    if not State.unit:
        return list(values)
    error = units * State.unit * max((abs(x) for x in values if x is not None), default=0.0)
    return [None if x is None else Box(x - error, x + error, ("around", next(State.names))) for x in values]


def norm(x: Sequence[Any]) -> Any:
    """Return the length of a vector. For floats, it is correct even if the square overflows or underflows."""
    return sqrt(dot(x, x)) if isinstance(x, Row) or (x and isinstance(x[0], Box)) else math.hypot(*x)


def _turned(of: Callable[[float], float]) -> Callable[[Any], Any]:
    """Extend a function of `math`, whose slope must be at most 1, to boxes and rows."""
    def applied(x: Any) -> Any:
        if isinstance(x, Row):
            return x.turned(getattr(np, of.__name__))
        if not isinstance(x, Box):
            return of(x)
        middle, error = (x.lo + x.hi) / 2, (x.hi - x.lo) / 2 + FUNCTION * State.unit * (1 + abs(x.hi))
        return Box(of(middle) - error, of(middle) + error, hash((of.__name__, x.tag)))

    return applied


cos, sin = _turned(math.cos), _turned(math.sin)


def largest(values: Iterable[Any]) -> Any:
    """Return the maximum: the box of the maximum if it is certain, otherwise a box that contains the maximum."""
    if isinstance(values, Row):
        values = values[values.hi >= values.lo.max()]
    return _extreme(list(values), max, lambda x, low, high: x.hi >= low)


def least(values: Iterable[Any]) -> Any:
    """Return the minimum, as `largest` does for the maximum."""
    if isinstance(values, Row):
        values = values[values.lo <= values.hi.min()]
    return _extreme(list(values), min, lambda x, low, high: x.lo <= high)


def _extreme(values: list[Any], of: Callable[..., Any], may_be: Callable[[Box, float, float], bool]) -> Any:
    if not any(isinstance(x, Box) for x in values):
        return of(values)
    boxes = [box(x) for x in values]
    low, high = of(x.lo for x in boxes), of(x.hi for x in boxes)
    possible = {x.tag: x for x in boxes if may_be(x, low, high)}
    if len(possible) == 1:
        return next(iter(possible.values()))
    return Box(low, high, hash((of.__name__, frozenset(possible))))


def row(boxes: Sequence[Any]) -> Any:
    """Return boxes as a row, and floats unchanged."""
    if isinstance(boxes, Row) or not boxes or not all(isinstance(x, Box) for x in boxes):
        return boxes
    lo, hi = (np.array([getattr(x, end) for x in boxes]) for end in ("lo", "hi"))
    return Row(lo, hi, np.array([word(x.tag) for x in boxes], np.uint64))


def stacked(rows: Any) -> Any:
    """Stack rows for operations with one row, and return lists unchanged."""
    if isinstance(rows, Table):
        return Row(rows.array, rows.array, rows.tags)
    if not rows or not all(isinstance(x, Row) for x in rows):
        return rows
    return Row(*(np.stack([getattr(x, name) for x in rows]) for name in ("lo", "hi", "tags")))


def unstacked(rows: Row) -> list[Row]:
    """Return stacked rows as a list of rows."""
    return [Row(*parts) for parts in zip(rows.lo, rows.hi, rows.tags, strict=True)]


def dots(a: Any, rows: Any) -> Any:
    """Return the inner product of a vector with each of some rows, which may be stacked."""
    if isinstance(a, Row) and isinstance(rows, Row):
        return products(rows, a) if a.exact else (rows * a).totals()
    if not (isinstance(a, Row) and isinstance(rows, Table)):
        return [dot(a, row) for row in rows]
    if not a.exact:
        return unstacked(products(stacked([a]), rows))[0]
    total, size = rows.array @ a.lo, np.abs(rows.array) @ np.abs(a.lo)
    numbers = np.concatenate([rows.array.ravel(), a.lo])
    whole = size.max() < WHOLE and bool((numbers == np.rint(numbers)).all())
    error = 0.0 * size if whole else State.unit * (len(a) + 1) * size + State.tiny
    tags = (rows.tags[:, 0] * SPREAD) ^ (a.tags[:1] + np.uint64(len(a)))
    return Row(total - error, total + error, tags)


def products(rows: Row, given: Row | Table) -> Row:
    """Return the inner products of each of stacked rows with one row of an input, or with each of several."""
    numbers = given.lo if isinstance(given, Row) else given.array.T
    of_given = given.tags[:1] if isinstance(given, Row) else given.tags[:, 0]
    middle, size, most = (rows.lo + rows.hi) / 2, np.maximum(-rows.lo, rows.hi), np.abs(numbers)
    total, error = middle @ numbers, State.unit * (len(numbers) + 1) * (size @ most) + State.tiny
    if not rows.exact:
        error += (rows.hi - rows.lo) / 2 @ most
    tags = (rows.tags * odd(len(numbers))).sum(axis=-1)[:, None] * SPREAD ^ (of_given + np.uint64(1))
    return Row(total - error, total + error, tags.reshape(total.shape))


def scaled(rows: Sequence[Any], sizes: Any, divisors: Sequence[Any]) -> Any:
    """Return each row multiplied by the sizes, and divided by its divisor."""
    each_ = row(divisors)
    if not (isinstance(each_, Row) and all(isinstance(one, Row) for one in [sizes, *rows])):
        return [times(row(values), over(sizes, x)) for values, x in zip(rows, divisors, strict=True)]
    factors = stacked([sizes]) / Row(each_.lo[:, None], each_.hi[:, None], each_.tags[:, None])
    return unstacked(stacked(rows) * factors)


def projected(values: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
    """Return the inner products of each vector with each column of a projection."""
    numbers = [row(output) for output in outputs]
    if not (isinstance(values, Table) and all(isinstance(output, Row) for output in numbers)):
        return [dots(value, outputs) for value in values]
    table = Table(*(np.stack([getattr(output, name) for output in numbers]) for name in ("lo", "tags")))
    return unstacked(products(stacked(values), table))


def column_sums(rows: Sequence[Any]) -> Any:
    """Return the sum of each column."""
    if not all(isinstance(row, Row) for row in rows):
        return [fsum(column) for column in zip(*rows, strict=True)]
    lo, hi, tags = (np.stack([getattr(one, name) for one in rows]) for name in ("lo", "hi", "tags"))
    tags = (tags * odd(len(rows))[:, None]).sum(axis=0)
    size = np.maximum(-lo, hi).sum(axis=0)
    error = np.where(size > 0, State.unit * len(rows) * size + State.tiny, 0.0)
    return Row(lo.sum(axis=0) - error, hi.sum(axis=0) + error, tags)


def column_extremes(of: Callable[..., Any], rows: Sequence[Any]) -> Any:
    """Return the largest or the least number of each column."""
    if not all(isinstance(one, Row) for one in rows):
        return row([of(column) for column in columns(rows)])
    lo, hi, tags = (np.stack([getattr(one, name) for one in rows]) for name in ("lo", "hi", "tags"))
    low, high = ((np.max if of is largest else np.min)(ends, axis=0) for ends in (lo, hi))
    possible = hi >= low if of is largest else lo <= high
    first = np.take_along_axis(tags, possible.argmax(axis=0)[None], axis=0)[0]
    sure = np.where(possible, tags == first, True).all(axis=0)
    return Row(low, high, np.where(sure, first, np.where(possible, tags * SPREAD, 0).sum(axis=0, dtype=np.uint64)))


def squares(values: Any) -> Any:
    """Return the square of each number."""
    return values.squares() if isinstance(values, Row) else [x**2 for x in values]


def directions(rows: Any, beside: float = 0.0) -> Any:
    """Return each row divided by the sum of its length and `beside`."""
    if not isinstance(rows, Table):
        return [over(x, norm(x) + beside) for x in rows]
    together = stacked(rows)
    lengths = sqrt(together.squares().totals())
    if beside:
        lengths = lengths + beside
    return unstacked(together / Row(lengths.lo[:, None], lengths.hi[:, None], lengths.tags[:, None]))


def positive(row: Any) -> Any:
    """Return the numbers above zero."""
    if not isinstance(row, Row):
        return [x for x in row if x > 0]
    if np.any((row.lo <= 0) & (row.hi > 0)):
        raise Undecided("a number can be zero")
    return row[row.lo > 0]


def columns(rows: Any) -> Any:
    """Return the columns of some rows, as rows."""
    if not isinstance(rows, Table) and rows and all(isinstance(x, Row) for x in rows):
        each_ = stacked(rows)
        return [Row(each_.lo[:, c], each_.hi[:, c], each_.tags[:, c]) for c in range(each_.lo.shape[1])]
    if isinstance(rows, Table):
        return Table(np.ascontiguousarray(rows.array.T), np.ascontiguousarray(rows.tags.T))
    return list(zip(*rows, strict=True))


def over(row: Any, x: Any) -> Any:
    """Divide each number of a row by x, or by the numbers of another row."""
    if isinstance(row, Row):
        return row / x
    return [a / b for a, b in zip(row, x, strict=True)] if isinstance(x, list) else [a / x for a in row]


def minus(row: Any, x: Any) -> Any:
    """Subtract x, or the numbers of another row, from each number of a row."""
    if isinstance(row, Row):
        return row - x
    return [a - b for a, b in zip(row, x, strict=True)] if isinstance(x, list) else [a - x for a in row]


def times(row: Any, x: Any) -> Any:
    """Multiply each number of a row by x, or by the numbers of another row."""
    if isinstance(row, Row):
        return row * x
    return [a * b for a, b in zip(row, x, strict=True)] if isinstance(x, list) else [a * x for a in row]


def plus(row: Any, x: Any) -> Any:
    """Add the numbers of another row to a row."""
    return row + x if isinstance(row, Row) else [a + b for a, b in zip(row, x, strict=True)]


def each(of: Callable[[Any], Any], row: Any) -> Any:
    """Apply a function to each number of a row."""
    return of(row) if isinstance(row, Row) else [of(a) for a in row]


def behind(row: Any, other: Any) -> Any:
    """Append a row to a row."""
    if isinstance(row, Row):
        return Row(*(np.concatenate([getattr(x, name) for x in (row, other)]) for name in ("lo", "hi", "tags")))
    return [*row, *other]


def extended(row: Any, n: int) -> Any:
    """Append zeros to a row, up to n numbers."""
    return row.extended(n) if isinstance(row, Row) else [*row, *[0.0] * (n - len(row))]


def joined(*rows: Any) -> Any:
    """Concatenate some lists of vectors."""
    if all(isinstance(part, Table) for part in rows):
        return Table(*(np.concatenate([getattr(part, name) for part in rows]) for name in ("array", "tags")))
    return [row for part in rows for row in part]
