"""Stages S1 to S6 of a prompt on the device of the tensors. The host waits once, for all results together."""

import torch
from torch import Tensor

from accelerated.torch_device.coattention import inverse_norms, neighbours, refuse
from accelerated.torch_device.crystal import decide, retention_of
from accelerated.torch_device.device import on_device
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
    """Return the retention of a prompt (see `spec.backend.Backend.prefill`). A given lse is checked but not used.

    Raises:
        SpecError: if q, k, lse or sinks have a wrong shape, type or value.
    """
    S1, finite = neighbours(q, k, parameters, scaling, softcap, lse, sinks)
    decided = decide(S1, token_ids, ends, protected, budget, parameters)
    keys: Tensor = on_device(k, S1.salience.device)
    retention = retention_of(S1, decided, inverse_norms(keys), finite, budget)
    if retention is None:
        refuse(q, k, sinks)
    return retention
