"""Stage S4: the trunk graph and the crystallization D of each trunk (Section 3.5), from sorted lists of edges."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from accelerated.torch_device.records import Neighbours
from accelerated.torch_device.sums import left_to_right_sums, segment_offsets, token_trunks
from spec.parameters import CrystalCacheParameters

__all__ = ["Graph", "crystallization", "symmetric_csr", "trunk_graph", "trunk_pairs", "trunk_weights"]


class Graph(NamedTuple):
    """Symmetric trunk graph in CSR form, and the degree of each trunk. Unused places of an array are at the end."""

    indptr: Tensor
    indices: Tensor
    weights: Tensor
    degree: Tensor


def trunk_pairs(
    S1: Neighbours, trunk: Tensor, trunk_at: Callable[[Tensor], Tensor], m: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a * m + b, the number of edges, and the sum of weights for each pair of m trunks a < b with an edge.

    `trunk` (n,) contains the trunk of each token, and `trunk_at` returns the trunks of neighbours. An unused place has
    no edges. Edges are sorted by pair; the sort leaves the edges of a pair in the order of E.

    Implements: CC-TRUNK-EDGES
    """
    keys, weights = list[Tensor](), list[Tensor]()
    for index, weight in ((S1.intra, S1.intra_weight), (S1.cross, S1.cross_weight)):
        pair = trunk[:, None], trunk_at(index)
        low, high = torch.minimum(*pair), torch.maximum(*pair)
        keys.append(torch.where((index >= 0) & (low < high), low * m + high, m * m).flatten())
        weights.append(weight.flatten())
    none = torch.full_like(trunk[:1], m * m)  # without it, a prompt without neighbours would have no place
    key, order = torch.cat([*keys, none]).sort(stable=True)
    weight = torch.cat([*weights, weights[0].new_zeros(1)])[order]
    first = torch.cat([torch.ones_like(key[:1], dtype=torch.bool), key[1:] != key[:-1]])
    bounds = torch.minimum(segment_offsets(first), (key < m * m).sum())
    number = bounds.diff()
    code = torch.where(number > 0, key[bounds[:-1].clamp(max=len(key) - 1)], 0)
    return code, number, left_to_right_sums(weight, bounds)


def trunk_weights(number: Tensor, total: Tensor, product: Tensor) -> Tensor:
    """Return W of each pair of trunks: the mean edge weight times the root of the edge density, or NaN without edges.

    `product` is the product of the sizes of both trunks.

    Implements: CC-TRUNK-WEIGHT
    """
    return total / number * torch.sqrt(number.double() / product)


def trunk_graph(S1: Neighbours, offsets: Tensor, tau_edge: float) -> Graph:
    """Return the trunk graph of a prompt. The first offset is 0."""
    trunk, sizes = token_trunks(offsets, len(S1.intra)), offsets.diff()
    return symmetric_csr(*trunk_pairs(S1, trunk, lambda index: trunk[index.clamp(min=0)], len(sizes)), sizes, tau_edge)


def symmetric_csr(
    pair: Tensor, number: Tensor, total: Tensor, sizes: Tensor, tau_edge: float, *old: Tensor,
) -> Graph:
    """Return the graph of the pairs, and of older edges, if any: row * m + column of each edge, and all weights.

    Each row has ascending columns, and its weights are added in this order.

    Implements: CC-DEGREE
    """
    m = len(sizes)
    a, b = pair // m, pair % m
    W = trunk_weights(number, total, sizes[a] * sizes[b])
    stays = tau_edge < W
    cells = torch.cat([torch.where(stays, pair, m * m), torch.where(stays, b * m + a, m * m), *old[:1]])
    cells, order = cells.sort()
    weights = torch.cat([W, W, *old[1:]])[order]
    indptr = torch.searchsorted(cells, torch.arange(m + 1, device=cells.device) * m)
    return Graph(indptr, cells % m, weights, left_to_right_sums(weights, indptr))


def crystallization(degree: Tensor, m: Tensor, parameters: CrystalCacheParameters) -> Tensor:
    """Return D, the logistic function of s times the standardised degree of the first m (1,) trunks.

    Implements: CC-CRYSTALLIZATION, CC-SEGMENT-D
    """
    if parameters.graph == "zero":
        return torch.zeros_like(degree)
    all_trunks = torch.cat([torch.zeros_like(m), m])
    mu = left_to_right_sums(degree, all_trunks) / m
    sigma = (left_to_right_sums((degree - mu) * (degree - mu), all_trunks) / m).sqrt()
    x = parameters.s * ((degree - mu) / torch.where(sigma < parameters.epsilon, 1.0, sigma))
    shrunk = torch.exp(-x.abs())
    return torch.where(x >= 0, 1.0, shrunk) / (1.0 + shrunk)
