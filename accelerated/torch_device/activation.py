"""Selection of the active trunks by the norms of the keys, for decode-time eviction (Section 3.8(a))."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from accelerated.torch_device.sums import token_trunks

__all__ = ["active_trunks"]


def active_trunks(inverse_norms: Tensor, offsets: Tensor, theta_act: float) -> Tensor:
    """Return a mask of the active trunks. In an active trunk, more than half of the live tokens have eta > theta_act.

    Implements: CC-ETA, CC-ACTIVATION
    """
    zero = inverse_norms == torch.inf
    largest = pad(inverse_norms.masked_fill(zero, 0.0), (0, 1)).max()
    above = torch.where(zero, 1.0, inverse_norms / largest) > theta_act
    sizes = offsets.diff()
    return 2 * torch.zeros_like(sizes).scatter_add(0, token_trunks(offsets, len(above)), above.long()) > sizes
