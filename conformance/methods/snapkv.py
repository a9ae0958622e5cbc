"""SnapKV by brute force: the attention of the last queries, pooled."""


from conformance.methods.brute import KERNEL, Brute, Parts, W, by_layer, newest
from conformance.methods.policies import (
    GROUPS,
    MASKS,
    POOLED,
    Layer,
    Score,
    groups,
    last_rows,
    over_group,
    padded,
    pool,
    rows_of,
)
from conformance.methods.policies import window as tokens_before
from conformance.oracles.boxes import column_sums

SLIPS = {
    "order": ("pool, then the group", "the group, then pool"), "group": GROUPS, "pooled": POOLED, "mask": MASKS,
    "window": ("kept", "scored"),
}


def snapkv(
    layer: Layer, W: int, kernel: int, pooling: str = "max", softmax: str = "all", order: str = SLIPS["order"][0],
    group: str = GROUPS[0], pooled: str = POOLED[0], mask: str = MASKS[0], window: str = "kept",
) -> list[Score]:
    """Return the scores: sum over the window, pooled per query head, mean over the group."""
    n, past, rows, result = len(layer["k"][0]), tokens_before(layer, W), last_rows(layer, W, mask), []
    if softmax == "past" and past:
        rows = [rows_of(layer, h, queries[past - n :], [past] * (n - past)) for h, queries in enumerate(layer["q"])]
    scored = past if window == "kept" else n
    for heads in groups(layer):
        sums = [column_sums(rows[h])[:scored] for h in heads]
        if order == SLIPS["order"][0]:
            row = over_group([pool(total, kernel, pooling, pooled) for total in sums], group)
        else:
            row = pool(over_group(sums, group), kernel, pooling, pooled)
        result.append(padded(row, n))
    return result


READINGS = {"pooling": ("max", "average"), "softmax": ("all", "past")}
"""Readings of published codes: the official class averages, and R-KV's copy leaves the window out of the softmax."""
BRUTES = [
    Brute("PO-SNAPKV", "snapkv", by_layer(snapkv), {"W": W, "kernel": KERNEL}, W, newest,
          published={"W": 32, "kernel": 7}, readings=READINGS, slips=SLIPS, parts=Parts("recent=W", snapkv)),
]
