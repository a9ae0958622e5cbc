"""The best tokens of each kept set, by one stable sort of all sets."""

import numpy as np
import torch

from spec.arrays import BoolMatrix, IntVector, Matrix
from spec.policy import Selection

__all__ = ["best_tokens"]


def best_tokens(values: Matrix, shares: IntVector, pinned: BoolMatrix) -> Selection:
    """Of each row its pinned tokens, then the best others up to its share; the lower index first on a tie.

    Implements: PO-TOP-UNITS
    """
    scores = torch.nan_to_num(torch.from_numpy(np.array(values)), nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    held, unscored = torch.from_numpy(np.array(pinned)), torch.from_numpy(np.isnan(values))
    order = torch.argsort(scores, dim=1, descending=True, stable=True)
    for last in (unscored, ~held):
        order = order.gather(1, torch.argsort(last.gather(1, order).int(), dim=1, stable=True))
    share = torch.maximum(torch.from_numpy(np.array(shares)), held.sum(dim=1))
    first = torch.arange(scores.shape[1]) < share[:, None]
    kept = torch.zeros_like(held).scatter_(1, order, first)
    offsets = np.append(0, kept.sum(dim=1).cumsum(dim=0).numpy())
    return Selection(kept.nonzero()[:, 1].numpy(), offsets)
