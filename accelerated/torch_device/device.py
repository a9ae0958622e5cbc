"""Where torch computes in this process, and how arrays come and go."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from spec.policy import DeviceArray

__all__ = ["default_device", "download", "on_device", "takes", "upload"]


def default_device() -> torch.device:
    """Where NumPy arrays are copied to: the accelerator of this machine, or the CPU. MPS has no float64."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if device is None or device.type == "mps" else device


def takes(x: DeviceArray) -> bool:
    """Whether the stages read this tensor where it is."""
    return isinstance(x, Tensor) and x.is_floating_point() and x.device.type != "mps"


def upload(array: np.ndarray[Any, Any], dtype: Any, device: torch.device | None = None) -> Tensor:
    """A NumPy array on the device, contiguous; the array itself may be read-only."""
    return torch.from_numpy(np.array(array, dtype=dtype, order="C")).to(device or default_device())


def on_device(x: DeviceArray, device: torch.device | None = None) -> Tensor:
    """A tensor in float32, or in float64 if it is; a tensor stays where it is unless a device is named."""
    if not isinstance(x, Tensor):
        x = upload(x, np.float64 if x.dtype.itemsize > 4 else np.float32, device)
    found: Tensor = x.to(device or x.device, torch.promote_types(x.dtype, torch.float32))
    return found


def download(tensor: Tensor, dtype: Any) -> Any:
    """A tensor as a NumPy array on the host."""
    return tensor.detach().cpu().numpy().astype(dtype, copy=False)
