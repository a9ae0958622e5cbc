"""MorphKV: a cache of constant size while decoding, which keeps the tokens that recent queries attend to."""

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
    """Return the attention on each key before the window: sum or maximum over the last W queries, mean over the group.

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
    """Return MorphKV: in every step each KV head keeps the last W tokens and the best others.

    The policy stores the last W queries, and recomputes their attention on the cached keys in every step. Some versions
    of the official code do this; others store the old weights, and one merges evicted tokens into a mean. The group
    mean and the default of W are kvspec's.

    Raises:
        SpecError: if the window is not positive, or if the fusion is neither "sum" nor "max".
    """
    check_choices("fusion", (fusion,), ("sum", "max"))
    scorer = QueryCache(check_positive("W", W), partial(morphkv_score, W=W, fusion=fusion))
    return Policy(
        "morphkv", scorer, even, top_units, SinkAndRecent(0, W), Cadence(every=1), Granularity.HEAD, floor=W,
    )
