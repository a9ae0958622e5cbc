"""Stage S4 for a later segment. An edge of a later segment can reach an older trunk."""

import torch
from torch import Tensor

from accelerated.torch_device.graph import Graph, symmetric_csr, trunk_pairs
from accelerated.torch_device.records import Neighbours
from accelerated.torch_device.sums import token_trunks

__all__ = ["segment_graph"]


def segment_graph(
    S1: Neighbours, start: int, bounds: Tensor, sizes: Tensor, indptr: Tensor, indices: Tensor, weights: Tensor,
    tau_edge: float,
) -> Graph:
    """Return the graph of the old and the new trunks. Weights between two old trunks are unchanged.

    Neighbours in S1 are positions. The first token of the segment has the position `start`.

    Implements: CC-SEGMENT-GRAPH
    """
    def trunk_at(positions: Tensor) -> Tensor:
        return torch.searchsorted(bounds, positions, right=True) - 1

    new = trunk_at(start + torch.arange(len(S1.intra), device=bounds.device))
    old = token_trunks(indptr, len(indices)) * len(sizes) + indices
    return symmetric_csr(*trunk_pairs(S1, new, trunk_at, len(sizes)), sizes, tau_edge, old, weights)
