"""LagKV compares a token's key and value with the next partition of the cache. LagKV needs no attention weights."""

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
    """Return the softmax over the spreads of the `lag` tokens of each partition. The last partition is excluded.

    Each channel of a token is min-max scaled by the channel's range in the next partition. The scaled value is 0 if the
    channel is constant in the next partition. The spread of a token is the standard deviation of the token's scaled
    channels (divisor d - 1).

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
    """Return the score of each token: minus the token's rank inside its partition.

    Tokens of the last whole partition and all later tokens have positive scores. The newest token has the highest
    score.

    Implements: PO-LAGKV

    Source: LagKV, Section 3. Keys and values have equal weight. If two tokens are tied, the earlier token ranks first.

    Raises:
        SpecError: if the values were not captured, or if keys or values have only one channel.
    """
    if view.v is None:
        raise SpecError("v", None, "is needed, because LagKV uses the values")
    k, v = wide(view.k), wide(view.v)
    if min(k.shape[2], v.shape[2]) < 2:
        raise SpecError("d", min(k.shape[2], v.shape[2]), "must be at least 2, because one channel has no spread")
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
    "tokens whose keys and values differ most from the keys and values of the next partition of the prompt",
)
def lagkv(N_sink: int = 4, lag: int = 128) -> Policy:
    """Return LagKV, a policy that keeps the sinks, the newest tokens, and equal shares of all other partitions.

    The newest tokens are the last whole partition and all later tokens. The budget includes the sinks and the newest
    tokens. If the budget is too small for all newest tokens, the policy keeps the last of these tokens. The default
    constants are the defaults of kvpress. The official class has 16 sinks and partitions of 1024 tokens. The official
    class keeps int(ratio * lag) tokens of each partition, and divides by 0 if a channel is constant. While decoding,
    the official class compresses each new partition once. In kvspec the policy scores all cached tokens again at the
    end of each later turn.

    Raises:
        SpecError: if N_sink is negative, or if lag is not positive.
    """
    score = partial(lagkv_score, N_sink=N_sink, lag=check_positive("lag", lag))
    scorer = LayerScorer(Needs("all", 0, values=True), score, unscored=(N_sink, 0))
    return Policy(
        "lagkv", scorer, even, top_units, SinkAndRecent(N_sink, 0), granularity=Granularity.HEAD,
    )
