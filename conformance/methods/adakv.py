"""Ada-KV by brute force: SnapKV's window, and a budget per layer that the scores divide among the heads."""

from fractions import Fraction

from conformance.methods.brute import KERNEL, SAFEGUARD, Brute, Parts, W, newest, shared
from conformance.methods.policies import (
    GROUPS,
    MASKS,
    POOLED,
    Layer,
    Score,
    adaptive_shares,
    groups,
    last_rows,
    over_group,
    padded,
    pool,
    window,
)
from conformance.oracles.boxes import column_sums, over

SLIPS = {"order": ("the group, then pool", "pool, then the group"), "group": GROUPS, "pooled": POOLED, "mask": MASKS}


def adakv(
    layer: Layer, W: int, kernel: int, pooling: str = "max", order: str = SLIPS["order"][0], group: str = GROUPS[0],
    pooled: str = POOLED[0], mask: str = MASKS[0],
) -> list[Score]:
    """Return the scores of Ada-KV: the mean over the window and the group, then pooled."""
    n, past, rows, result = len(layer["k"][0]), window(layer, W), last_rows(layer, W, mask), []
    for heads in groups(layer):
        means = [over(column_sums(rows[h])[:past], len(rows[h])) for h in heads]
        if order == SLIPS["order"][0]:
            row = pool(over_group(means, group), kernel, pooling, pooled)
        else:
            row = over_group([pool(mean, kernel, pooling, pooled) for mean in means], group)
        result.append(padded(row, n))
    return result


BRUTES = [
    Brute(
        "PO-ADAKV", "adakv", shared(adakv, adaptive_shares),
        {"W": W, "kernel": KERNEL, "safeguard": SAFEGUARD}, W, newest,
        published={"W": 32, "kernel": 7, "safeguard": Fraction(1, 5)}, readings={"pooling": ("max", "average")},
        slips=SLIPS, parts=Parts("recent=W/heads=adaptive:safeguard=safeguard", adakv)),
]
