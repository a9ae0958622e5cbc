"""MorphKV: decode-time eviction to a cache of constant size. Tokens that the recent queries attend to are kept."""

from functools import partial

from reference.policies.attention import group_mean, observed_attention
from reference.policies.budgets import even
from reference.policies.named import named
from reference.policies.protections import SinkAndRecent
from reference.policies.rkv import QueryCache
from reference.policies.scorers import check_positive, with_window
from reference.policies.selectors import top_units
from spec.arrays import Float64, Matrix
from spec.policy import Cadence, LayerView, Policy
from spec.retention import Granularity
from spec.validate import check_choices

__all__ = ["morphkv", "morphkv_score"]


def morphkv_score(view: LayerView, W: int, fusion: str) -> Float64[Matrix, "H_kv n"]:
    """Return the attention that each key before the window receives from the last W queries.

    `fusion` is "sum" or "max": the sum or the maximum of the attention on a key over the queries. The result is
    averaged over the query heads of a KV head. Tokens of the window have the score NaN.

    Implements: PO-MORPHKV

    Source: MorphKV, Section 3.
    """
    A = observed_attention(view, W)
    past = A[:, :, : A.shape[2] - A.shape[1]]
    fused = past.sum(axis=1) if fusion == "sum" else past.max(axis=1)
    return with_window(group_mean(fused, len(view.k)), A.shape[2])


@named(
    "morphkv", "Ghadia et al., MorphKV (arXiv 2503.00979)",
    "the last W tokens, and the tokens that the last W queries attend to most; selected again in every decode step",
)
def morphkv(W: int = 32, fusion: str = "sum") -> Policy:
    """Return MorphKV: at each decode step each KV head keeps the last W tokens and the best-scored earlier tokens.

    The policy stores the last W queries, and recomputes the attention of these queries at each step. Some versions of
    the official code also recompute the attention; other versions store the old attention weights. One version of the
    official code merges evicted tokens into a mean. The mean over query heads and the default of W are choices of
    kvspec, not of the paper.

    Raises:
        SpecError: if the window is not positive, or if the fusion is neither "sum" nor "max".
    """
    check_choices("fusion", (fusion,), ("sum", "max"))
    scorer = QueryCache(check_positive("W", W), partial(morphkv_score, W=W, fusion=fusion))
    return Policy(
        "morphkv", scorer, even, top_units, SinkAndRecent(0, W), Cadence(every=1), Granularity.HEAD,
    )
