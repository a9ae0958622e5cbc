"""TOVA by brute force: the attention of the last query, as a mean over the heads."""


from conformance.methods.brute import Brute, by_layer
from conformance.methods.policies import Layer, Score, last_rows
from conformance.oracles.boxes import fsum


def tova(layer: Layer, last: str = "free") -> list[Score]:
    rows, n = last_rows(layer, 1), len(layer["k"][0])
    scores: Score = [fsum(head[0][i] for head in rows) / len(rows) for i in range(n)]
    return [[*scores[:-1], None] if last == "kept" else scores]


BRUTES = [
    Brute("PO-TOVA", "tova", by_layer(tova), readings={"last": ("free", "kept")}),  # kvpress keeps the last token
]
