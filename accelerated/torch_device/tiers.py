"""The essay's tiers as Stage 1 of S6. The shift t is found by bisection, in a fixed number of steps."""

import torch
from torch import Tensor

__all__ = ["kept_in_tiers", "least_shift", "tier_counts"]


def tier_counts(sizes: Tensor, m: Tensor, t: Tensor, N_min: int) -> Tensor:
    """Return how many tokens each trunk keeps at shift t. The first m trunks are sorted by score, ascending.

    Implements: CC-TIER-COUNT
    """
    rank = m - 1 - torch.arange(len(sizes), device=sizes.device)
    a = torch.minimum((3 * m // 10 + t).clamp(min=0), m)
    b = torch.minimum(torch.maximum(7 * m // 10 + t, a), m)
    w = (b - a - 1).clamp(min=1)
    rounded = (2 * sizes * (8 * w - 3 * (rank - a)) + 10 * w) // (20 * w)
    middle = torch.minimum(sizes, rounded.clamp(min=N_min))
    return torch.where(rank < a, sizes, torch.where(rank < b, middle, 0))


def least_shift(sizes: Tensor, m: Tensor, B_avail: Tensor, N_min: int) -> Tensor:
    """Return the smallest shift t in [-m, m] at which the tiers keep at least B_avail tokens, (1,)."""
    low, high = -m, m
    for _ in range((2 * len(sizes) + 1).bit_length()):
        t = (low + high) // 2
        enough = tier_counts(sizes, m, t, N_min).sum() >= B_avail
        low, high = torch.where(enough | (low == high), low, t + 1), torch.where(enough, t, high)
    return low


def kept_in_tiers(sizes: Tensor, m: Tensor, B_avail: Tensor, N_min: int) -> Tensor:
    """Return the tokens that the tiers keep of each trunk, before the loop of Eq. 32 removes the excess.

    Implements: CC-TIERS
    """
    return tier_counts(sizes, m, least_shift(sizes, m, B_avail, N_min), N_min)
