"""PyramidKV: tokens are scored as in SnapKV, and lower layers keep more tokens than higher layers."""

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
    "pyramidkv", "Cai et al., PyramidKV (arXiv 2406.02069)",
    "tokens selected by the rule of snapkv; lower layers keep more tokens than higher layers",
)
def pyramidkv(W: int = 32, kernel: int = 7, beta: int = 20) -> Policy:
    """Return PyramidKV: SnapKV with larger budgets in lower layers. The mean budget of the layers is exactly B.

    The last layer keeps the window and (B - W) / beta more tokens. If the prompt is short, the last layer keeps more
    than (B - W) / beta tokens in addition to the window. The official code rounds down the step between the budgets of
    successive layers. The layers of the official code can therefore keep more tokens than the budget (see
    `budgets.pyramidkv_official`). The official code uses equal budgets for prompts below 2 (B - W) tokens. In kvpress
    the budget of each layer is rounded separately. In kvpress all layers have equal budgets if the last layer would
    otherwise keep fewer than W tokens.

    Implements: PO-PYRAMIDKV

    Raises:
        SpecError: if the window or beta is not positive, or if the kernel is even.
    """
    return replace(snapkv(W, kernel), name="pyramidkv", budgets=Pyramid(W, check_positive("beta", beta)))


@named(
    "pyramidkv-described", "Lin, CrystalCache, Section 4.3",
    "tokens with the largest sums of attention; lower layers keep more tokens than higher layers",
)
def pyramidkv_described(W: int = 128, beta: int = 20, backend: str | Backend = "numpy") -> Policy:
    """Return PyramidKV as described in the CrystalCache paper: cumulative attention (Eq. 5) with pyramid budgets.

    The paper gives no values for beta and W, so kvspec chose the defaults.

    Implements: PO-PYRAMIDKV-DESCRIBED

    Raises:
        SpecError: if the window or beta is not positive, or if the backend is unknown.
        BackendUnavailable: as in `h2o`.
    """
    pyramid = Pyramid(W, check_positive("beta", beta))
    return replace(h2o_described(W, backend), name="pyramidkv-described", budgets=pyramid)
