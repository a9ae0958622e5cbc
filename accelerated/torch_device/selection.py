"""Selection of the best tokens by one stable sort of all groups, and budgets of heads computed from scores.

No function copies values from the device to the host. `best_tokens` takes and returns host arrays.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from functools import reduce

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from spec.arrays import BoolMatrix, IntVector, Matrix
from spec.policy import Selection

__all__ = [
    "adaptive_shares", "best_tokens", "competition_shares", "filled_chunks", "kept_blocks", "kept_representatives",
    "kept_tokens", "ranks",
]


def kept_tokens(values: Tensor, shares: Tensor, pinned: Tensor) -> Tensor:
    """Return a mask (g, n) that selects in each row the pinned tokens, then the highest scores, up to the row's share.

    If two scores are equal, the lower index is selected first. NaN ranks below every score.

    Implements: PO-TOP-UNITS
    """
    return first_tokens(torch.argsort(-values, dim=1, stable=True), shares, pinned)


def first_tokens(order: Tensor, shares: Tensor, pinned: Tensor) -> Tensor:
    """Return a mask (g, n) that selects in each row the pinned tokens, then tokens in this `order`, up to the share."""
    free = ~pinned.gather(1, order)
    first = free & (free.cumsum(dim=1) <= (shares - pinned.sum(dim=1))[:, None])
    return pinned | torch.zeros_like(pinned).scatter_(1, order, first)


def ranks(x: Tensor) -> Tensor:
    """Return the rank of each number in a row. The largest number has rank 0. Equal numbers are ranked by index."""
    order = torch.argsort(-x, dim=-1, stable=True)
    return torch.empty_like(order).scatter_(-1, order, torch.arange(x.shape[-1], device=x.device).expand_as(order))


def filled_chunks(members: Tensor, c: int, past: int, shares: Tensor, pinned: Tensor) -> Tensor:
    """Return a mask (g, n) that selects in each row the pinned tokens, then the chunks with the largest sums.

    The last selected chunk is kept only in part if the share of the row ends inside the chunk. Chunks of c tokens cover
    the first `past` tokens. All later tokens are pinned.

    Implements: PO-FILL-UNITS, PO-CHUNKKV
    """
    chunks = pad(members[:, :past], (0, -past % c)).double().view(len(members), -1, c).sum(dim=2)
    rank = pad(ranks(chunks).repeat_interleave(c, dim=1)[:, :past], (0, members.shape[1] - past))
    order = torch.argsort(-members, dim=1, stable=True)
    return first_tokens(order.gather(1, torch.argsort(rank.gather(1, order), dim=1, stable=True)), shares, pinned)


def kept_blocks(
    values: Tensor, shares: Tensor, pinned: Tensor, b: int, choose: Callable[..., Tensor] = kept_tokens,
) -> Tensor:
    """Return a mask (g, n) that selects in each row the blocks of b tokens with the largest sums.

    If the last block has fewer than b tokens, the last block is always selected.

    Implements: PO-BEST-BLOCKS
    """
    full, left = divmod(values.shape[1], b)
    tokens, held = (x[:, : full * b].reshape(len(x), full, b) for x in (values.double(), pinned))
    chosen = choose(reduce(torch.add, tokens.unbind(2)), (shares - left).clamp(min=0) // b, held.any(dim=2))
    return pad(chosen.repeat_interleave(b, dim=1), (0, left), value=True)


def kept_representatives(
    values: Tensor, shares: Tensor, pinned: Tensor, b: int, share: Fraction, anchor: str, free: Tensor,
) -> Tensor:
    """Return the mask of `kept_blocks` for a layer. The fraction `share` of the blocks are representatives.

    `free` contains the blocks without protected tokens.

    Implements: PO-REPRESENTATIVES
    """
    distances = anchor_distances(values[:, : len(values[0]) // b * b].view(len(values), -1, b), free, anchor)

    def choose(totals: Tensor, places: Tensor, held: Tensor) -> Tensor:
        few = (places - held.sum(dim=1)).clamp(min=0) * share.numerator // share.denominator
        stays = kept_tokens(totals, places - few, held)
        order = torch.argsort(distances, stable=True).expand(stays.shape)
        order = order.gather(1, torch.argsort(stays.gather(1, order).int(), dim=1, stable=True))
        at, left = torch.arange(len(distances), device=values.device), (~stays).sum(dim=1, keepdim=True).clamp(min=1)
        runs = torch.minimum(few[:, None], (~stays).sum(dim=1, keepdim=True))
        run = (at * runs + left - 1) // left
        first = (run < runs) & (run * left // runs.clamp(min=1) == at)
        return kept_tokens(totals, places, stays | torch.zeros_like(stays).scatter_(1, order, first))

    return kept_blocks(values, shares, pinned, b, choose)


def anchor_distances(blocks: Tensor, free: Tensor, anchor: str) -> Tensor:
    """Return each block's Hamming distance to the anchor, (m,), summed over all heads of `blocks` (h, m, b).

    The distance of a block that is not in `free` is 0.

    Implements: PO-REPRESENTATIVES
    """
    h, m, b = blocks.shape
    tokens = blocks[:, free].reshape(h, -1)
    better = torch.argsort(-tokens, dim=1, stable=True)[:, : tokens.shape[1] // 2]
    bits = torch.zeros_like(tokens, dtype=torch.bool).scatter_(1, better, True).view(h, -1, b)
    if anchor == "mean":
        differ = bits != (2 * bits.sum(dim=1, keepdim=True) > bits.shape[1])
    else:
        differ = bits != {"alternating": torch.arange(b, device=bits.device) % 2 == 1}.get(anchor, anchor == "ones")
    return torch.zeros(m, dtype=torch.int64, device=bits.device).index_copy_(0, free, differ.sum(dim=(0, 2)))


def best_tokens(values: Matrix, shares: IntVector, pinned: BoolMatrix) -> Selection:
    """Select tokens of NumPy arrays with `kept_tokens`. This function is the stage `PolicyStages.best_tokens`.

    Implements: PO-TOP-UNITS
    """
    kept = kept_tokens(*(torch.from_numpy(np.array(array)) for array in (values, shares, pinned)))
    offsets = np.append(0, kept.sum(dim=1).cumsum(dim=0).numpy())
    return Selection(kept.nonzero()[:, 1].numpy(), offsets)


def winners(values: Tensor, k: int) -> Tensor:
    """Return how many of the layer's k highest scores belong to each head, (h,).

    Implements: PO-ADAPTIVE-BUDGET
    """
    head = torch.argsort(-values.flatten(), stable=True)[:k] // values.shape[1]
    return torch.zeros_like(values[:, 0], dtype=torch.int64).scatter_add_(0, head, torch.ones_like(head))


def adaptive_shares(values: Tensor, free: int, pinned: int, safeguard: Fraction | int) -> Tensor:
    """Return Ada-KV's share of each head, (h,), from the scores (h, n) of a layer.

    The function divides `free` tokens among the heads and then adds `pinned` tokens for each head. The arithmetic uses
    integers, because all targets are multiples of 1 / (h * denominator of the safeguard).

    Implements: PO-ADAPTIVE-BUDGET, PO-WHOLE-SHARES
    """
    H, parts = len(values), safeguard.denominator * len(values)
    targets = (safeguard.denominator - safeguard.numerator) * H * winners(values, free) + safeguard.numerator * free
    floors, rest = targets // parts, targets % parts
    order = torch.argsort(-rest, stable=True)
    more = torch.arange(H, device=values.device) < free - floors.sum()
    return pinned + floors + torch.zeros_like(floors).scatter_(0, order, more.long())


def competition_shares(values: Tensor, free: int, pinned: int, safeguard: Fraction | int) -> Tensor:
    """Return the share of each head: first an equal quota, then one token for each of the highest remaining scores.

    The arguments have the same meaning as in `adaptive_shares`.

    Implements: PO-COMPETITION-BUDGET
    """
    H = len(values)
    quota = min(max(0, math.floor(safeguard * (free // H + pinned)) - pinned), free // H)
    return pinned + quota + winners(values.masked_fill(ranks(values) < quota, torch.nan), free - quota * H)
