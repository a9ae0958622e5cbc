"""FINCH: SnapKV's window is the question, and each attention weight is multiplied by the number of visible keys."""

from functools import partial

import numpy as np

from reference.policies.attention import group_mean, observed_attention
from reference.policies.budgets import even
from reference.policies.named import named
from reference.policies.protections import SinkAndRecent
from reference.policies.scorers import LayerScorer, check_positive, with_window
from reference.policies.selectors import top_units
from spec.arrays import Float64, Matrix
from spec.policy import LayerView, Needs, Policy
from spec.retention import Granularity

__all__ = ["finch", "finch_score"]


def finch_score(view: LayerView, W: int) -> Float64[Matrix, "H_kv n"]:
    """Return the normalised attention that each key before the window receives from the last W queries.

    Each weight is multiplied by the number of keys that the query attends to, because the weights of a query with more
    keys are smaller. The products are averaged over the queries and over the query heads of a group. Tokens of the
    window have the score NaN.

    Implements: PO-FINCH

    Source: FINCH (TACL 2024), and FinchPress in kvpress.
    """
    A = observed_attention(view, W)
    w, n = A.shape[1:]
    visible = np.arange(n - w + 1, n + 1)
    past = (A[:, :, : n - w] * visible[:, None]).mean(axis=1)
    return with_window(group_mean(past, len(view.k)), n)


@named(
    "finch", "Corallo and Papotti, FINCH (TACL 2024)",
    "the question, which is the last W tokens, and the tokens that the question attends to most",
    positions="renumbered",
)
def finch(W: int = 32) -> Policy:
    """Return FINCH: each KV head keeps the last W tokens and the earlier tokens with the most normalised attention.

    Set W to the number of tokens of the question at the end of the prompt. The paper renumbers the kept tokens, and
    reads a long prompt in chunks with the question after each chunk. In kvspec the prompt is scored once. A set for
    each KV head is the reading of kvpress. FinchPress in kvpress finds the question by a special token, and multiplies
    by the number of keys before the query.

    Raises:
        SpecError: if the window is not positive.
    """
    score = partial(finch_score, W=check_positive("W", W))
    return Policy(
        "finch", LayerScorer(Needs("all", W), score, unscored=(0, W)), even, top_units, SinkAndRecent(0, W),
        granularity=Granularity.HEAD,
    )
