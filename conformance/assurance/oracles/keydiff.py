"""KeyDiff by brute force: keys unlike the mean direction stay."""

import math

from conformance.assurance.brute import Brute, by_layer, seeded
from conformance.assurance.oracles.policies import Layer, Score, dot
from conformance.assurance.vector_writer.case import Case

__all__ = ["BRUTES", "keydiff"]


def keydiff(layer: Layer) -> list[Score]:
    found: list[Score] = []
    for head in layer["k"]:
        unit = [[x / math.sqrt(dot(key, key)) for x in key] for key in head]
        anchor = [math.fsum(column) / len(unit) for column in zip(*unit, strict=True)]
        length = math.sqrt(dot(anchor, anchor))
        found.append([-(dot(key, anchor) / length if length else 0.0) for key in unit])
    return found


BRUTES = [
    Brute("PO-KEYDIFF", "keydiff", by_layer(keydiff), least=3, vectors=[
        Case(180, "a set for each head", ["Plain"], {**seeded(8), "B": 4}),
        Case(342, "six of 15", ["Plain"], {**seeded(40, n=15), "B": 6}),
        Case(343, "two layers", ["Plain"], {**seeded(40, L=2, n=13), "B": 5}),
    ]),
]
