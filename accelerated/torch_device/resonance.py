"""Resonance: pulses from active trunks raise D along the trunk graph (Section 3.8(b)).

Pulses do not depend on D, so a block of sources is searched at once. The host waits for no result.
"""

import torch
from torch import Tensor

from accelerated.torch_device.device import block_rows
from accelerated.torch_device.sums import token_trunks
from spec.parameters import CrystalCacheParameters

__all__ = ["pulses", "resonance"]


def pulses(
    sources: Tensor, senders: Tensor, weights: Tensor, offsets: Tensor, parameters: CrystalCacheParameters,
) -> Tensor:
    """Return the pulse that each trunk receives from each of the trunks `sources` (s,), as (m, s).

    Trunk h receives pulses over the edges offsets[h] to offsets[h + 1] - 1, from the trunks `senders`.

    Implements: CC-PULSE
    """
    m = len(offsets) - 1
    arrived = torch.arange(m, device=sources.device)[:, None] == sources
    received, visited = arrived.double(), arrived
    for _ in range(min(parameters.max_hops, m)):
        sent = received[senders] * weights[:, None] * parameters.gamma_hop
        sent.masked_fill_(~arrived[senders], -1.0)
        best = torch.segment_reduce(sent, "max", offsets=offsets, axis=0, initial=-1.0, unsafe=True)
        arrived = ~visited & (best >= parameters.tau_pulse)
        received, visited = torch.where(arrived, best, received), visited | arrived
    return received


def resonance(
    D: Tensor, indptr: Tensor, indices: Tensor, weights: Tensor, sources: Tensor, parameters: CrystalCacheParameters,
) -> Tensor:
    """Return D of each trunk after the trunks `sources` (s,) have sent pulses, in this order.

    Implements: CC-RAISE, CC-RESONANCE
    """
    receivers, order = indices.sort(stable=True)
    offsets = torch.searchsorted(receivers, torch.arange(len(D) + 1, device=D.device))
    edges = token_trunks(indptr, len(indices))[order], weights[order], offsets
    for block in torch.split(sources, block_rows(D, len(indices) + 1)):
        for pulse in pulses(block, *edges, parameters).unbind(dim=1):
            D = (D + parameters.alpha_res * pulse * (1.0 - D)).clamp(max=1.0)
    return D
