"""Stage S5: the two-path score of a trunk (Section 3.6)."""

import torch
from torch import Tensor

from spec.parameters import CrystalCacheParameters

__all__ = ["score"]


def score(D: Tensor, M_bar: Tensor, held: Tensor, parameters: CrystalCacheParameters) -> Tensor:
    """Return the larger of D and (alpha times the min-max normalised log impact). Trunks in `held` have NaN.

    Implements: CC-NORMALISED-IMPACT, CC-SCORE
    """
    if not len(D):
        return D
    path = torch.log1p(M_bar)
    low, high = path.masked_fill(held, torch.inf).min(), path.masked_fill(held, -torch.inf).max()
    M_tilde = (path - low) / (high - low + parameters.epsilon)
    return torch.maximum(D, parameters.alpha * M_tilde).masked_fill(held, torch.nan)
