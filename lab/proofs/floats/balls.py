"""Oracles with real numbers in place of floats: balls enclose the real values, and hostile libraries err the most."""

import importlib.util
import math
from collections.abc import Callable, Iterable
from fractions import Fraction
from functools import reduce
from itertools import count
from types import ModuleType, SimpleNamespace
from typing import Any

from flint import arb, ctx, fmpq

from conformance.oracles import added

__all__ = ["Ball", "Undecided", "exact", "hostile"]

ctx.prec = 400


class Undecided(Exception):
    """Error if two overlapping balls are compared, because the real values are too close to order."""


def ball(x: Any) -> arb:
    if isinstance(x, Ball):
        return x.arb
    return arb(fmpq(x.numerator, x.denominator)) if isinstance(x, Fraction) else arb(x)


class Ball:
    """Real number inside an interval. A comparison of overlapping balls raises `Undecided`."""

    def __init__(self, x: Any) -> None:
        self.arb = ball(x)

    def __abs__(self) -> "Ball":
        return Ball(abs(self.arb))

    def __neg__(self) -> "Ball":
        return Ball(-self.arb)

    def __float__(self) -> float:
        return float(self.arb)

    def __lt__(self, other: Any) -> bool:
        a, b = self.arb, ball(other)
        if a < b or a >= b:
            return bool(a < b)
        raise Undecided

    def __gt__(self, other: Any) -> bool:
        return bool(Ball(other) < self)

    def __ge__(self, other: Any) -> bool:
        return not self < other

    def __le__(self, other: Any) -> bool:
        return not self > other

    def __eq__(self, other: object) -> bool:
        return not (self < other or self > other)


def operator(name: str) -> Callable[[Any, Any], Ball]:
    def operate(self: Ball, other: Any) -> Ball:
        result: Callable[[arb], arb] = getattr(self.arb, name)
        return Ball(result(ball(other)))

    return operate


for name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow"):
    setattr(Ball, f"__{name}__", operator(f"__{name}__"))


def total(terms: Iterable[Any]) -> Ball:
    return Ball(sum(map(ball, terms), arb(0)))


BALLS = SimpleNamespace(
    inf=math.inf, prod=math.prod, fsum=total, sqrt=lambda x: Ball(ball(x).nonnegative_part().sqrt()),
    **{name: lambda x, name=name: Ball(getattr(ball(x), name)()) for name in ("exp", "log", "log1p", "tanh")},
)


def extreme(plain: Callable[..., Any], choose: Callable[[arb, arb], arb]) -> Callable[..., Any]:
    """Return `min` or `max` that also accepts balls. If the order is uncertain, the result is the union."""
    def chosen(*of: Any) -> Any:
        values = list(of if len(of) > 1 else of[0])
        if not any(isinstance(x, Ball) for x in values):
            return plain(values)
        return Ball(reduce(choose, map(ball, values)))

    return chosen


def private(oracle: ModuleType, **names: Any) -> Any:
    """Return a second copy of the oracle's module, in which these names are replaced."""
    assert oracle.__spec__ is not None
    assert oracle.__spec__.origin is not None
    again = importlib.util.spec_from_file_location(f"{oracle.__name__}_again", oracle.__spec__.origin)
    assert again is not None
    assert again.loader is not None
    module = importlib.util.module_from_spec(again)
    again.loader.exec_module(module)
    vars(module).update(names)
    return module


def exact(oracle: ModuleType) -> Any:
    """Return the oracle with arithmetic on balls."""
    return private(oracle, math=BALLS, min=extreme(min, arb.min), max=extreme(max, arb.max))


def hostile(oracle: ModuleType, signs: Callable[[int], int]) -> Any:
    """Return the oracle on floats, with a math library that has the largest admissible errors.

    The n-th exponential or logarithm is off by 4 ulp in the direction `signs(n)`. A root is the float in this direction
    within 1 ulp of the real root. Sums are computed from left to right, and rounded after each step. The exponential of
    a number that is not positive is at most 1.
    """
    calls = count()

    def moved(name: str, ulps: int) -> Callable[[float], float]:
        def call(x: float) -> float:
            y, side, real = getattr(math, name)(x), signs(next(calls)), getattr(arb(x), name)()
            far: float = next(y + side * n * math.ulp(y) for n in range(ulps, -1, -1)
                       if not n or abs(arb(y + side * n * math.ulp(y)) - real) <= ulps * arb(math.ulp(y)))
            return min(max(0.0, far), 1.0 if x <= 0 else math.inf) if name == "exp" else far

        return call

    functions = {name: moved(name, 1 if name == "sqrt" else 4) for name in ("exp", "log", "log1p", "sqrt", "tanh")}
    return private(oracle, math=SimpleNamespace(inf=math.inf, prod=math.prod, fsum=added, **functions))
