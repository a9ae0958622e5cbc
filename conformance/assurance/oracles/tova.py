"""TOVA by brute force: the attention of the last query, as a mean over the heads."""

import math

from conformance.assurance.brute import Brute, by_layer, seeded
from conformance.assurance.oracles.policies import Layer, Score, last_rows
from conformance.assurance.vector_writer.case import Case

__all__ = ["BRUTES", "tova"]


def tova(layer: Layer) -> list[Score]:
    rows, n = last_rows(layer, 1), len(layer["k"][0])
    return [[math.fsum(head[0][i] for head in rows) / len(rows) for i in range(n)]]


BRUTES = [
    Brute("PO-TOVA", "tova", by_layer(tova), vectors=[
        Case(170, "one set for the layer", ["Plain"], {**seeded(7), "B": 4}),
        Case(340, "six of 15", ["Plain"], {**seeded(40, n=15), "B": 6}),
        Case(341, "two layers, three query heads on each KV head", ["HeadSharing"],
             {**seeded(40, L=2, H=6, n=13), "B": 5}),
    ]),
]
