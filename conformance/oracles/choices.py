"""Choices by numbers with a certified error: orders of boxes, and kept sets whose tokens rounding may exchange."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

from conformance.oracles.box import Box, State, Undecided, box


def ordered(values: Sequence[Any]) -> list[Any]:
    """Return the values from the largest to the smallest.

    For boxes, return a box for the first, the second, ... value.
    """
    if not any(isinstance(x, Box) for x in values):
        return sorted(values, reverse=True)
    boxes = [box(x) for x in values]
    low, high = (sorted((getattr(x, end) for x in boxes), reverse=True) for end in ("lo", "hi"))
    tag = hash(tuple(x.tag for x in boxes))
    return [Box(*ends, (tag, at)) for at, ends in enumerate(zip(low, high, strict=True))]


def places(values: Sequence[Any]) -> list[tuple[int, int]]:
    """Return the least and the greatest number of other values before each value.

    A value is before a second value if it is higher, or equal with a lower index.
    """
    boxes = [box(x) for x in values]
    low, high = (sorted(getattr(x, end) for x in boxes) for end in ("lo", "hi"))
    same: dict[Any, list[int]] = {}
    for at, x in enumerate(boxes):
        same.setdefault(x.tag, []).append(at)
    result = []
    for at, x in enumerate(boxes):
        equal = same[x.tag]
        lower = bisect_left(equal, at)
        before = {"lower": lower, "higher": len(equal) - 1 - lower, "any": 0}[State.first]
        after = 0 if State.first == "any" else len(equal) - 1 - before
        higher = len(boxes) - bisect_right(low, x.hi) + before
        result.append((higher, len(boxes) - 1 - bisect_left(high, x.lo) - after))
    return result


class Answer(list[int]):
    """A kept set, and the tokens inside and outside the set that rounding may exchange."""

    open: frozenset[int] = frozenset()
    scores: Sequence[Any] = ()
    """Scores of all tokens, if one choice by scores gives the set. None for a protected token."""

    def __init__(self, sure: Iterable[int], open_: Sequence[int] = (), number: int = 0) -> None:
        super().__init__(sorted([*sure, *open_[:number]]))
        self.open = frozenset(open_)


def surely(kept: list[int]) -> list[int]:
    """Return the kept set if rounding does not decide it.

    Raises:
        Undecided: if rounding decides it.
    """
    if getattr(kept, "open", None):
        raise Undecided("a choice before the last one")
    return kept


def holds(wanted: Any, x: float) -> bool:
    """Return True if a number is in a box, or if the box is None."""
    return wanted is None or box(wanted).lo <= x <= box(wanted).hi


def fits(kept: Sequence[int], wanted: Sequence[int]) -> bool:
    """Return True if a kept set is one of the sets that the boxes allow."""
    free: frozenset[int] = getattr(wanted, "open", frozenset())
    return len(kept) == len(set(kept)) == len(wanted) and set(kept) - free == set(wanted) - free
