"""Ada-KV by brute force: SnapKV's window, and a layer's budget shared by its heads' scores."""

import math
from fractions import Fraction

from conformance.assurance.brute import KERNEL, MODES, SAFEGUARD, WIDE, Brute, W, newest, seeded, shared
from conformance.assurance.oracles.policies import (
    Layer,
    Score,
    adaptive_shares,
    groups,
    last_rows,
    padded,
    pool,
    window,
)
from conformance.assurance.vector_writer.case import Case

__all__ = ["BRUTES", "adakv"]


def adakv(layer: Layer, W: int, kernel: int) -> list[Score]:
    """Mean over the window and the group, then pool."""
    n, past, rows, found = len(layer["k"][0]), window(layer, W), last_rows(layer, W), []
    for group in groups(layer):
        number = len(group) * len(rows[0])
        mean = [math.fsum(q[i] for h in group for q in rows[h]) / number for i in range(past)]
        found.append(padded(pool(mean, kernel, "max"), n))
    return found


BRUTES = [
    Brute(
        "PO-ADAKV", "adakv", shared(adakv, adaptive_shares),
        {"W": W, "kernel": KERNEL, "safeguard": SAFEGUARD}, W, newest,
        published={"W": 32, "kernel": 7, "safeguard": Fraction(1, 5)}, vectors=[
            Case(210, "two heads share a layer", ["Plain"], {**seeded(11), "B": 5, "safeguard": "1/5", **MODES}),
            Case(348, "nine and three of 15", ["Plain"], {**seeded(40, n=15), "B": 6, "safeguard": "1/5", **MODES}),
            Case(349, "three heads share a layer, half of it for each alone", ["HeadSharing"],
                 {**seeded(40, H=6, H_kv=3, n=14), "B": 7, "safeguard": "1/2", **WIDE}),
        ],
    ),
]
