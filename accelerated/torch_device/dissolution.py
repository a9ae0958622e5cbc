"""Stage S6: branch dissolution, the eviction of tokens (Section 3.7, Algorithm 1)."""

import torch
from torch import Tensor

from accelerated.torch_device.coverage import backfill, coverage_reserve
from accelerated.torch_device.tiers import kept_in_tiers
from spec.parameters import CrystalCacheParameters

__all__ = ["allocated", "dissolve", "ranked_members"]


def ranked_members(M: Tensor, trunk: Tensor) -> Tensor:
    """Return the indices of all tokens (n,), sorted by trunk, then by descending M_i, then by index."""
    order = torch.argsort(M, descending=True, stable=True)
    return order[torch.argsort(trunk[order], stable=True)]


def allocated(sizes: Tensor, c_0: Tensor, N_min: int) -> Tensor:
    """Return how many tokens each trunk keeps, by the closed form of Equations 32 and 33.

    The trunks are sorted by score, ascending. The loop of Equation 32 must still evict c_0 tokens, minus the tokens of
    all earlier trunks, while this difference is positive. Only the last step evicts too many tokens.

    Implements: CC-ALLOCATE, CC-KEEP-COUNT
    """
    before = sizes.cumsum(dim=0) - sizes
    rest = before + sizes - c_0
    return torch.where(before >= c_0, sizes, torch.where(rest >= max(N_min, 1), rest, 0))


def dissolve(
    score: Tensor, offsets: Tensor, trunk: Tensor, order: Tensor, protected: Tensor, B: int,
    parameters: CrystalCacheParameters,
) -> tuple[Tensor, Tensor]:
    """Return a mask of the kept tokens (n,), and the kept ratio r of each trunk. `order` is of `ranked_members`.

    Implements: CC-CUT, CC-DISSOLVE, CC-DISSOLVE-D
    """
    p, n, sizes = parameters, len(trunk), offsets.diff()
    reserve = coverage_reserve(sizes, protected, n, B, p.coverage)
    alive = ~protected & (sizes > 0)
    by_score = torch.argsort(score.masked_fill(~alive, torch.inf), stable=True)
    ascending = torch.where(alive, sizes, 0)[by_score]
    T_alive = ascending.sum(dim=0, keepdim=True)
    c_0 = torch.minimum((reserve + (n - B)).clamp(min=0), T_alive)
    if p.allocation == "tiers":
        m = alive.sum(dim=0, keepdim=True)
        ascending = kept_in_tiers(ascending, m, T_alive - c_0, p.N_min)
        c_0 = ascending.sum() - (T_alive - c_0)
    kept = torch.where(alive, torch.zeros_like(sizes).scatter(0, by_score, allocated(ascending, c_0, p.N_min)), sizes)
    ratio = torch.where(sizes > 0, kept / sizes.double(), 1.0)
    rank = torch.arange(n, device=order.device) - offsets[trunk]
    keep = torch.zeros_like(trunk, dtype=torch.bool).scatter(0, order, rank < kept[trunk])
    return backfill(keep, ratio, trunk, sizes, reserve) if p.coverage else (keep, ratio)
