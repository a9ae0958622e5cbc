"""H2O by brute force: the attention that each key got from all queries, and the newest tokens."""

from conformance.assurance.brute import Brute, W, by_layer, newest, newest_half, plain, seeded
from conformance.assurance.oracles.policies import Layer, Score, accumulated, top, window
from conformance.assurance.vector_writer.case import Case
from conformance.strategies.policy_inputs import Inputs, Kept

__all__ = ["BRUTES", "described", "h2o", "rows"]


def rows(inputs: Inputs, B: int) -> list[Score]:
    """The newest half of B has no score."""
    found = [row for view in inputs.layers for row in accumulated(plain(view))]
    return [[*row[: max(0, len(row) - B // 2)], *[None] * min(len(row), B // 2)] for row in found]


def h2o(inputs: Inputs, B: int) -> Kept:
    return [top(row, B) for row in rows(inputs, B)]


def described(layer: Layer, W: int) -> list[Score]:
    """A window instead of the newest half."""
    past = window(layer, W)
    return [[*row[:past], *[None] * (len(row) - past)] for row in accumulated(layer)]


BRUTES = [
    Brute("PO-H2O", "h2o", h2o, guaranteed=newest_half, vectors=[
        Case(130, "newest two, heaviest three", ["Plain"], {**seeded(3), "B": 5}),
        Case(328, "four of 15 by their sums", ["Plain"], {**seeded(40, n=15), "B": 7}),
        Case(329, "three query heads on each KV head", ["HeadSharing"], {**seeded(40, H=6, n=18), "B": 9}),
    ]),
    Brute("PO-H2O-DESCRIBED", "h2o-described", by_layer(described), {"W": W}, W, newest, published={"W": 128}, vectors=[
        Case(131, "a window of three", ["Plain"], {**seeded(3), "B": 5, "W": 3}),
        Case(330, "a window of two", ["Plain"], {**seeded(40, n=15), "B": 7, "W": 2}),
        Case(331, "three query heads on each KV head", ["HeadSharing"], {**seeded(40, H=6, n=18), "B": 9, "W": 3}),
    ]),
]
