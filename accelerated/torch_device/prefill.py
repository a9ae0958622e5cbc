"""Stages S1 to S6 of prompts on the device of the tensors. The host waits once, for all results together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accelerated.torch_device.coattention import inverse_norms, neighbours, refuse
from accelerated.torch_device.crystal import decide, retentions_of
from accelerated.torch_device.device import on_device
from accelerated.torch_device.records import Neighbours
from spec.policy import DeviceArray
from spec.records import CrystalRetention

__all__ = ["Prefill", "prefill"]


@dataclass(frozen=True)
class Prefill:
    """Function that returns the retention of a prompt (see `spec.backend.Backend.prefill`)."""

    observe: Callable[..., tuple[Neighbours, Tensor, Tensor]]
    refuse: Callable[..., object]
    """Function of q, k, lse and sinks that raises a SpecError about a value that is not finite."""

    def __call__(self, *prompt: Any) -> CrystalRetention:
        """Return the retention of one prompt. Raises the errors of `rows`."""
        return self.rows([prompt])[0]

    @torch.no_grad()
    def rows(self, prompts: Sequence[Sequence[Any]]) -> list[CrystalRetention]:
        """Return the retention of each prompt. The device has the work of all prompts before the host waits.

        Raises:
            SpecError: if q, k, lse or sinks of a prompt have a wrong shape, type or value.
        """
        begun, retentions = [], []
        for q, k, ids, ends, protected, B, parameters, *how in prompts:
            S1, finite, norms = self.observe(q, k, parameters, *how)
            begun.append((S1, decide(S1, ids, ends, protected, B, parameters), norms, finite, B))
        for (q, k, *given), one in zip(prompts, retentions_of(begun), strict=True):
            if one is None:
                self.refuse(q, k, *given[7:])
                raise AssertionError("all values are finite, but the device found a value that is not")
            retentions.append(one)
        return retentions


def observe(q: DeviceArray, k: DeviceArray, *how: Any) -> tuple[Neighbours, Tensor, Tensor]:
    """Return the result of S1, a mask (1,) that is True if all values are finite, and the norms. lse is not used."""
    S1, finite = neighbours(q, k, *how)
    return S1, finite, inverse_norms(on_device(k, S1.salience.device))


prefill = Prefill(observe, refuse)
