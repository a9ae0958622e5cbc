"""PyramidKV: SnapKV's scores, with more tokens in lower layers."""

from dataclasses import replace

from reference.policies.budgets import Pyramid
from reference.policies.h2o import h2o_described
from reference.policies.named import named
from reference.policies.scorers import check_positive
from reference.policies.snapkv import snapkv
from spec.backend import Backend
from spec.policy import Policy

__all__ = ["pyramidkv", "pyramidkv_described"]


@named(
    "pyramidkv", "Cai et al., PyramidKV (arXiv 2406.02069)", "SnapKV's tokens, more in lower layers than in higher ones"
)
def pyramidkv(W: int = 32, kernel: int = 7, beta: int = 20) -> Policy:
    """Return PyramidKV: SnapKV with more tokens in lower layers. Without the window, the last layer has mean / beta.

    The mean over layers is exactly B. The official code rounds the step between layers down, so its sum exceeds the
    budget (`budgets.pyramidkv_official`). It uses equal budgets for prompts below 2 (B - W) tokens. kvpress rounds each
    layer separately, and uses equal budgets if the last layer would have fewer than W tokens.

    Implements: PO-PYRAMIDKV

    Raises:
        SpecError: if the window or beta is not positive, or if the kernel is even.
    """
    return replace(snapkv(W, kernel), name="pyramidkv", budgets=Pyramid(W, check_positive("beta", beta)))


@named(
    "pyramidkv-described", "Lin, CrystalCache, Section 4.1",
    "tokens with the largest sums of attention, more in lower layers",
)
def pyramidkv_described(W: int = 128, beta: int = 20, backend: str | Backend = "numpy") -> Policy:
    """Return PyramidKV as the CrystalCache paper describes it: cumulative attention (Eq. 5) with pyramid budgets.

    The paper has no values for beta and W; the defaults are kvspec's.

    Implements: PO-PYRAMIDKV-DESCRIBED

    Raises:
        SpecError: if the window or beta is not positive, or if the backend is unknown.
        BackendUnavailable: as in `h2o`.
    """
    pyramid = Pyramid(W, check_positive("beta", beta))
    return replace(h2o_described(W, backend), name="pyramidkv-described", budgets=pyramid)
