"""MorphKV by brute force, in the terms of `methods.policies`; nothing is shared with the reference."""


from conformance.methods.brute import Brute, W, newest, stepwise
from conformance.methods.policies import DECODE, Layer, Score, groups, last_rows, padded, window
from conformance.oracles.boxes import fsum, largest


def morphkv(layer: Layer, W: int, fusion: str) -> list[Score]:
    """Per key before the window, the sum or the largest of each head's last queries, as a mean over the group."""
    n, past, rows, found = len(layer["k"][0]), window(layer, W), last_rows(layer, W), []
    for group in groups(layer):
        fused = [[(largest if fusion == "max" else fsum)([q[i] for q in rows[h]]) for i in range(past)] for h in group]
        found.append(padded([fsum(column) / len(group) for column in zip(*fused, strict=True)], n))
    return found


BRUTES = [
    Brute("PO-MORPHKV", "morphkv", stepwise(morphkv), {"W": W, "fusion": "sum"}, W, newest,
          published={"W": 32, "fusion": "sum"}, readings={"decode": DECODE}),
]
