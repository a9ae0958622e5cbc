"""SnapKV by brute force: the attention of the last queries, pooled."""


from conformance.methods.brute import KERNEL, Brute, W, by_layer, newest
from conformance.methods.policies import Layer, Score, groups, last_rows, padded, pool, weights, window
from conformance.oracles.boxes import fsum


def snapkv(layer: Layer, W: int, kernel: int, pooling: str = "max", softmax: str = "all") -> list[Score]:
    """Sum over the window, pool per query head, mean over the group."""
    n, past, rows, found = len(layer["k"][0]), window(layer, W), last_rows(layer, W), []
    if softmax == "past" and past:
        rows = [[weights(layer, h, q, past) for q in queries[past - n :]] for h, queries in enumerate(layer["q"])]
    for group in groups(layer):
        pooled = [pool([fsum(q[i] for q in rows[h]) for i in range(past)], kernel, pooling) for h in group]
        found.append(padded([fsum(p[i] for p in pooled) / len(group) for i in range(past)], n))
    return found


READINGS = {"pooling": ("max", "average"), "softmax": ("all", "past")}
"""The official class averages; R-KV's copy leaves the window out of the softmax."""
BRUTES = [
    Brute("PO-SNAPKV", "snapkv", by_layer(snapkv), {"W": W, "kernel": KERNEL}, W, newest,
          published={"W": 32, "kernel": 7}, readings=READINGS),
]
