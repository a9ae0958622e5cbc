"""Sums whose order the specification states."""

from collections.abc import Iterable


def added(terms: Iterable[float]) -> float:
    """From left to right, each step rounded; `sum` of newer Pythons compensates."""
    total = 0.0
    for term in terms:
        total += term
    return total
