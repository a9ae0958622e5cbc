"""Score of CurDKV on the device of the keys, with the names and arguments of the reference."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from accelerated.torch_device.device import on_device
from spec.policy import LayerView

__all__ = ["curdkv_score"]


def leverage_shares(x: Tensor, window: int) -> Tensor:
    """Return each token's share of the squared norms of its window, (H, n). The share is 0 if the window is 0."""
    H, n = x.shape[:2]
    squares = pad(torch.linalg.vector_norm(x, dim=2).square(), (0, -n % window)).view(H, -1, window)
    total = squares.sum(dim=2, keepdim=True)
    shares = squares / torch.where(total > 0, total, torch.inf)
    return shares.flatten(1)[:, :n]


def curdkv_score(view: LayerView, window: int) -> Tensor:
    """Implements: PO-CURDKV"""
    return leverage_shares(on_device(view.k), window) * leverage_shares(on_device(view.v), window)
