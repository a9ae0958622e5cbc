"""Numbers with a certified error, for brute forces: what an expression can be if each operation is rounded.

A `Box` is an interval. Inside `rounding(unit)` every operation on boxes widens its result by `unit`, relatively, so
that the box holds the exact value, and what any arithmetic with that rounding makes of the same expression, with sums
in any order. A comparison that a box does not decide raises `Undecided`. Two boxes of one tag are the same expression
of the same inputs, and equal. Sums of integers are exact. The functions here take floats too, and are then those of
`math`.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any, TypeAlias, Union

DOUBLE, SINGLE = 2.0**-51, 2.0**-22
"""Units of the arithmetic of a subject: four times its unit roundoff."""
FUNCTION = 4.0
"""Units by which a library's exp, log, sin or cos may be wrong."""
WHOLE = 2.0**24
"""Integers below are exact in float32, and so are their sums."""
TINY = {DOUBLE: 2.0**-1000, SINGLE: 2.0**-120}
"""What underflows."""


class Undecided(Exception):
    """A comparison that rounding decides."""


class _State:
    """Of the rounding that is on: none, or a unit; and whether equal tags tie to the lower index."""

    unit = 0.0
    tiny = 0.0
    lower_first = True
    names = count()


@contextmanager
def rounding(unit: float, lower_first: bool = True) -> Iterator[None]:
    """Inside the block leaves are boxes."""
    before = _State.unit, _State.tiny, _State.lower_first
    _State.unit, _State.tiny, _State.lower_first = unit, TINY[unit], lower_first
    try:
        yield
    finally:
        _State.unit, _State.tiny, _State.lower_first = before


class Box:
    """An interval, and which expression it is of."""

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
        b = _box(other)
        return _widened(self.lo + b.lo, self.hi + b.hi, ("+", self.tag, b.tag))

    __radd__ = __add__

    def __sub__(self, other: "Number") -> "Box":
        b = _box(other)
        if b.tag == self.tag:
            return Box(0.0, 0.0, 0.0)
        return _widened(self.lo - b.hi, self.hi - b.lo, ("-", self.tag, b.tag))

    def __rsub__(self, other: "Number") -> "Box":
        return _box(other) - self

    def __mul__(self, other: "Number") -> "Box":
        b = _box(other)
        ends = (self.lo * b.lo, self.lo * b.hi, self.hi * b.lo, self.hi * b.hi)
        return _widened(min(ends), max(ends), ("*", self.tag, b.tag))

    __rmul__ = __mul__

    def __truediv__(self, other: "Number") -> "Box":
        b = _box(other)
        if b.tag == self.tag and b:
            return Box(1.0, 1.0, 1.0)
        if b.lo == b.hi == 1:
            return self
        if b.lo <= 0 <= b.hi:
            raise Undecided("a divisor can be zero")
        ends = (self.lo / b.lo, self.lo / b.hi, self.hi / b.lo, self.hi / b.hi)
        return _widened(min(ends), max(ends), ("/", self.tag, b.tag))

    def __rtruediv__(self, other: "Number") -> "Box":
        return _box(other) / self

    def __pow__(self, power: float) -> "Box":
        base = abs(self) if power == 2 else self
        if base.lo < 0:
            raise Undecided("the base of a power can be below zero")
        return _widened(base.lo**power, base.hi**power, ("**", self.tag, power), FUNCTION)

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
        b = _box(other)
        if self.tag == b.tag or self.lo == self.hi == b.lo == b.hi:
            return True
        return self._open(b)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: "Number") -> bool:
        b = _box(other)
        return self.tag != b.tag and (self.hi < b.lo or not (self.lo >= b.hi or self._open(b)))

    def __gt__(self, other: "Number") -> bool:
        return _box(other) < self

    def __le__(self, other: "Number") -> bool:
        return not self > other

    def __ge__(self, other: "Number") -> bool:
        return not self < other

    def _open(self, other: "Box") -> bool:
        """False where the intervals are apart.

        Raises:
            Undecided: where they are not.
        """
        if self.lo <= other.hi and other.lo <= self.hi:
            raise Undecided(f"{self!r} or {other!r}")
        return False


Number: TypeAlias = Union[float, Box]  # noqa: UP007


def _box(x: Any) -> Box:
    if isinstance(x, Box):
        return x
    return Box(float(x), float(x), float(x))


def _exact(x: Any, *values: Any) -> bool:
    """Whether an arithmetic of any precision here computes sums of these boxes, of size x at most, without rounding."""
    return x < WHOLE and all(v.lo == v.hi and v.lo.is_integer() for v in values)


def _widened(lo: float, hi: float, tag: Any, times: float = 1.0) -> Box:
    unit = times * _State.unit
    return Box(lo - unit * abs(lo) - _State.tiny, hi + unit * abs(hi) + _State.tiny, hash(tag))


def leaves(array: Any) -> Any:
    """An array as lists of its numbers: exact boxes while rounding is on, else floats."""
    if not _State.unit:
        return array.tolist()
    return _leaves(array.tolist())


def _leaves(x: Any) -> Any:
    return [_leaves(inner) for inner in x] if isinstance(x, list) else Box(x, x, ("leaf", next(_State.names)))


def fsum(terms: Iterable[Any]) -> Any:
    """The sum of floats or boxes."""
    terms = list(terms)
    with suppress(TypeError):  # a box is no float
        return math.fsum(terms)
    boxes = [_box(x) for x in terms]
    size = math.fsum([max(-x.lo, x.hi) for x in boxes])
    error = 0.0 if _exact(size, *boxes) else _State.unit * len(boxes) * size + _State.tiny
    low, high = math.fsum([x.lo for x in boxes]), math.fsum([x.hi for x in boxes])
    return Box(low - error, high + error, hash(tuple(x.tag for x in boxes)))


def dot(a: Sequence[Any], b: Sequence[Any]) -> Any:
    """The sum of products."""
    if not (a and (isinstance(a[0], Box) or isinstance(b[0], Box))):
        return math.fsum(x * y for x, y in zip(a, b, strict=True))
    pairs = [(_box(x), _box(y)) for x, y in zip(a, b, strict=True)]
    telling = [(x, y) for x, y in pairs if x != 0] if all(_exact(0, x) for x, _ in pairs) else []
    if len(telling) == 1 and telling[0][0] == 1:
        return telling[0][1]
    if any(x.lo != x.hi or y.lo != y.hi for x, y in pairs):
        return fsum([x * y for x, y in pairs])
    products = [x.lo * y.lo for x, y in pairs]
    size, total = math.fsum(map(abs, products)), math.fsum(products)
    exact = _exact(size, *(x for pair in pairs for x in pair))
    error = 0.0 if exact else _State.unit * (len(pairs) + 1) * size + _State.tiny
    return Box(total - error, total + error, hash(("dot", *(x.tag for pair in pairs for x in pair))))


def _function(of: Callable[[float], float]) -> Callable[[Any], Any]:
    """A growing function of `math`, on boxes too."""
    def applied(x: Any) -> Any:
        if not isinstance(x, Box):
            return of(x)
        return _widened(of(x.lo), of(x.hi), (of.__name__, x.tag), FUNCTION)

    return applied


exp, log, tanh = _function(math.exp), _function(math.log), _function(math.tanh)


def sqrt(x: Any) -> Any:
    """The root; what rounding brings below zero is zero."""
    if not isinstance(x, Box):
        return math.sqrt(x)
    if _exact(x.hi, x) and x.lo >= 0 and math.isqrt(int(x.lo)) ** 2 == x.lo:
        return _box(math.sqrt(x.lo))
    tag = x.lo if x.lo == x.hi else x.tag  # a root is that of its value: correctly rounded everywhere
    return _widened(math.sqrt(max(0.0, x.lo)), math.sqrt(max(0.0, x.hi)), ("sqrt", tag))


def around(values: Sequence[Any], units: float) -> list[Any]:
    """While rounding is on, boxes of so many units of the largest value, as an item of the specification bounds it."""
    if not _State.unit:
        return list(values)
    error = units * _State.unit * max((abs(x) for x in values if x is not None), default=0.0)
    return [None if x is None else Box(x - error, x + error, ("around", next(_State.names))) for x in values]


def norm(x: Sequence[Any]) -> Any:
    """The length of a vector; of floats, also where no float holds its square."""
    return sqrt(dot(x, x)) if x and isinstance(x[0], Box) else math.hypot(*x)


def _turned(of: Callable[[float], float]) -> Callable[[Any], Any]:
    """A function of `math` that changes no faster than its argument, on boxes too."""
    def applied(x: Any) -> Any:
        if not isinstance(x, Box):
            return of(x)
        middle, error = (x.lo + x.hi) / 2, (x.hi - x.lo) / 2 + FUNCTION * _State.unit * (1 + abs(x.hi))
        return Box(of(middle) - error, of(middle) + error, hash((of.__name__, x.tag)))

    return applied


cos, sin = _turned(math.cos), _turned(math.sin)


def largest(values: Iterable[Any]) -> Any:
    """The maximum: the box of it where that is sure, else one that holds it."""
    return _extreme(list(values), max, lambda x, low, high: x.hi >= low)


def least(values: Iterable[Any]) -> Any:
    """The minimum, as `largest`."""
    return _extreme(list(values), min, lambda x, low, high: x.lo <= high)


def _extreme(values: list[Any], of: Callable[..., Any], may_be: Callable[[Box, float, float], bool]) -> Any:
    if not any(isinstance(x, Box) for x in values):
        return of(values)
    boxes = [_box(x) for x in values]
    low, high = of(x.lo for x in boxes), of(x.hi for x in boxes)
    possible = {x.tag: x for x in boxes if may_be(x, low, high)}
    if len(possible) == 1:
        return next(iter(possible.values()))
    return Box(low, high, hash((of.__name__, frozenset(possible))))


def ordered(values: Sequence[Any]) -> list[Any]:
    """From the largest to the smallest value: of boxes, what the first, the second, ... can be."""
    if not any(isinstance(x, Box) for x in values):
        return sorted(values, reverse=True)
    boxes = [_box(x) for x in values]
    low, high = (sorted((getattr(x, end) for x in boxes), reverse=True) for end in ("lo", "hi"))
    tag = hash(tuple(x.tag for x in boxes))
    return [Box(*ends, (tag, at)) for at, ends in enumerate(zip(low, high, strict=True))]


def places(values: Sequence[Any]) -> list[tuple[int, int]]:
    """How many of the others come before each, at least and at most: higher ones, and equal ones of a lower index."""
    boxes = [_box(x) for x in values]
    low, high = (sorted(getattr(x, end) for x in boxes) for end in ("lo", "hi"))
    same: dict[Any, list[int]] = {}
    for at, x in enumerate(boxes):
        same.setdefault(x.tag, []).append(at)
    found = []
    for at, x in enumerate(boxes):
        equal = same[x.tag]
        before = bisect_left(equal, at) if _State.lower_first else 0
        after = len(equal) - 1 - before if _State.lower_first else 0
        higher = len(boxes) - bisect_right(low, x.hi) + before
        found.append((higher, len(boxes) - 1 - bisect_left(high, x.lo) - after))
    return found


class Answer(list[int]):
    """A kept set, and the tokens of it and beside it that rounding may exchange."""

    open: frozenset[int] = frozenset()
    scores: Sequence[Any] = ()
    """Of all tokens, where the set is chosen by them at once; None where a token is protected."""

    def __init__(self, sure: Iterable[int], open_: Sequence[int] = (), number: int = 0) -> None:
        super().__init__(sorted([*sure, *open_[:number]]))
        self.open = frozenset(open_)


def surely(kept: list[int]) -> list[int]:
    """The same kept set.

    Raises:
        Undecided: where rounding decides it.
    """
    if getattr(kept, "open", None):
        raise Undecided("a choice before the last one")
    return kept


def holds(wanted: Any, x: float) -> bool:
    """Whether a number lies in a box; any does where there is none."""
    return wanted is None or _box(wanted).lo <= x <= _box(wanted).hi


def fits(kept: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether a kept set is one of those that the boxes admit."""
    free: frozenset[int] = getattr(wanted, "open", frozenset())
    return len(kept) == len(set(kept)) == len(wanted) and set(kept) - free == set(wanted) - free
