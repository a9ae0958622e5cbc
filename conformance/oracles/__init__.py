"""Brute-force oracles: each stage in plain Python, as close to the paper as possible, and slow.

The oracles share no code with `reference`, because shared code would mean shared errors. Only boxes and the oracles in
`scale` use NumPy. If the specification gives the order of a sum, the terms are added from left to right. All other sums
are rounded once (`math.fsum`).
"""

from collections.abc import Iterable


def added(terms: Iterable[float]) -> float:
    """Return the sum from left to right, rounded in each step. `sum` of newer Python versions compensates errors."""
    total = 0.0
    for term in terms:
        total += term
    return total
