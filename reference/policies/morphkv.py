"""MorphKV: a cache of one size while tokens are decoded; what the recent queries attend to stays."""

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
    """Attention of the last W queries on each key before them, summed or the largest of the queries; group mean.

    Implements: PO-MORPHKV

    Source: MorphKV, Section 3.
    """
    A = observed_attention(view, W)
    past = A[:, :, : A.shape[2] - A.shape[1]]
    fused = past.sum(axis=1) if fusion == "sum" else past.max(axis=1)
    return with_window(group_mean(fused, len(view.k)), A.shape[2])


@named(
    "morphkv", "Ghadia et al., MorphKV (arXiv 2503.00979)",
    "the last W tokens, and the tokens that their queries attend to, decided again in every step",
)
def morphkv(W: int = 32, fusion: str = "sum") -> Policy:
    """The last W tokens, and per KV head the best others, in every step. The last W queries are kept beside the cache.

    Their attention is taken anew, on what is cached now, as versions of the official code do; others keep the weights
    that they had, and one merges what it evicts into a mean. The group mean and W are chosen here.

    Raises:
        SpecError: for a window that is not positive, or a fusion that is neither "sum" nor "max".
    """
    check_choices("fusion", (fusion,), ("sum", "max"))
    scorer = QueryCache(check_positive("W", W), partial(morphkv_score, W=W, fusion=fusion))
    return Policy(
        "morphkv", scorer, even, top_units, SinkAndRecent(0, W), Cadence(every=1), Granularity.HEAD, floor=W,
    )
