"""SnapKV keeps the tokens that the last queries of the prompt attend to. Attention is pooled along the keys."""

from functools import partial

from reference.policies.attention import group_mean, max_pool, observed_attention
from reference.policies.budgets import even
from reference.policies.named import named
from reference.policies.protections import SinkAndRecent
from reference.policies.scorers import LayerScorer, check_odd, check_positive, with_window
from reference.policies.selectors import top_units
from spec.arrays import Float64, Matrix
from spec.policy import LayerView, Needs, Policy
from spec.retention import Granularity

__all__ = ["snapkv", "snapkv_score"]


def snapkv_score(view: LayerView, W: int, kernel: int) -> Float64[Matrix, "H_kv n"]:
    """Return the attention that each key before the window receives from the last W queries.

    Attention weights are summed over the queries, max-pooled along the keys, then averaged over the query heads of a
    group.

    Implements: PO-SNAPKV

    Source: SnapKV, Section 4. Tokens of the window have the score NaN.
    """
    A = observed_attention(view, W)
    past = A[:, :, : A.shape[2] - A.shape[1]].sum(axis=1)
    return with_window(group_mean(max_pool(past, kernel), len(view.k)), A.shape[2])


@named(
    "snapkv", "Li et al., SnapKV (arXiv 2404.14469)",
    "the last W tokens, and the tokens that the last W queries attend to most; selected once for each prompt",
)
def snapkv(W: int = 32, kernel: int = 7) -> Policy:
    """Return SnapKV: each KV head keeps the last W tokens and the best-scored earlier tokens.

    The budget B includes the last W tokens (the window).

    The defaults of W and kernel, and max pooling, are from the authors' LongBench experiments. The official class has
    the defaults W = 64 and average pooling over 5 keys. The official class keeps a separate set of tokens for each
    query head. With G query heads per KV head, the cache of the official class is G times as large. The class in
    kvpress has the official defaults, and averages attention over the window. R-KV's version of SnapKV excludes the
    window from the softmax. kvspec implements SnapKV as described in the CrystalCache paper.

    Raises:
        SpecError: if the window is not positive, or if the kernel is even.
    """
    score = partial(snapkv_score, W=check_positive("W", W), kernel=check_odd(kernel))
    return Policy(
        "snapkv", LayerScorer(Needs("all", W), score, unscored=(0, W)), even, top_units, SinkAndRecent(0, W),
        granularity=Granularity.HEAD,
    )
