"""Stages S1 to S6 of a prompt: S1 and the norms of keys by kernels, all others by PyTorch. The host waits once."""

from typing import Any

from torch import Tensor

from accelerated.torch_device.prefill import Prefill
from accelerated.torch_device.records import Neighbours
from accelerated.triton_gpu.activation import inverse_norms
from accelerated.triton_gpu.coattention import neighbours
from accelerated.triton_gpu.device import refuse, shaped_tensors
from spec.policy import DeviceArray

__all__ = ["prefill"]


def observe(q: DeviceArray, k: DeviceArray, *how: Any) -> tuple[Neighbours, Tensor, Tensor]:
    """Return the result of S1, a mask (1,) that is True if all values are finite, and the norms of the keys."""
    pair = shaped_tensors(q, k)
    return *neighbours(*pair, *how), inverse_norms(pair[1])


prefill = Prefill(observe, refuse)
