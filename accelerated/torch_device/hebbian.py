"""Hebbian update: edges between two active trunks gain weight, and all other edges decay (Section 3.8(c))."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from accelerated.torch_device.sums import token_trunks
from spec.parameters import CrystalCacheParameters

__all__ = ["hebbian"]


def hebbian(
    indptr: Tensor, indices: Tensor, weights: Tensor, active: Tensor, parameters: CrystalCacheParameters,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return W after the update of all edges. Removed edges are at the end, after the last row.

    Implements: CC-HEBB
    """
    p = parameters
    if p.hebb == "static":
        return indptr, indices, weights
    together = active[token_trunks(indptr, len(indices))] & active[indices]
    after = torch.where(together, (weights + p.eta_Hebb).clamp(max=1.0), p.gamma_decay * weights)
    stays = after > p.tau_edge
    order = torch.argsort(~stays, stable=True)
    return pad(stays.cumsum(dim=0), (1, 0))[indptr], indices[order], after[order]
