"""The L2 norm by brute force: small keys stay."""

import math

from conformance.assurance.brute import Brute, by_layer, seeded
from conformance.assurance.oracles.policies import Layer, Score, dot
from conformance.assurance.vector_writer.case import Case

__all__ = ["BRUTES", "knorm"]


def knorm(layer: Layer) -> list[Score]:
    return [[-math.sqrt(dot(key, key)) for key in head] for head in layer["k"]]


BRUTES = [
    Brute("PO-KNORM", "knorm", by_layer(knorm), vectors=[
        Case(190, "small keys stay", ["Plain"], {**seeded(9), "B": 4}),
        Case(344, "six of 15", ["Plain"], {**seeded(40, n=15), "B": 6}),
        Case(345, "two layers", ["Plain"], {**seeded(40, L=2, n=13), "B": 5}),
    ]),
]
