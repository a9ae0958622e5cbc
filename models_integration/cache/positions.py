"""The positions behind a cache's slots: absolute position is the only coordinate.

`transformers` builds masks from slot numbers: a cache layer hands it `kv_length` and `kv_offset`, and slot s stands
for position s + kv_offset. A compacted layer has gaps, so its `kv_offset` is a `SlotOffset`: the number that keeps
stored slots in every new query's past, and the stored rows for those who need the positions themselves.

A position becomes a slot in one place, `slots_of`: what a compaction gathers is worked out before it gathers anything.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spec.errors import SpecError

__all__ = [
    "EMPTY", "NO_HOLE", "LayersDiffer", "Plan", "SlotOffset", "StoredRows", "chosen_rows", "filled", "gathered",
    "shown_columns", "slots_of",
]

EMPTY = -1
"""The position of a slot that holds no token of its row."""
NO_HOLE = 2**62
"""Where a row has fewer holes than another."""
# Slots of an average run from which on copies of runs are quicker than a gather slot by slot.
_LONG_RUN = 64


@dataclass(frozen=True)
class StoredRows:
    """The positions behind a cache layer's slots.

    Attributes:
        kept: positions that compaction kept, by slot, ascending in each row, (rows, k); EMPTY fills shorter rows on
            their left. One row may stand for all rows of the batch.
        seen_at_compaction: tokens that each row had seen by then, (rows,): the j-th slot after the kept ones holds
            position seen_at_compaction + j.
        holes: columns of later segments that hold no token of a row, (rows, h), one row for all where there are none:
            each by the position of the row's next token, ascending, NO_HOLE behind those of rows with fewer.
    """

    kept: Tensor
    seen_at_compaction: Tensor
    holes: Tensor = torch.empty(1, 0, dtype=torch.int64, device="cpu")

    @classmethod
    def none(cls) -> "StoredRows":
        """Before any compaction: slots are positions."""
        return cls(torch.empty(1, 0, dtype=torch.int64, device="cpu"), torch.zeros(1, dtype=torch.int64, device="cpu"))

    @classmethod
    def padded(cls, padding: Tensor) -> "StoredRows":
        """Before any compaction, with `padding` (rows,) columns that hold no token left of each row's first."""
        width = int(padding.max())
        positions = torch.arange(width, device="cpu") - padding[:, None]
        return cls(positions.clamp(min=EMPTY), width - padding)

    @property
    def shared(self) -> bool:
        """Whether all rows of the batch store the same positions."""
        return len(self.kept) == 1

    def select(self, rows: Tensor) -> "StoredRows":
        """The same for other rows of the batch, by index."""
        chosen = rows.to(self.kept.device)
        if self.shared:
            return self
        holes = self.holes.expand(len(self.kept), -1)
        return StoredRows(self.kept[chosen], self.seen_at_compaction[chosen], holes[chosen])

    def compacted(self, kept: Tensor, seen: Tensor) -> "StoredRows":
        """The same rows when they keep these positions (rows, k), and have seen so many tokens (rows,)."""
        # A view would be copied, with a warning of torch, in each search of `columns`.
        holes = self.holes.expand(len(kept), -1).contiguous()
        return StoredRows(kept, seen.expand(len(kept)), holes)

    def grown(self, slots: int, is_token: Tensor) -> "StoredRows":
        """The same rows when columns are to follow `slots` slots; `is_token` (rows, n): those with a token of a row."""
        rows = len(is_token)
        following = self.tokens(slots).expand(rows)[:, None] + is_token.cumsum(dim=1)
        kept = torch.cat([self.positions(slots).expand(rows, -1), torch.where(is_token, following - 1, EMPTY)], dim=1)
        holes = torch.cat([self.holes.expand(rows, -1), torch.where(is_token, NO_HOLE, following)], dim=1).sort(dim=1)
        most = int((holes.values != NO_HOLE).sum(dim=1).max())
        return StoredRows(kept, following[:, -1], holes.values[:, :most].contiguous())

    def positions(self, slots: int) -> Tensor:
        """Positions of the first `slots` slots, (rows, slots)."""
        later = torch.arange(slots - self.kept.shape[1], device=self.kept.device)
        return torch.cat([self.kept, self.seen_at_compaction[:, None] + later], dim=1)

    def tokens(self, slots: int) -> Tensor:
        """Tokens that each row has seen once it fills `slots` slots, (rows,): the position of its next token."""
        return self.seen_at_compaction + (slots - self.kept.shape[1])

    def columns(self, positions: Tensor, seen: int, tokens: Tensor) -> Tensor:
        """The columns of these positions (rows, k), of `seen` columns that hold `tokens` (rows,) tokens of each row."""
        if self.holes.shape[1] == 0:
            return positions + (seen - tokens)[:, None]
        before = torch.searchsorted(self.holes, positions, right=True)
        return positions + before + (seen - tokens - (self.holes != NO_HOLE).sum(dim=1))[:, None]

    def is_token(self, seen: int, tokens: Tensor) -> Tensor:
        """Which of the `seen` columns hold one of the `tokens` (rows,) that each row has seen, (rows, seen)."""
        positions = self.holes.expand(len(tokens), -1)
        holes = positions != NO_HOLE
        first = (seen - tokens - holes.sum(dim=1))[:, None]
        is_token = torch.arange(seen, device="cpu") >= first
        row, ordinal = torch.nonzero(holes, as_tuple=True)
        is_token[row, positions[row, ordinal] + ordinal + first[row, 0]] = False
        return is_token


class SlotOffset(int):
    """Tokens seen minus slots used: the `kv_offset` of a compacted layer, which knows the positions behind it."""

    rows: StoredRows

    def __new__(cls, offset: int, rows: StoredRows) -> "SlotOffset":
        made = super().__new__(cls, offset)
        made.rows = rows
        return made

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Tensor:
        """Slot numbers plus the offset: the positions of those slots.

        The mask functions of `transformers` form this sum wherever they need positions, so that they are right
        about a compacted cache even where ours is not registered: outside the context manager.
        """
        slots, offset = args
        if slots.dim() == 0:
            reason = "cannot read an evicted cache: type model.set_attn_implementation('sdpa')"
            raise SpecError("attn_implementation", "flex_attention", reason)
        if function not in (torch.Tensor.add, torch.Tensor.__add__) or kwargs or not isinstance(offset, cls):
            raise SpecError("kv_offset", int(offset), f"can be added to slot numbers, not used in {function}")
        if not offset.rows.shared:
            raise SpecError("past_key_values", "rows that differ", "can be read only inside `with policy(model)`")
        positions = offset.rows.positions(len(slots))[0]
        return positions.to(slots.device)


class LayersDiffer(int):
    """The `kv_offset` of a cache whose layers store different positions: each gets its mask when it attends."""


def slots_of(stored: Tensor, wanted: Tensor) -> Tensor:
    """Slots that hold the `wanted` positions; the only place where a position becomes a slot.

    Args:
        stored: the positions behind the slots, ascending but for empty ones, (stored,).
        wanted: positions, ascending, (kept,).

    Raises:
        SpecError: when a wanted position is not stored.
    """
    held, sought = stored.numpy(), wanted.numpy()
    at = np.searchsorted(held, sought)
    # Without empty slots inside: what holds a wanted position is its slot, however it was found.
    if (at < len(held)).all() and np.array_equal(held[at], sought):
        return torch.from_numpy(at)
    full = np.flatnonzero(held != EMPTY)
    at = np.searchsorted(held[full], sought)
    found = at < len(full)
    found[found] = held[full[at[found]]] == sought[found]
    if not found.all():
        raise SpecError("positions", sought[~found].tolist(), f"must be among the {len(stored)} stored positions")
    return torch.from_numpy(full[at])


def chosen_rows(argument: str, indices: Tensor, batch: int) -> Tensor:
    """The rows of a batch that an index or a mask (n,) means, (rows,), counted from 0.

    Raises:
        SpecError: for a row that is not there, or none at all.
    """
    try:
        rows = torch.arange(batch, device="cpu")[indices.cpu()]
    except IndexError:
        rows = torch.empty(0, device="cpu")
    if indices.ndim != 1 or len(rows) == 0:
        raise SpecError(argument, indices.tolist(), f"must name rows of the cache, in [0, {batch})")
    return rows


@dataclass(frozen=True)
class Plan:
    """One compaction, worked out once for all layers that store the same positions.

    Attributes:
        before: the rows that it is about.
        length: slots in use.
        slots: those that stay, for each row or for all; empty where nothing goes.
        after: the rows that it leads to.
    """

    before: StoredRows
    length: int
    slots: tuple[Tensor, ...]
    after: StoredRows

    def fits(self, rows: StoredRows, length: int) -> bool:
        """Whether a layer with these rows and slots stores what the plan is about."""
        if length != self.length:
            return False
        # Layers that followed one plan before hold the very rows of it.
        before = self.before
        return rows is before or (
            torch.equal(rows.kept, before.kept) and torch.equal(rows.seen_at_compaction, before.seen_at_compaction)
        )


def gathered(tensor: Tensor, slots: Sequence[Tensor]) -> Tensor:
    """Each row's slots, (rows, H_kv, longest, d), ends aligned; copies, as a view would keep evicted tokens alive."""
    if len(slots) == 1:
        return _taken(tensor, slots[0])
    # Zeros, and not any memory: a masked NaN would still spoil the sum over values.
    out = tensor.new_zeros(len(slots), tensor.shape[1], max(map(len, slots)), tensor.shape[3])
    for row, row_slots in enumerate(slots):
        out[row, :, out.shape[2] - len(row_slots) :] = _taken(tensor[row], row_slots)
    return out


def _taken(tensor: Tensor, slots: Tensor) -> Tensor:
    """These slots of (..., stored, d): a breath leaves long runs, which are copied whole."""
    ends = np.flatnonzero(np.diff(slots.numpy()) != 1) + 1
    if len(slots) < _LONG_RUN * (len(ends) + 1):
        return tensor.index_select(-2, slots.to(tensor.device, non_blocking=True))
    cuts = [0, *ends.tolist(), len(slots)]
    firsts = slots[cuts[:-1]].tolist()
    runs = zip(firsts, np.diff(cuts).tolist(), strict=True)
    return torch.cat([tensor.narrow(-2, first, length) for first, length in runs], dim=-2)


def filled(kept: Sequence[Tensor], width: int) -> Tensor:
    """Positions by slot, (rows, width), EMPTY on the left of shorter rows."""
    rows = torch.full((len(kept), width), EMPTY, device="cpu")
    for row, positions in enumerate(kept):
        rows[row, width - len(positions) :] = positions
    return rows


def shown_columns(tensor: Tensor, shown: Tensor | None) -> Tensor:
    """What (heads, columns, d) holds where `shown`; a view where that is all from one column on."""
    if shown is None or bool(shown.all()):
        return tensor
    at = torch.nonzero(shown)[:, 0]
    first = tensor.shape[1] - len(at)
    if len(at) and int(at[0]) == first:
        return tensor[:, first:]
    return tensor.index_select(1, at.to(tensor.device, non_blocking=True))
