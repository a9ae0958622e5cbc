"""Sums of segments in the order of the specification, and running minima, on the device of the tensors."""

import torch
from torch import Tensor

__all__ = ["first_from", "left_to_right_sums", "segment_offsets", "token_trunks"]


def left_to_right_sums(values: Tensor, offsets: Tensor) -> Tensor:
    """Return the sum of each segment of `values` (e,), as (s,). Segment i is offsets[i] to offsets[i + 1] - 1.

    The numbers of a segment are added from left to right, beginning with 0. On a CPU and on CUDA, one thread adds the
    numbers of a segment if the values have two axes. With one axis, CUDA adds the numbers in a different order.
    """
    sums = torch.segment_reduce(values[:, None], "sum", offsets=offsets, axis=0, initial=0.0, unsafe=True)
    return sums[:, 0]


def first_from(marked: Tensor) -> Tensor:
    """Return for each token the first marked token that is not earlier, (n,), or n if there is none."""
    n = len(marked)
    at = torch.arange(n, device=marked.device)
    return torch.where(marked, at, n).flip(0).cummin(dim=0).values.flip(0)


def segment_offsets(first: Tensor) -> Tensor:
    """Return the offsets (n + 1,) of segments of n items. `first` (n,) marks the first item of each segment.

    The entries after the last offset are n, so unused segments are empty.
    """
    n = len(first)
    at = torch.arange(n, device=first.device)
    place = torch.where(first, first.cumsum(dim=0) - 1, n + 1)
    return torch.full((n + 2,), n, device=first.device).scatter(0, place, at)[: n + 1]


def token_trunks(offsets: Tensor, n: int) -> Tensor:
    """Return the index of the trunk of each of n tokens, (n,). The first offset is 0."""
    return torch.searchsorted(offsets, torch.arange(n, device=offsets.device), right=True) - 1
