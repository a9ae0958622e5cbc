"""Stages S1 to S6 of a prompt: S1 and the norms of keys by kernels, all others by PyTorch. The host waits once."""

import torch

from accelerated.torch_device.crystal import decide, retention_of
from accelerated.triton_gpu.activation import inverse_norms
from accelerated.triton_gpu.coattention import neighbours
from accelerated.triton_gpu.device import refuse, shaped_tensors
from spec.arrays import BoolVector, IntVector
from spec.parameters import CrystalCacheParameters
from spec.policy import DeviceArray
from spec.records import CrystalRetention

__all__ = ["prefill"]


@torch.no_grad()
def prefill(
    q: DeviceArray, k: DeviceArray, token_ids: IntVector, ends: BoolVector, protected: BoolVector, budget: int,
    parameters: CrystalCacheParameters, scaling: float, softcap: float | None, lse: DeviceArray | None = None,
    sinks: DeviceArray | None = None,
) -> CrystalRetention:
    """Return the retention of a prompt (see `spec.backend.Backend.prefill`).

    Raises:
        SpecError: if the kernels do not accept an input.
    """
    pair = shaped_tensors(q, k)
    S1, finite = neighbours(*pair, parameters, scaling, softcap, lse, sinks)
    decided = decide(S1, token_ids, ends, protected, budget, parameters)
    retention = retention_of(S1, decided, inverse_norms(pair[1]), finite, budget)
    if retention is None:
        refuse(q, k, lse, sinks)
    return retention
