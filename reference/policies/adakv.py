"""Ada-KV: the heads of a layer share a budget. A head with widely spread attention keeps more tokens.

Ada-KV's head budgets can be added to any policy that scores each KV head separately.
"""

from dataclasses import replace
from fractions import Fraction
from functools import partial

from reference.policies.attention import group_mean, max_pool, observed_attention
from reference.policies.budgets import Adaptive
from reference.policies.named import named
from reference.policies.scorers import LayerScorer, check_odd, with_window
from reference.policies.snapkv import snapkv
from spec.arrays import Float64, Matrix
from spec.errors import SpecError
from spec.policy import NOTHING_PROMISED, LayerView, Needs, Policy
from spec.retention import Granularity

__all__ = ["adakv", "adakv_score", "with_adaptive_budgets"]


def adakv_score(view: LayerView, W: int, kernel: int) -> Float64[Matrix, "H_kv n"]:
    """Return each key's mean attention from the last W queries, max-pooled along the keys, for each KV head.

    Implements: PO-ADAKV

    Source: Ada-KV's official code, with the option for grouped-query attention.
    """
    A = observed_attention(view, W)
    past = group_mean(A[:, :, : A.shape[2] - A.shape[1]].mean(axis=1), len(view.k))
    return with_window(max_pool(past, kernel), A.shape[2])


@named(
    "adakv", "Feng et al., Ada-KV (arXiv 2407.11550)",
    "the last W tokens and the tokens with the best SnapKV scores; the heads of a layer share one budget",
)
def adakv(W: int = 32, kernel: int = 7, safeguard: Fraction | int = Fraction(1, 5)) -> Policy:
    """Return Ada-KV: a policy with SnapKV's window of W tokens, and with head budgets that depend on the scores.

    The fraction `safeguard` of a layer's budget beyond the window is split evenly over the heads.

    The official code rounds each head's budget separately, so the sum of the head budgets can differ from the layer's
    budget (see `budgets.adakv_official`). By default the official code keeps a separate set of tokens for each query
    head. The default safeguard of the official code is 0.5. The paper's experiments use a safeguard of 0.2. In kvpress
    the safeguard is a quota of tokens for each head (see `budgets.Competition`). kvpress masks tokens instead of
    evicting them.

    Raises:
        SpecError: if the window is not positive, the kernel is even, or the safeguard is outside [0, 1].
    """
    score = partial(adakv_score, W=W, kernel=check_odd(kernel))
    host = replace(snapkv(W, kernel), name="adakv", scorer=LayerScorer(Needs("all", W), score, unscored=(0, W)))
    return replace(host, budgets=Adaptive(safeguard))


def with_adaptive_budgets(host: Policy, safeguard: Fraction | int = Fraction(1, 5)) -> Policy:
    """Return the host policy with Ada-KV's head budgets. The host policy must score each KV head separately.

    Raises:
        SpecError: if the host policy keeps the same tokens in all heads, or if the safeguard is outside [0, 1].
    """
    if host.granularity is not Granularity.HEAD:
        raise SpecError("host", host.name, "must have a kept set per layer and KV head")
    return replace(host, name=f"adakv({host.name})", budgets=Adaptive(safeguard), promises=NOTHING_PROMISED)
