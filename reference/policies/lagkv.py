"""LagKV: keys and values are judged by the partition that follows them; no attention is read."""

from functools import partial

import numpy as np

from reference.policies.attention import softmax, wide
from reference.policies.budgets import even
from reference.policies.named import named
from reference.policies.protections import SinkAndRecent
from reference.policies.scorers import LayerScorer, check_positive
from reference.policies.selectors import top_units
from spec.arrays import Cube, Float64, Matrix
from spec.errors import SpecError
from spec.policy import LayerView, Needs, Policy
from spec.retention import Granularity

__all__ = ["lagkv", "lagkv_information", "lagkv_score"]


def lagkv_information(x: Float64[Cube, "H n d"], lag: int) -> Float64[Matrix, "rows lag"]:
    """A row for each partition of `lag` tokens but the last of a head: softmax of the spread of its tokens' channels.

    Each channel is scaled to the range that it has in the next partition; one that is constant there counts as 0. The
    spread is the standard deviation over channels, with divisor d - 1.

    Implements: PO-LAGKV

    Source: LagKV, Section 3.
    """
    H, n, d = x.shape
    parts = x.reshape(H, n // lag, lag, d)
    low, high = parts[:, 1:].min(axis=2, keepdims=True), parts[:, 1:].max(axis=2, keepdims=True)
    shape = (H, n // lag - 1, lag, d)
    width = np.broadcast_to(high - low, shape)
    scaled = np.divide(parts[:, :-1] - low, width, out=np.zeros(shape), where=width > 0)
    return softmax(scaled.std(axis=3, ddof=1).reshape(-1, lag))


def lagkv_score(view: LayerView, N_sink: int, lag: int) -> Float64[Matrix, "H_kv n"]:
    """Minus a token's rank inside its partition; the last whole partition and what follows it rise above all ranks.

    Implements: PO-LAGKV

    Source: LagKV, Section 3. Keys and values count alike; of equal tokens the lower one ranks first.

    Raises:
        SpecError: when the values were not captured, or have one channel.
    """
    if view.v is None:
        raise SpecError("v", None, "LagKV judges tokens by keys and values")
    k, v = wide(view.k), wide(view.v)
    if min(k.shape[2], v.shape[2]) < 2:
        raise SpecError("d", min(k.shape[2], v.shape[2]), "must be at least 2: one channel has no spread")
    H_kv, n = k.shape[:2]
    parts = max(1, (n - N_sink) // lag)
    tail = min(n, N_sink + (parts - 1) * lag)
    scores = np.full((H_kv, n), np.nan)
    scores[:, tail:] = np.arange(1, n - tail + 1)
    if parts > 1:
        judged = slice(N_sink, tail + lag)
        information = lagkv_information(k[:, judged], lag) + lagkv_information(v[:, judged], lag)
        rank = np.argsort(np.argsort(-information, axis=1, kind="stable"), axis=1)
        scores[:, N_sink:tail] = -rank.reshape(H_kv, -1)
    return scores


@named(
    "lagkv", "Liang et al., LagKV (arXiv 2504.04704)",
    "tokens whose keys and values stand out against the next partition of the prompt",
)
def lagkv(N_sink: int = 4, lag: int = 128) -> Policy:
    """The sinks, the last whole partition and what follows it, and the same share of every other partition.

    The budget counts all of these; where it does not hold the end of the prompt, the newest of it stay. Constants are
    kvpress's. The official class has 16 sinks and partitions of 1024, keeps int(ratio * lag) of each partition whatever
    the total, divides by 0 where a channel is constant, and goes on partition by partition while tokens are decoded,
    never looking again at what it has compressed; here a turn decides about all that is stored.

    Raises:
        SpecError: for N_sink below 0, or a partition without tokens.
    """
    score = partial(lagkv_score, N_sink=N_sink, lag=check_positive("lag", lag))
    return Policy(
        "lagkv", LayerScorer(Needs("all", 0, values=True), score), even, top_units, SinkAndRecent(N_sink, 0),
        granularity=Granularity.HEAD, floor=N_sink,
    )
