"""Ada-KV by brute force: SnapKV's window, and a layer's budget shared by its heads' scores."""

from fractions import Fraction

from conformance.methods.brute import KERNEL, SAFEGUARD, Brute, W, newest, shared
from conformance.methods.policies import (
    Layer,
    Score,
    adaptive_shares,
    groups,
    last_rows,
    padded,
    pool,
    window,
)
from conformance.oracles.boxes import fsum


def adakv(layer: Layer, W: int, kernel: int, pooling: str = "max") -> list[Score]:
    """Mean over the window and the group, then pool."""
    n, past, rows, found = len(layer["k"][0]), window(layer, W), last_rows(layer, W), []
    for group in groups(layer):
        number = len(group) * len(rows[0])
        mean = [fsum(q[i] for h in group for q in rows[h]) / number for i in range(past)]
        found.append(padded(pool(mean, kernel, pooling), n))
    return found


BRUTES = [
    Brute(
        "PO-ADAKV", "adakv", shared(adakv, adaptive_shares),
        {"W": W, "kernel": KERNEL, "safeguard": SAFEGUARD}, W, newest,
        published={"W": 32, "kernel": 7, "safeguard": Fraction(1, 5)}, readings={"pooling": ("max", "average")}),
]
