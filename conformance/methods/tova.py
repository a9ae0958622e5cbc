"""TOVA by brute force: the attention of the last query, as a mean over the heads."""


from conformance.methods.brute import Brute, by_layer
from conformance.methods.policies import Layer, Score, last_rows
from conformance.oracles.boxes import fsum

__all__ = ["BRUTES", "tova"]


def tova(layer: Layer) -> list[Score]:
    rows, n = last_rows(layer, 1), len(layer["k"][0])
    return [[fsum(head[0][i] for head in rows) / len(rows) for i in range(n)]]


BRUTES = [
    Brute("PO-TOVA", "tova", by_layer(tova)),
]
