"""MorphKV by brute force, with the functions of `methods.policies`. No code is shared with the reference."""


from functools import partial

from conformance.methods.brute import Brute, Parts, W, newest, stepwise
from conformance.methods.policies import DECODE, Layer, Score, groups, last_rows, padded, window
from conformance.oracles.boxes import column_extremes, column_sums, largest, over


def morphkv(layer: Layer, W: int, fusion: str) -> list[Score]:
    """Return, per key before the window, the sum or maximum over each head's last queries, as a mean over the group."""
    n, past, rows, result = len(layer["k"][0]), window(layer, W), last_rows(layer, W), []
    fuse = partial(column_extremes, largest) if fusion == "max" else column_sums
    for group in groups(layer):
        fused = [fuse([q[:past] for q in rows[h]]) for h in group]
        result.append(padded(over(column_sums(fused), len(group)), n))
    return result


BRUTES = [
    Brute("PO-MORPHKV", "morphkv", stepwise(morphkv), {"W": W, "fusion": "sum"}, W, newest,
          published={"W": 32, "fusion": "sum"}, readings={"decode": DECODE}, parts=Parts("recent=W/every=1", morphkv)),
]
