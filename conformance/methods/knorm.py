"""The L2 norm by brute force: tokens with small keys are kept."""


from conformance.methods.brute import Brute, Parts, by_layer
from conformance.methods.policies import Layer, Score
from conformance.oracles.boxes import dot, sqrt


def knorm(layer: Layer) -> list[Score]:
    return [[-sqrt(dot(key, key)) for key in head] for head in layer["k"]]


BRUTES = [
    Brute("PO-KNORM", "knorm", by_layer(knorm), parts=Parts("", knorm)),
]
