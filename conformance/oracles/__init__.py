"""Brute force: each stage in plain Python, as literal as the paper allows, and slow on purpose.

Nothing here imports NumPy or `reference`: an oracle that shared code with what it judges would share its mistakes.
Sums that the specification orders run left to right; sums that it leaves open are rounded once (`math.fsum`).
"""

from collections.abc import Iterable


def added(terms: Iterable[float]) -> float:
    """The sum from left to right, each step rounded; `sum` of newer Pythons compensates."""
    total = 0.0
    for term in terms:
        total += term
    return total
