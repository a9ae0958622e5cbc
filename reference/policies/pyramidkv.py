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
    """SnapKV under a pyramid: layer 0 has the most, the last layer 1 / beta of the mean, beyond the window.

    The mean over layers is B exactly. The official code floors the step between layers, so that its sum exceeds the
    budget (`budgets.pyramidkv_official`), and is flat below 2 (B - W) tokens; kvpress rounds each layer, and is flat
    wherever the last layer would have fewer than W tokens.

    Implements: PO-PYRAMIDKV

    Raises:
        SpecError: for a window or beta that is not positive, or an even kernel.
    """
    return replace(snapkv(W, kernel), name="pyramidkv", budgets=Pyramid(W, check_positive("beta", beta)))


@named(
    "pyramidkv-described", "Lin, CrystalCache, Section 4.1",
    "tokens with the largest sums of attention, more in lower layers",
)
def pyramidkv_described(W: int = 128, beta: int = 20, backend: str | Backend = "numpy") -> Policy:
    """As CrystalCache describes it: cumulative attention (Eq. 5) under the pyramid; slope and W are chosen here.

    Implements: PO-PYRAMIDKV-DESCRIBED

    Raises:
        SpecError: for a window or beta that is not positive, or an unknown backend.
        BackendUnavailable: as `h2o`.
    """
    pyramid = Pyramid(W, check_positive("beta", beta))
    return replace(h2o_described(W, backend), name="pyramidkv-described", budgets=pyramid)
