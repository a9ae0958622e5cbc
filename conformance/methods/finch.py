"""FINCH by brute force: the attention of the question, times the number of visible keys."""

from conformance.methods.brute import Brute, Parts, W, by_layer, newest
from conformance.methods.policies import Layer, Score, groups, last_rows, over_group, padded, window
from conformance.oracles.boxes import column_sums, over, row, times


def finch(layer: Layer, W: int, counted: str = "visible keys") -> list[Score]:
    """Return the mean over the window and the group. kvpress counts the keys before the query."""
    n, past, weights, result = len(layer["k"][0]), window(layer, W), last_rows(layer, W), list[Score]()
    first = past + (counted == "visible keys")
    for heads in groups(layer):
        of_heads = [
            over(column_sums([times(row(w[:past]), first + at) for at, w in enumerate(weights[h])]), n - past)
            for h in heads
        ]
        result.append(padded(over_group(of_heads), n))
    return result


BRUTES = [
    Brute("PO-FINCH", "finch", by_layer(finch), {"W": W}, W, newest, published={"W": 32},
          readings={"counted": ("visible keys", "earlier keys")}, parts=Parts("recent=W", finch)),
]
