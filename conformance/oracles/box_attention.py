"""Attention of many queries at once, in rows of boxes."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from conformance.oracles.box_rows import Row, Table
from conformance.oracles.boxes import each, exp, over, products, stacked, tanh, times, unstacked


def softmax_rows(
    queries: Table, keys: Table, visible: Sequence[int], scaling: float, softcap: float | None, beside: Sequence[Any],
) -> list[Row]:
    """Return the softmax of each query over the first visible keys, followed by zeros.

    Boxes in `beside` are more logits: they count in the denominator, but not in the result.
    """
    logits = times(products(stacked(queries), keys), scaling)
    if softcap is not None:
        logits = times(each(tanh, over(logits, softcap)), softcap)
    seen = np.arange(len(keys)) < np.array(visible)[:, None]
    low, high = (
        np.max([np.where(seen, ends, -np.inf).max(axis=1), *(np.full(len(seen), x) for x in others)], axis=0)[:, None]
        for ends, others in ((logits.lo, [x.lo for x in beside]), (logits.hi, [x.hi for x in beside]))
    )
    top = Row(low, high, np.zeros((len(seen), 1), np.uint64))
    below = logits - top
    powers = exp(Row(np.where(seen, below.lo, 0.0), np.where(seen, below.hi, 0.0), below.tags))
    powers = Row(np.where(seen, powers.lo, 0.0), np.where(seen, powers.hi, 0.0), powers.tags)
    total = powers.totals()
    for x in beside:
        sink = Row(np.full(len(seen), x.lo), np.full(len(seen), x.hi), total.tags)
        total = total + exp(sink - Row(low[:, 0], high[:, 0], top.tags[:, 0]))
    total = Row(total.lo[:, None], total.hi[:, None], total.tags[:, None])
    result = powers / total
    return unstacked(Row(np.where(seen, result.lo, 0.0), np.where(seen, result.hi, 0.0), result.tags))
