"""SnapKV: what the last queries of a prompt attend to, smoothed along the keys."""

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
    """Attention of the last W queries, summed, pooled per query head, then averaged over the group.

    Implements: PO-SNAPKV

    Source: SnapKV, Section 4. The window's own tokens have no score.
    """
    A = observed_attention(view, W)
    past = A[:, :, : A.shape[2] - A.shape[1]].sum(axis=1)
    return with_window(group_mean(max_pool(past, kernel), len(view.k)), A.shape[2])


@named(
    "snapkv", "Li et al., SnapKV (arXiv 2404.14469)",
    "the last W tokens, and the tokens that their queries attend to, decided once",
)
def snapkv(W: int = 32, kernel: int = 7) -> Policy:
    """The last W tokens, and per KV head the best others: B counts both.

    W, kernel and max pooling are those of the authors' LongBench runs. The official class has W = 64, an average pool
    of 5, and one kept set per query head, G times the memory; kvpress has those constants and averages over the
    window; R-KV's copy leaves the window out of the softmax. CrystalCache's text describes this form.

    Raises:
        SpecError: for a window that is not positive, or an even kernel.
    """
    score = partial(snapkv_score, W=check_positive("W", W), kernel=check_odd(kernel))
    return Policy(
        "snapkv", LayerScorer(Needs("all", W), score), even, top_units, SinkAndRecent(0, W),
        granularity=Granularity.HEAD, floor=W,
    )
