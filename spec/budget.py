"""Budgets of a policy: how many tokens to keep, as a fraction of the tokens processed so far or as a fixed number."""

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from numbers import Integral, Rational, Real

import numpy as np

from spec.errors import SpecError

__all__ = ["MEMORY", "UNITS", "Budget", "parse_budget"]

_FORMS = (
    "a float in (0, 1], text such as '0.3' or '30%' (a fraction), or an int or text such as '512' (tokens); with a"
    " loaded model also text such as '64MiB' (memory)"
)
_LARGEST = 2**63 - 1  # counts are int64 in every backend
_TOKENS = "a number of tokens must be 1 to 2^63 - 1; a fraction has a point, such as 0.3"
_SHARE = "a fraction must lie in (0, 1]; a number of tokens has no point, such as 512"
_LONGEST = 64  # characters of a budget given as text
# The grammar of CC-BUDGET-FORMS.
_COUNT = re.compile(r"[0-9]+")
_FRACTION = re.compile(r"([0-9]+\.[0-9]*|\.[0-9]+)%?|[0-9]+%")
UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
MEMORY = re.compile(rf" *([0-9]+(?:\.[0-9]+)?) ?({'|'.join(UNITS)}) *")
"""Form of a memory, whose number of tokens depends on the model."""
_COMMA = re.compile(r"0*,[0-9]+|[0-9]{1,2},[0-9]+%")
_THOUSANDS = re.compile(r"[1-9][0-9]{0,2}(,[0-9]{3})+")
_OTHER_UNIT = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]+)")


@dataclass(frozen=True)
class Budget:
    """A budget: either a fraction of the tokens processed so far (`fraction`) or a fixed number of tokens (`count`).

    Raises:
        SpecError: if both or none of fraction and count are set. Also if the fraction is outside (0, 1], or if the
            count is not an int from 1 to 2^63 - 1.
    """

    fraction: Fraction | None = None
    count: int | None = None

    def __post_init__(self) -> None:
        if (self.fraction is None) == (self.count is None):
            raise SpecError("budget", (self.fraction, self.count), "set a fraction or a count, and not both")
        if self.fraction is not None and not 0 < self.fraction <= 1:
            raise SpecError("budget", self.fraction, _SHARE)
        if self.count is not None and (isinstance(self.count, bool) or not 1 <= self.count <= _LARGEST):
            raise SpecError("budget", self.count, _TOKENS)

    def tokens(self, seen: int) -> int:
        """Return how many of `seen` tokens to keep: `count`, or ceil(fraction * seen) without rounding errors."""
        if self.fraction is not None:
            return math.ceil(self.fraction * seen)
        assert self.count is not None
        return self.count

    def __str__(self) -> str:
        """Return the budget as text that `parse_budget` accepts.

        A fraction that 28 decimal digits do not represent exactly is written as `p/q`.
        """
        if self.fraction is None:
            return str(self.count)
        decimal = Decimal(self.fraction.numerator) / Decimal(self.fraction.denominator)
        if Fraction(decimal) != self.fraction:
            return str(self.fraction)
        text = f"{decimal:f}"
        return text if "." in text else f"{text}.0"


def parse_budget(budget: object, argument: str = "budget") -> Budget:
    """Return a `Budget` for a float, an int, text or a `Budget`.

    A float is converted by `Fraction(str(budget))`. So the budget 0.28 keeps 7 of 25 tokens, not 8.

    Implements: CC-BUDGET-FORMS

    Raises:
        SpecError: if `budget` is a bool or NaN, or if text does not match the grammar of CC-BUDGET-FORMS. Also if a
            fraction is outside (0, 1], or if a count is outside [1, 2^63 - 1].
    """
    if isinstance(budget, Budget):
        return budget
    if isinstance(budget, (bool, np.bool_)):
        raise SpecError(argument, budget, f"a budget must not be a bool; use {_FORMS}")
    if isinstance(budget, str):
        return _parse_text(budget, argument)
    if isinstance(budget, Integral):
        return _count(int(budget), budget, argument)
    if isinstance(budget, Rational):
        return _fraction(Fraction(budget), budget, argument)
    if isinstance(budget, Real) and math.isfinite(budget):
        return _fraction(Fraction(str(budget)), budget, argument)
    raise SpecError(argument, budget, f"expected {_FORMS}")


def _parse_text(given: str, argument: str) -> Budget:
    text = given.strip(" ")
    if len(given) > _LONGEST:
        raise SpecError(argument, f"{given[:_LONGEST]}...", f"a budget must have at most {_LONGEST} characters")
    if _COUNT.fullmatch(text):
        return _count(int(text), given, argument)
    if _FRACTION.fullmatch(text):
        percent = text.endswith("%")
        return _fraction(Fraction(text.rstrip("%")) / (100 if percent else 1), given, argument)
    if MEMORY.fullmatch(text):
        reason = "is a memory, whose number of tokens depends on the model: type a share such as 0.3, or the number"
        raise SpecError(argument, given, f"{reason} that `kvspec compare --budgets` prints for a memory")
    raise SpecError(argument, given, f"expected {_FORMS}{_hint(text)}")


def _hint(text: str) -> str:
    """Return the end of an error text with valid budgets that are similar to a text, or "" if there are none."""
    if _THOUSANDS.fullmatch(text):
        return f"; did you mean {text.replace(',', '')}?"
    if _COMMA.fullmatch(text):
        return f"; did you mean {text.replace(',', '.')}?"
    if _FRACTION.fullmatch(joined := text.replace(" ", "")) and joined.endswith("%"):
        return f"; did you mean {joined}?"
    other = _OTHER_UNIT.fullmatch(text)
    near = [unit for unit in UNITS if unit.lower().startswith(other[2].lower())] if other else []
    return f"; did you mean {' or '.join(f'{other[1]}{unit}' for unit in near)}?" if other and near else ""


def _count(tokens: int, given: object, argument: str) -> Budget:
    if not 1 <= tokens <= _LARGEST:
        raise SpecError(argument, given, _TOKENS)
    return Budget(count=tokens)


def _fraction(beta: Fraction, given: object, argument: str) -> Budget:
    if not 0 < beta <= 1:
        raise SpecError(argument, given, _SHARE)
    return Budget(fraction=beta)
