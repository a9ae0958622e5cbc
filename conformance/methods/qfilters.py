"""Q-Filters by brute force: one product of a key and a filter at a time."""

from collections.abc import Sequence
from typing import Any

from conformance.methods.brute import Brute, Parts
from conformance.methods.policies import Score, top
from conformance.oracles.boxes import dot, dots, leaves, row
from conformance.strategies.policy_inputs import Inputs, Kept, filters


def main_direction(queries: Sequence[Sequence[float]], rounds: int = 200) -> list[float]:
    """Return the main direction of queries by power iteration, with a positive sum of the projections."""
    x = list(queries[0])
    for _ in range(rounds):
        sizes = [dot(q, x) for q in queries]
        x = [dot(sizes, [q[c] for q in queries]) for c in range(len(x))]
        length = dot(x, x) ** 0.5
        x = [c / length for c in x]
    positive = sum(dot(q, x) for q in queries) >= 0
    return x if positive else [-c for c in x]


def products(keys: Any, direction: Any) -> Score:
    """Return the product of each key and a direction. Many keys are a table."""
    return list(dots(direction if isinstance(keys, list) else row(direction), keys))


def rows(inputs: Inputs, B: int) -> list[Score]:
    return [
        products(head, leaves(direction))
        for view, directions in zip(inputs.layers, filters(inputs), strict=True)
        for head, direction in zip(leaves(view.k), directions, strict=True)
    ]


def kept(inputs: Inputs, B: int) -> Kept:
    return [top(row, B) for row in rows(inputs, B)]


BRUTES = [
    Brute("PO-Q-FILTERS", "q-filters", kept, parts=Parts("", rows=rows)),
]
