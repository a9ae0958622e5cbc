"""Budgets of studies: the usual forms, and the evicted fraction as in NestedKV's paper (`evict 0.75`)."""

from dataclasses import dataclass

from reference.policies import eviction_budget
from spec.budget import Budget, parse_budget
from spec.errors import SpecError

__all__ = ["EVICT", "read_budget"]

EVICT = "evict "


@dataclass(frozen=True)
class _Evicted(Budget):
    """Budget of floor((1 - r) N) tokens. All other fractions are rounded up."""

    r: str = ""

    def tokens(self, seen: int) -> int:
        return eviction_budget(self.r, seen)


def read_budget(text: int | str, argument: str = "budget") -> Budget:
    """Parse a budget of a study: `0.3`, `30%`, `512`, or `evict 0.75` for the evicted fraction r = 0.75.

    Raises:
        SpecError: if the text has a different form, or if r is outside [0, 1).
    """
    if not isinstance(text, str) or not text.startswith(EVICT):
        return parse_budget(text, argument)
    r = text.removeprefix(EVICT)
    try:
        eviction_budget(r, 10**9)
    except SpecError as error:
        raise SpecError(argument, text, f"r {error.bound}, such as 'evict 0.75'") from error
    return _Evicted(parse_budget("1.0").fraction, r=r)
