"""KeyDiff by brute force: keys unlike the mean direction stay."""


from conformance.methods.brute import Brute, by_layer
from conformance.methods.policies import Layer, Score
from conformance.oracles.boxes import dot, fsum, sqrt


def keydiff(layer: Layer, anchors: str = "directions") -> list[Score]:
    found: list[Score] = []
    for head in layer["k"]:
        unit = [[x / sqrt(dot(key, key)) for x in key] for key in head]
        anchor = [fsum(column) / len(unit) for column in zip(*(head if anchors == "keys" else unit), strict=True)]
        length = sqrt(dot(anchor, anchor))
        found.append([-(dot(key, anchor) / length if length else 0.0) for key in unit])
    return found


BRUTES = [
    Brute("PO-KEYDIFF", "keydiff", by_layer(keydiff), least=3, readings={"anchors": ("directions", "keys")}),
]
