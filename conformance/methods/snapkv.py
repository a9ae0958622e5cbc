"""SnapKV by brute force: the attention of the last queries, pooled."""

import math

from conformance.methods.brute import KERNEL, Brute, W, by_layer, newest
from conformance.methods.policies import Layer, Score, groups, last_rows, padded, pool, window

__all__ = ["BRUTES", "snapkv"]


def snapkv(layer: Layer, W: int, kernel: int) -> list[Score]:
    """Sum over the window, pool per query head, mean over the group."""
    n, past, rows, found = len(layer["k"][0]), window(layer, W), last_rows(layer, W), []
    for group in groups(layer):
        pooled = [pool([math.fsum(q[i] for q in rows[h]) for i in range(past)], kernel, "max") for h in group]
        found.append(padded([math.fsum(p[i] for p in pooled) / len(group) for i in range(past)], n))
    return found


BRUTES = [
    Brute("PO-SNAPKV", "snapkv", by_layer(snapkv), {"W": W, "kernel": KERNEL}, W, newest,
          published={"W": 32, "kernel": 7}),
]
