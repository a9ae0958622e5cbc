"""The L2 norm by brute force: small keys stay."""

import math

from conformance.methods.brute import Brute, by_layer
from conformance.methods.policies import Layer, Score, dot

__all__ = ["BRUTES", "knorm"]


def knorm(layer: Layer) -> list[Score]:
    return [[-math.sqrt(dot(key, key)) for key in head] for head in layer["k"]]


BRUTES = [
    Brute("PO-KNORM", "knorm", by_layer(knorm)),
]
