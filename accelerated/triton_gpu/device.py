"""Device that the backend `triton` uses in this process, and checks of the backend's inputs."""

import os
from collections.abc import Sequence

import numpy as np
import torch
import triton

from accelerated.torch_device.device import download, upload
from accelerated.triton_gpu.interpreter import patch_once
from accelerated.triton_gpu.launch import SHARED
from spec.errors import BackendUnavailable, SpecError
from spec.policy import DeviceArray
from spec.validate import check_shapes

__all__ = [
    "INTERPRETED", "WIDEST_HEAD", "accepts_tensor", "default_device", "download", "key_tensor", "refuse",
    "require_device", "shaped_lse", "shaped_tensors", "shared_memory", "single_sinks", "upload",
]

# Triton reads the variable when a kernel is decorated, so the variable applies to the whole process.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "y", "yes")
if INTERPRETED:
    patch_once()

WIDEST_HEAD = 256
KEPT = (np.float16, np.float32)
Tensor = torch.Tensor


def require_device() -> None:
    """Check that Triton kernels can run in this process.

    Raises:
        BackendUnavailable: if there is neither a CUDA device nor the interpreter, or if the device has too little
            shared memory for the launch table.
    """
    if INTERPRETED:
        return
    if not torch.cuda.is_available():
        raise BackendUnavailable(
            "backend 'triton' needs a CUDA device, and torch finds none. Use a machine with a CUDA device, or the"
            " backend 'numba'. To run the kernels slowly on the CPU, start the process with TRITON_INTERPRET=1"
        )
    if shared_memory() < SHARED:
        raise BackendUnavailable(
            f"backend 'triton' needs {SHARED} bytes of shared memory for each program;"
            f" {torch.cuda.get_device_name()} has {shared_memory()}. Use an A100, H100 or H200, or the backend 'numba'"
        )


def shared_memory() -> int:
    """Return how many bytes of shared memory one program can use on the current device."""
    utils = triton.runtime.driver.active.utils
    return int(utils.get_device_properties(torch.cuda.current_device())["max_shared_mem"])


def default_device() -> torch.device:
    """Return the device to which NumPy arrays are copied."""
    return torch.device("cpu" if INTERPRETED else "cuda")


def accepts_tensor(x: DeviceArray) -> bool:
    """Return True if the kernels accept this tensor without a copy to the host."""
    if not isinstance(x, torch.Tensor) or x.device.type != default_device().type:
        return False
    return x.dtype in (torch.float32, torch.float16) or (x.dtype == torch.bfloat16 and not INTERPRETED)


def shaped_tensors(q: DeviceArray, k: DeviceArray) -> tuple[Tensor, Tensor]:
    """Return q (H, n, d) and k (H_kv, live, d) as tensors of one device and dtype, whose values are not checked.

    Tensors are not copied. If NumPy arrays q and k have different dtypes, both are converted to float32.

    Raises:
        SpecError: if the kernels do not accept the type, shape, dtype or device.
    """
    if isinstance(q, torch.Tensor) != isinstance(k, torch.Tensor):
        raise SpecError("k", type(k).__name__, f"must have the type of q, {type(q).__name__}")
    kept = KEPT if getattr(q, "dtype", None) == getattr(k, "dtype", None) else ()
    queries, keys = _checked("q", q, kept), _checked("k", k, kept)
    if queries.dtype != keys.dtype or queries.device != keys.device:
        wanted = f"must have the dtype and the device of q, {queries.dtype} on {queries.device}"
        raise SpecError("k", (keys.dtype, str(keys.device)), wanted)
    check_shapes(queries, keys)
    return queries, keys


def shaped_lse(lse: DeviceArray | None, q: Tensor) -> Tensor | None:
    """Return lse (H, n) as a float32 tensor on the device of q (H, n, d), whose values are not checked, or None.

    Raises:
        SpecError: if the kernels do not accept the type, shape, dtype or device.
    """
    if lse is None:
        return None
    if not isinstance(lse, np.ndarray | torch.Tensor) or tuple(lse.shape) != tuple(q.shape[:2]):
        shape = getattr(lse, "shape", type(lse).__name__)
        raise SpecError("lse", shape, f"must be an array (heads, queries), {tuple(q.shape[:2])}")
    if isinstance(lse, np.ndarray):
        if lse.dtype.kind != "f":
            raise SpecError("lse", lse.dtype, "must be floating point")
        lse = upload(lse, np.float32, q.device)
    if lse.dtype != torch.float32 or lse.device != q.device:
        raise SpecError("lse", (lse.dtype, str(lse.device)), f"must be {torch.float32} on {q.device}")
    return lse


def single_sinks(sinks: DeviceArray | None, device: torch.device) -> Tensor | None:
    """Return the sinks in float32 on the device."""
    if isinstance(sinks, np.ndarray):
        return upload(sinks, np.float32, device)
    return None if sinks is None else sinks.to(device, torch.float32, non_blocking=True)


def refuse(
    q: DeviceArray, k: DeviceArray, lse: DeviceArray | None = None, sinks: DeviceArray | None = None,
) -> None:
    """Raise a SpecError about a value that is not finite. The host waits for each tensor."""
    queries, keys = shaped_tensors(q, k)
    given = ("lse", shaped_lse(lse, queries)), ("sinks", single_sinks(sinks, queries.device))
    for name, x, shown in (("q", queries, q), ("k", keys, k), *((name, x, x) for name, x in given)):
        if x is not None and shown is not None:
            _check_finite(name, x, shown)


def key_tensor(k: DeviceArray) -> Tensor:
    """Return the keys k (H_kv, n, d) as a tensor. A NumPy array is copied to the device, and a tensor is not copied.

    An array of float64 becomes a tensor of float64.

    Raises:
        SpecError: if the kernels do not accept the type, shape, dtype, device or a value of the keys.
    """
    keys = _checked("k", k, (*KEPT, np.float64))
    _check_finite("k", keys, k)
    return keys


def _check_finite(name: str, x: Tensor, given: DeviceArray) -> None:
    """Check that all values are finite after the conversion to the dtype of the kernels."""
    if not bool(_largest(x).isfinite()):
        at = tuple(torch.nonzero(~torch.isfinite(x))[0].tolist())
        raise SpecError(name, given[at].item(), f"must be finite in {x.dtype}; this value is at {at}")


def _largest(x: Tensor) -> Tensor:
    """Return the largest absolute value of x, or NaN if a value is NaN, without a copy of x."""
    result: Tensor = torch.linalg.vector_norm(x, ord=float("inf"))
    return result


def _checked(name: str, x: DeviceArray, kept: Sequence[type]) -> Tensor:
    """Return a tensor unchanged, or copy an array to the device in a dtype that the kernels accept."""
    if not isinstance(x, np.ndarray | torch.Tensor) or x.ndim != 3:
        raise SpecError(name, getattr(x, "shape", type(x).__name__), "must be an array (heads, tokens, d)")
    if 0 in x.shape:
        raise SpecError(name, tuple(x.shape), "no axis may be empty")
    if x.shape[2] > WIDEST_HEAD:
        raise SpecError(
            name, tuple(x.shape), f"must have at most {WIDEST_HEAD} channels for each head with the backend triton"
        )
    if isinstance(x, np.ndarray):
        if x.dtype.kind != "f":
            raise SpecError(name, x.dtype, "must be floating point")
        with np.errstate(over="ignore"):  # a value that overflows becomes infinite, and raises an error later
            return upload(x, x.dtype if x.dtype in kept else kept[-1] if kept else np.float32, default_device())
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise SpecError(name, x.dtype, "must be float32, float16 or bfloat16 with the backend triton")
    if INTERPRETED and x.dtype == torch.bfloat16:
        raise SpecError(
            name, x.dtype, "must be float32 or float16, because Triton's interpreter computes bfloat16 incorrectly"
        )
    if x.device.type != default_device().type:
        raise SpecError(name, str(x.device), f"must be on the device {default_device().type}")
    return x
