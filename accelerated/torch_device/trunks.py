"""Stage S2: trunks, the contiguous units of eviction (Section 3.3).

The merge pass of the paper runs from left to right. On a device, first compute the start of the next trunk for each
sentence, as if a trunk started at this sentence. Then follow these jumps from the first sentence, by repeated doubling,
to mark the trunks of the merge pass.
"""

import torch
from torch import Tensor

from accelerated.torch_device.records import Neighbours
from accelerated.torch_device.sums import first_from, left_to_right_sums, segment_offsets
from spec.parameters import CrystalCacheParameters

__all__ = ["interface_sums", "jumps", "median_strength", "pieces", "reached", "trunk_offsets"]

WINDOW = 5  # fixed by Eq. 16
TOKENS = 2**18
"""Number of tokens whose edges are summed at once. An interface needs about a kilobyte of memory."""
REACH = 2 * WINDOW - 1
"""Largest distance between the two tokens of an edge across an interface."""


def trunk_offsets(S1: Neighbours, ends: Tensor, parameters: CrystalCacheParameters) -> Tensor:
    """Return the offsets of the trunks, (n + 1,), counted from the first token. Unused entries at the end are n.

    Implements: CC-SENTENCES, CC-TRUNKS
    """
    starts = torch.cat([torch.ones_like(ends[:1]), ends[:-1]])
    after = _shifted(first_from(starts))
    total, edges = interface_sums(S1, after)
    tau = torch.full_like(total[:1, 0], parameters.tau_merge)
    if parameters.merge == "median":
        tau = median_strength(total, edges, starts, tau)
    first = reached(jumps(starts, after, total - tau * edges > 0, parameters.T_max))
    return segment_offsets(pieces(first, parameters.T_max))


def _shifted(x: Tensor) -> Tensor:
    """Return x without the first number. The number n is appended."""
    return torch.cat([x[1:], torch.full_like(x[:1], len(x))])


def forward_edges(S1: Neighbours) -> tuple[Tensor, Tensor]:
    """Return weight and presence (n, REACH) of the edges from each token to the REACH tokens after it."""
    at = torch.arange(len(S1.intra), device=S1.intra.device)[:, None]
    first = torch.cat([at.expand_as(S1.intra), S1.cross], dim=1)
    gap = torch.cat([S1.intra, at.expand_as(S1.cross)], dim=1) - first
    inside = (first >= 0) & (gap >= 1) & (gap <= REACH)
    size = len(at) * REACH  # the last place collects all other edges
    place = torch.where(inside, first * REACH + gap - 1, size).flatten()
    weight = torch.cat([S1.intra_weight, S1.cross_weight], dim=1).flatten()
    table = weight.new_zeros(size + 1).scatter(0, place, weight)[:-1]
    return table, torch.zeros(size + 1, dtype=torch.bool, device=place.device).scatter(0, place, True)[:-1]


def interface_sums(S1: Neighbours, after: Tensor) -> tuple[Tensor, Tensor]:
    """Return sum and number of the edge weights across the start of each token, (n, WINDOW).

    Column w - 1 uses the w tokens before the interface. The sentence after the interface ends at `after`.

    Implements: CC-INTERFACE, CC-INTERFACE-EDGES
    """
    edges, tokens = forward_edges(S1), torch.arange(len(after), device=after.device)
    pieces_of = (torch.split(x, TOKENS) for x in (tokens, after))
    parts = [_sums_at(at, until, *edges) for at, until in zip(*pieces_of, strict=True)]
    total, number = (torch.cat(part) for part in zip(*parts, strict=True))
    return total, number


def _sums_at(at: Tensor, after: Tensor, table: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """Return the results of `interface_sums` for the tokens `at`."""
    near = torch.arange(WINDOW, device=at.device)
    before, behind = (near - WINDOW).repeat_interleave(WINDOW), near.repeat(WINDOW)
    inside = (at[:, None] + before >= 0) & (at[:, None] + behind < after[:, None])
    place = (at[:, None] * REACH + before * REACH + behind - before - 1).clamp(0, len(table) - 1)
    used = (inside & present[place])[:, None] & (before >= -1 - near[:, None])
    weights = torch.where(used, table[place][:, None], 0.0)
    cells = WINDOW * WINDOW
    total = left_to_right_sums(weights.flatten(), torch.arange(0, weights.numel() + 1, cells, device=at.device))
    return total.view(-1, WINDOW), used.sum(dim=2).double()


def median_strength(total: Tensor, edges: Tensor, starts: Tensor, tau: Tensor) -> Tensor:
    """Return the lower median of the strengths between neighbouring sentences, (1,), or tau for one sentence.

    Implements: CC-ADAPTIVE-MERGE
    """
    at = torch.arange(len(starts), device=starts.device)
    begin = torch.where(starts, at, 0).cummax(dim=0).values
    width = at - torch.cat([begin[:1], begin[:-1]])
    total, edges = (x.gather(1, (width - 1).clamp(0, WINDOW - 1)[:, None])[:, 0] for x in (total, edges))
    mean = total / edges.clamp(min=1)
    strength = torch.where(total - mean * edges <= 0, mean, mean.nextafter(torch.full_like(mean, torch.inf)))
    between = starts & (at > 0)
    number = between.sum(dim=0, keepdim=True)
    ascending = torch.where(between, strength, torch.inf).sort().values
    return torch.where(number > 0, ascending.gather(0, ((number - 1) // 2).clamp(min=0)), tau)


def jumps(starts: Tensor, after: Tensor, joined: Tensor, T_max: int) -> Tensor:
    """Return the start of the trunk after a trunk that begins at a token, (n + 1,), for each sentence start.

    `joined` (n, WINDOW) is True if the edges across the start of a sentence merge the sentence.

    Implements: CC-MERGE
    """
    n = len(starts)
    at = torch.arange(n + 1, device=starts.device)
    cut = torch.cat([starts[:, None] & ~joined, torch.zeros_like(joined[:1])])
    latest = torch.cat([torch.where(starts, at[:n], 0).cummax(dim=0).values, at[n:]])[(at + T_max).clamp(max=n)]
    result = torch.where(latest > at, latest, torch.cat([after, at[n:]]))
    for width in range(1, WINDOW):
        near = (at + width).clamp(max=n)
        result = torch.where(cut[near, width - 1], torch.minimum(result, near), result)
    return torch.minimum(result, first_from(cut[:, WINDOW - 1]).clamp(max=n)[(at + WINDOW).clamp(max=n)])


def reached(jump: Tensor) -> Tensor:
    """Return a mask (n,) of the tokens that jumps reach from token 0. Each step doubles the number of jumps."""
    n = len(jump) - 1
    mark = (torch.arange(n + 1, device=jump.device) == 0).long()
    for _ in range(n.bit_length()):
        mark = mark.scatter_reduce(0, jump, mark, "amax")
        jump = jump.gather(0, jump)
    return mark[:n] > 0


def pieces(first: Tensor, T_max: int) -> Tensor:
    """Return a mask (n,) of the first tokens of trunks after the split of long trunks. Larger pieces come first.

    Implements: CC-SPLIT
    """
    at = torch.arange(len(first), device=first.device)
    start = torch.where(first, at, 0).cummax(dim=0).values
    size = _shifted(first_from(first)) - start
    number = (size + T_max - 1) // T_max
    small, larger = size // number, size % number
    head = larger * (small + 1)
    inside = at - start
    return torch.where(inside < head, inside % (small + 1), (inside - head) % small) == 0
