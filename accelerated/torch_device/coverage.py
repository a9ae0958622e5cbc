"""Coverage backfill: evenly spaced tokens of evicted trunks (the paper's F3)."""

from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from accelerated.torch_device.device import upload

__all__ = ["backfill", "coverage_reserve"]


def coverage_reserve(sizes: Tensor, protected: Tensor, n: int, B: int, coverage: float) -> Tensor:
    """Return the number of tokens of the budget that are reserved for the coverage backfill, (1,)."""
    held = torch.where(protected, sizes, 0).sum(dim=0, keepdim=True)
    if not coverage or n <= B:
        return torch.zeros_like(held)
    share = Fraction(str(coverage))  # a product of its numerator and a number of tokens can exceed int64
    floors = [share.numerator * available // share.denominator for available in range(B + 1)]
    return upload(np.array(floors), np.int64, held.device).gather(0, (B - held).clamp(min=0))


def backfill(
    keep: Tensor, ratio: Tensor, trunk: Tensor, sizes: Tensor, reserve: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the mask of kept tokens, and the kept ratio r of each trunk, after the backfill of `reserve` tokens.

    Implements: CC-COVERAGE
    """
    emptied = (ratio == 0) & (sizes > 0)
    evicted = emptied[trunk]
    number = evicted.cumsum(dim=0)
    k, e = torch.minimum(reserve, number[-1:]), number[-1:].clamp(min=1)
    # Of the k tokens, (2 k c + e - 1) // (2 e) are among the first c evicted tokens.
    added = evicted & ((2 * k * number + e - 1) // (2 * e) > (2 * k * (number - 1) + e - 1) // (2 * e))
    counts = torch.zeros_like(sizes).scatter_add(0, trunk, added.long())
    return keep | added, torch.where(emptied, counts / sizes.double(), ratio)
