"""Ada-KV: heads of a layer share its budget by how concentrated their scores are. Any scorer can stand under it."""

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
    """The last W queries' attention, averaged over the window and over the group, then pooled.

    Implements: PO-ADAKV

    Source: Ada-KV's official code, with its option for groups.
    """
    A = observed_attention(view, W)
    past = group_mean(A[:, :, : A.shape[2] - A.shape[1]].mean(axis=1), len(view.k))
    return with_window(max_pool(past, kernel), A.shape[2])


@named(
    "adakv", "Feng et al., Ada-KV (arXiv 2407.11550)",
    "SnapKV's tokens; the heads of a layer share its budget by their scores",
)
def adakv(W: int = 32, kernel: int = 7, safeguard: Fraction | int = Fraction(1, 5)) -> Policy:
    """SnapKV's window under adaptive budgets; a fifth of each head's share is even.

    The official code rounds each head by itself and so misses the sum (`official.adakv_official`), and keeps a set per
    query head unless told otherwise; its configuration's default safeguard is 0.5, the paper's runs have 0.2. kvpress
    reads the safeguard as a quota (`budgets.Competition`), and masks instead of evicting.

    Raises:
        SpecError: for a window that is not positive, an even kernel, or a safeguard outside [0, 1].
    """
    score = partial(adakv_score, W=W, kernel=check_odd(kernel))
    host = replace(snapkv(W, kernel), name="adakv", scorer=LayerScorer(Needs("all", W), score))
    return replace(host, budgets=Adaptive(safeguard))


def with_adaptive_budgets(host: Policy, safeguard: Fraction | int = Fraction(1, 5)) -> Policy:
    """Any policy whose heads have scores of their own, under Ada-KV's budgets.

    Raises:
        SpecError: when the host keeps one set for all heads, or for a safeguard outside [0, 1].
    """
    if host.granularity is not Granularity.HEAD:
        raise SpecError("host", host.name, "must have a kept set per layer and KV head")
    return replace(host, name=f"adakv({host.name})", budgets=Adaptive(safeguard), promises=NOTHING_PROMISED)
