"""Device that the backend `torch` uses, and copies between NumPy arrays and tensors."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spec.policy import DeviceArray

__all__ = [
    "accepts_tensor", "block_rows", "default_device", "download", "download_together", "heads_at_once", "on_arrays",
    "on_device", "upload",
]


def default_device() -> torch.device:
    """Return the device for NumPy arrays: the accelerator, or the CPU if there is none or only MPS (has no float64)."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if device is None or device.type == "mps" else device


def accepts_tensor(x: DeviceArray) -> bool:
    """Return True if the stages accept this tensor without a copy to the host."""
    return isinstance(x, Tensor) and x.is_floating_point() and x.device.type != "mps"


def block_rows(x: Tensor, columns: int) -> int:
    """Return how many rows fit in a block of `2 ** 19` numbers (CPU) or `2 ** 26` numbers (GPU), but at least 16."""
    return max(16, _block(x) // columns)


def heads_at_once(x: Tensor) -> int:
    """Return how many heads of x (H, n, d) fit in a block of as many numbers as in `block_rows`, but at least 1."""
    return max(1, _block(x) // max(1, x.shape[1] * x.shape[2]))


def _block(x: Tensor) -> int:
    return 2**19 if x.device.type == "cpu" else 2**26


def upload(array: np.ndarray[Any, Any], dtype: Any, device: torch.device | None = None) -> Tensor:
    """Copy a NumPy array to the device as a contiguous tensor, asynchronously. The array may be read-only."""
    copied = torch.from_numpy(np.array(array, dtype=dtype, order="C"))
    return copied.to(device or default_device(), non_blocking=True)


def on_device(x: DeviceArray, device: torch.device | None = None) -> Tensor:
    """Return x as a tensor in float32, or in float64 if x is float64. A tensor is moved only if a device is given."""
    if not isinstance(x, Tensor):
        x = upload(x, np.float64 if x.dtype.itemsize > 4 else np.float32, device)
    target = device or x.device
    result: Tensor = x.to(target, torch.promote_types(x.dtype, torch.float32), non_blocking=target.type != "cpu")
    return result


def download(tensor: Tensor, dtype: Any) -> Any:
    """Copy a tensor to the host as a NumPy array."""
    return tensor.detach().cpu().numpy().astype(dtype, copy=False)


def download_together(*tensors: Tensor) -> list[Any]:
    """Copy tensors to the host with a single wait, and return a NumPy array for each."""
    with torch.no_grad():
        # A tensor of one number counts as contiguous with any stride, and then has no view as bytes (torch 2.13).
        rows = [x.flatten().clone(memory_format=torch.contiguous_format) for x in tensors]
        packed = download(torch.cat([row.view(torch.uint8) for row in rows]), np.uint8)
    parts = np.split(packed, np.cumsum([x.numel() * x.element_size() for x in tensors])[:-1])
    kinds = (torch.empty(0, dtype=x.dtype, device="cpu").numpy().dtype for x in tensors)
    return [part.copy().view(kind).reshape(x.shape) for part, kind, x in zip(parts, kinds, tensors, strict=True)]


def on_arrays(stage: Callable[..., Any], *arguments: Any) -> list[np.ndarray[Any, Any]]:
    """Call a function of tensors with NumPy arrays. Return its tensors as NumPy arrays, copied with a single wait."""
    result = stage(*(upload(x, x.dtype) if isinstance(x, np.ndarray) else x for x in arguments))
    return download_together(*(result if isinstance(result, tuple) else (result,)))
