"""SnapKV by brute force: the attention of the last queries, pooled."""

import math

from conformance.assurance.brute import KERNEL, MODES, Brute, W, by_layer, newest, seeded
from conformance.assurance.oracles.policies import Layer, Score, groups, last_rows, padded, pool, window
from conformance.assurance.vector_writer.case import Case

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
          published={"W": 32, "kernel": 7}, vectors=[
        Case(140, "a window of two, a pool of three", ["HeadSharing"], {**seeded(4), "B": 5, **MODES}),
        Case(320, "a pool of three, with neighbours that tie", ["PoolBeforeWindow", "TieAtBoundary"],
             {**seeded(55, n=14), "B": 6, "W": 3, "kernel": 3}),
        Case(321, "a pool of five", ["PoolBeforeWindow", "TieAtBoundary"],
             {**seeded(41, n=16), "B": 8, "W": 4, "kernel": 5}),
        Case(322, "three query heads on each KV head", ["HeadSharing", "PoolBeforeWindow", "TieAtBoundary"],
             {**seeded(49, H=6, n=18), "B": 8, "W": 4, "kernel": 5}),
        Case(323, "four query heads on one KV head", ["HeadSharing", "PoolBeforeWindow", "TieAtBoundary"],
             {**seeded(48, H_kv=1, n=15), "B": 7, "W": 3, "kernel": 3}),
        Case(324, "the queries of the window do not see the keys after them", ["CausalByPosition", "TieAtBoundary"],
             {**seeded(59, H=2, H_kv=1, n=20), "B": 9, "W": 5, "kernel": 3}),
        Case(325, "a pool of seven on ten tokens", ["PoolBeforeWindow", "TieAtBoundary"],
             {**seeded(53, H=2, n=12), "B": 5, "W": 2, "kernel": 7}),
        Case(326, "a query head for each KV head", ["CausalByPosition", "TieAtBoundary"],
             {**seeded(56, H=3, H_kv=3, n=16), "B": 7, "W": 4, "kernel": 3}),
        Case(327, "a pool of seven on 18 tokens", ["PoolBeforeWindow", "TieAtBoundary"],
             {**seeded(42, H=8, n=24), "B": 12, "W": 6, "kernel": 7}),
    ]),
]
