"""How a budget is written: a fraction of the tokens seen, or a number of tokens."""

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral, Rational, Real

import numpy as np

from spec.errors import SpecError

__all__ = ["Budget", "parse_budget"]

_FORMS = "a float in (0, 1], text such as '0.3' or '30%' (a fraction), or an int or text such as '512' (tokens)"
_DECIMAL = re.compile(r"(\d+\.\d*|\.\d+|\d+(?=%))%?")


@dataclass(frozen=True)
class Budget:
    """A share of the tokens seen (`fraction`), or a count that does not grow (`count`); exactly one is set."""

    fraction: Fraction | None = None
    count: int | None = None

    def tokens(self, seen: int) -> int:
        """Tokens to keep out of `seen`: the exact ceiling of the fraction, or the count as it is."""
        if self.fraction is not None:
            return math.ceil(self.fraction * seen)
        assert self.count is not None
        return self.count

    def __str__(self) -> str:
        return str(self.count) if self.fraction is None else f"{float(self.fraction):g}"


def parse_budget(budget: object, argument: str = "budget") -> Budget:
    """Read a budget as users write it.

    A float is read as its decimal, `Fraction(str(budget))`, so that 0.28 of 25 tokens is 7 and not 8.

    Implements: CC-BUDGET-FORMS

    Raises:
        SpecError: for a bool, NaN, text of no known form, a fraction outside (0, 1] or a count below 1.
    """
    if isinstance(budget, Budget):
        return budget
    if isinstance(budget, (bool, np.bool_)):
        raise SpecError(argument, budget, f"a bool is no budget; use {_FORMS}")
    if isinstance(budget, str):
        return _parse_text(budget.strip(), argument)
    if isinstance(budget, Integral):
        return _count(int(budget), argument)
    if isinstance(budget, Rational):
        return _fraction(Fraction(budget), budget, argument)
    if isinstance(budget, Real) and math.isfinite(budget):
        return _fraction(Fraction(str(budget)), budget, argument)
    raise SpecError(argument, budget, f"expected {_FORMS}")


def _parse_text(text: str, argument: str) -> Budget:
    if text.isascii() and text.isdecimal():
        return _count(int(text), argument)
    if _DECIMAL.fullmatch(text):
        percent = text.endswith("%")
        return _fraction(Fraction(text.rstrip("%")) / (100 if percent else 1), text, argument)
    raise SpecError(argument, text, f"expected {_FORMS}")


def _count(tokens: int, argument: str) -> Budget:
    if tokens < 1:
        raise SpecError(argument, tokens, "a number of tokens must be at least 1")
    return Budget(count=tokens)


def _fraction(beta: Fraction, given: object, argument: str) -> Budget:
    if not 0 < beta <= 1:
        raise SpecError(argument, given, "a fraction must lie in (0, 1]")
    return Budget(fraction=beta)
