"""KeyDiff by brute force: keys that differ most from the mean direction are kept."""


from conformance.methods.brute import Brute, Parts, by_layer
from conformance.methods.policies import Layer, Score
from conformance.oracles.boxes import column_sums, directions, dot, dots, over, sqrt, stacked


def keydiff(layer: Layer, anchors: str = "directions") -> list[Score]:
    result: list[Score] = []
    for head in layer["k"]:
        unit = directions(head)
        anchor = over(column_sums(head if anchors == "keys" else unit), len(unit))
        length = sqrt(dot(anchor, anchor))
        result.append([-(x / length if length else 0.0) for x in dots(anchor, stacked(unit))])
    return result


BRUTES = [
    Brute("PO-KEYDIFF", "keydiff", by_layer(keydiff), least=3, readings={"anchors": ("directions", "keys")},
          parts=Parts("", keydiff)),
]
