"""LagKV: keys and values are scored by comparison with the next partition of the cache, without attention."""

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
    """Return the softmax of the tokens' spreads for each partition of `lag` tokens, except the last of a head.

    The spread of a token is the standard deviation over its channels (divisor d - 1), after each channel is min-max
    scaled by its range in the next partition. A channel that is constant in the next partition counts as 0.

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
    """Return minus each token's rank inside its partition. The last whole partition and all later tokens score higher.

    Implements: PO-LAGKV

    Source: LagKV, Section 3. Keys and values have equal weight. On a tie the lower index ranks first.

    Raises:
        SpecError: if the values were not captured, or if they have one channel.
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
    """Return LagKV: keeps sinks, the last whole partition and all later tokens, and equal shares of other partitions.

    The budget includes all of these. If the last partition and the later tokens do not fit, the newest are kept. The
    constants are those of kvpress. The official class has 16 sinks and partitions of 1024 tokens. It keeps
    int(ratio * lag) tokens of each partition for any total, and divides by 0 if a channel is constant. While decoding
    it compresses each new partition once. In kvspec a later turn decides about all cached tokens.

    Raises:
        SpecError: if N_sink is negative, or if lag is not positive.
    """
    score = partial(lagkv_score, N_sink=N_sink, lag=check_positive("lag", lag))
    return Policy(
        "lagkv", LayerScorer(Needs("all", 0, values=True), score), even, top_units, SinkAndRecent(N_sink, 0),
        granularity=Granularity.HEAD, floor=N_sink,
    )
