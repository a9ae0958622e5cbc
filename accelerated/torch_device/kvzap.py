"""Score of KVzap on the device of the hidden states, with the names and arguments of the reference."""

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import gelu, linear

from accelerated.torch_device.device import on_device, upload
from spec.arrays import Matrix, Vector
from spec.policy import DeviceArray

__all__ = ["kvzap_score"]


def width_of(x: Tensor) -> type[np.float64] | type[np.float32]:
    """Return the dtype of NumPy for weights of a tensor."""
    return np.float64 if x.dtype == torch.float64 else np.float32


def mapped(x: Tensor, W: Matrix, b: Vector) -> Tensor:
    """Return x W^T + b in the dtype of x, (n, outputs)."""
    wide = width_of(x)
    result: Tensor = linear(x, upload(W, wide, x.device), upload(b, wide, x.device))
    return result


def kvzap_score(
    hidden: DeviceArray, W_2: Matrix, b_2: Vector, W_1: Matrix | None = None, b_1: Vector | None = None,
) -> Tensor:
    """Implements: PO-KVZAP"""
    x = on_device(hidden)
    if W_1 is not None and b_1 is not None:
        x = gelu(mapped(x, W_1, b_1))
    return mapped(x, W_2, b_2).mT
