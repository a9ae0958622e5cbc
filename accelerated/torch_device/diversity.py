"""Set-conditioned selection. Each token depends on all tokens selected before, so the k choices are a loop.

A choice is a few operations on the scores, and the cosines with one signature. The host waits for no result.
"""

import numpy as np
import torch
from torch import Tensor

from accelerated.torch_device.device import on_arrays
from spec.arrays import BoolVector, IntVector, Matrix, Vector
from spec.validate import check_diversity

__all__ = ["DiversityStages", "diverse"]


def diverse(s: Tensor, V: Tensor, retained: Tensor, k: int, lam: float) -> Tensor:
    """Return a mask (n,) of the k selected tokens. The loop first selects the retained tokens.

    Implements: DV-COSINE, DV-GREEDY
    """
    worth, at = s.masked_fill(s.isnan(), -torch.inf), torch.arange(len(s), device=s.device)
    S, m, channels = torch.zeros_like(retained), torch.zeros_like(worth), V.T.contiguous()
    channel_range = torch.arange(2, device=s.device) * len(channels)
    for _ in range(k):
        held = retained & ~S
        open_ = torch.where(held.any(), held, ~S)
        gain = (worth - lam * m).masked_fill(~open_, -torch.inf)
        i = at.masked_fill(~open_ | (gain < gain.max()), len(at)).min(dim=0, keepdim=True).values
        S = S | (at == i)
        products = channels * channels.index_select(1, i)
        # On a CPU and on CUDA, one thread adds the products of a token, channel by channel.
        cosines = torch.segment_reduce(products, "sum", offsets=channel_range, axis=0, initial=0.0, unsafe=True)[0]
        m = torch.maximum(m, cosines)
    return S


class DiversityStages:
    """Set-conditioned selection for NumPy arrays."""

    def diverse(self, s: Vector, V: Matrix, retained: BoolVector, k: int, lam: float, /) -> IntVector:
        check_diversity(s, V, retained, k, lam)
        return np.flatnonzero(on_arrays(diverse, s, V, retained, k, float(lam))[0])
