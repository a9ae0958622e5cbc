"""H2O by brute force: the attention that each key got from all queries, and the newest tokens."""

from conformance.methods.brute import Brute, W, by_layer, newest, newest_half, plain
from conformance.methods.policies import Layer, Score, accumulated, top, window
from conformance.strategies.policy_inputs import Inputs, Kept


def rows(inputs: Inputs, B: int, sums: str = "all", recent: str = "half") -> list[Score]:
    """The newest half of B has no score."""
    found = [row for view in inputs.layers for row in accumulated(plain(view))]
    if sums == "mean":
        found = [[(x or 0.0) / (len(row) - at) for at, x in enumerate(row)] for row in found]
    if recent == "none":
        return found
    return [[*row[: max(0, len(row) - B // 2)], *[None] * min(len(row), B // 2)] for row in found]


def h2o(inputs: Inputs, B: int, sums: str = "all", recent: str = "half") -> Kept:
    return [top(row, B) for row in rows(inputs, B, sums, recent)]


def described(layer: Layer, W: int) -> list[Score]:
    """A window instead of the newest half."""
    past = window(layer, W)
    return [[*row[:past], *[None] * (len(row) - past)] for row in accumulated(layer)]


BRUTES = [
    Brute("PO-H2O", "h2o", h2o, guaranteed=newest_half,
          readings={"sums": ("all", "mean"), "recent": ("half", "none")}),  # kvpress: of the queries that see a key
    Brute("PO-H2O-DESCRIBED", "h2o-described", by_layer(described), {"W": W}, W, newest, published={"W": 128}),
]
