"""Absolute positions of the tokens in a cache's slots.

`transformers` makes masks from slot numbers. A cache layer returns `kv_length` and `kv_offset`, and slot s has the
position s + kv_offset. A compacted layer has gaps, so the layer returns a `SlotOffset` as `kv_offset`. This number
makes all stored slots visible to new queries, and has the positions of the slots as an attribute.

Only `slots_of` converts positions to slots. A compaction computes all slots before it changes a tensor.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spec.errors import SpecError

__all__ = [
    "EMPTY", "NO_HOLE", "LayersDiffer", "Plan", "SlotOffset", "StoredRows", "check_row_count", "chosen_rows", "filled",
    "gathered", "select_columns", "slots_of",
]

EMPTY = -1
"""Position of a slot that contains no token of the row."""
NO_HOLE = 2**62
"""Entry after the last hole of a row with fewer holes than a different row."""
# If runs have at least this number of slots on average, copying runs is faster than gathering slots.
_LONG_RUN = 64


@dataclass(frozen=True)
class StoredRows:
    """Positions of a cache layer's slots.

    Attributes:
        kept: positions kept by compaction, by slot, ascending in each row, (rows, k). Shorter rows have EMPTY on the
            left. A single row applies to all rows of the batch.
        seen_at_compaction: number of tokens that each row had seen at the compaction, (rows,). The j-th slot after the
            kept slots has the position seen_at_compaction + j.
        holes: padding columns of later segments, (rows, h), or (1, 0) if there is none. A column is represented by the
            position of the next token of the row, ascending. Rows with fewer holes end with NO_HOLE.
    """

    kept: Tensor
    seen_at_compaction: Tensor
    holes: Tensor = torch.empty(1, 0, dtype=torch.int64, device="cpu")

    @classmethod
    def none(cls) -> "StoredRows":
        """Return the rows before any compaction: slot numbers equal positions."""
        return cls(torch.empty(1, 0, dtype=torch.int64, device="cpu"), torch.zeros(1, dtype=torch.int64, device="cpu"))

    @classmethod
    def padded(cls, padding: Tensor) -> "StoredRows":
        """Return the rows before any compaction, with `padding` (rows,) columns of padding on the left of each row."""
        width = int(padding.max())
        positions = torch.arange(width, device="cpu") - padding[:, None]
        return cls(positions.clamp(min=EMPTY), width - padding)

    @property
    def shared(self) -> bool:
        """True if all rows of the batch store the same positions."""
        return len(self.kept) == 1

    def select(self, rows: Tensor) -> "StoredRows":
        """Return the positions of the rows of the batch with these indices."""
        chosen = rows.to(self.kept.device)
        if self.shared:
            return self
        holes = self.holes.expand(len(self.kept), -1)
        return StoredRows(self.kept[chosen], self.seen_at_compaction[chosen], holes[chosen])

    def compacted(self, kept: Tensor, seen: Tensor) -> "StoredRows":
        """Return the rows after a compaction to the positions `kept` (rows, k), at `seen` (rows,) tokens seen."""
        # With a view, each search in `columns` would copy the view, and torch would warn.
        holes = self.holes.expand(len(kept), -1).contiguous()
        return StoredRows(kept, seen.expand(len(kept)), holes)

    def grown(self, slots: int, is_token: Tensor) -> "StoredRows":
        """Return the rows for new columns after `slots` slots. `is_token` (rows, n) is True for tokens."""
        rows = len(is_token)
        following = self.tokens(slots).expand(rows)[:, None] + is_token.cumsum(dim=1)
        kept = torch.cat([self.positions(slots).expand(rows, -1), torch.where(is_token, following - 1, EMPTY)], dim=1)
        holes = torch.cat([self.holes.expand(rows, -1), torch.where(is_token, NO_HOLE, following)], dim=1).sort(dim=1)
        most = int((holes.values != NO_HOLE).sum(dim=1).max())
        return StoredRows(kept, following[:, -1], holes.values[:, :most].contiguous())

    def positions(self, slots: int) -> Tensor:
        """Return the positions of the first `slots` slots, (rows, slots)."""
        later = torch.arange(slots - self.kept.shape[1], device=self.kept.device)
        return torch.cat([self.kept, self.seen_at_compaction[:, None] + later], dim=1)

    def tokens(self, slots: int) -> Tensor:
        """Return the position of each row's next token, (rows,), after `slots` slots are filled."""
        return self.seen_at_compaction + (slots - self.kept.shape[1])

    def columns(self, positions: Tensor, seen: int, tokens: Tensor) -> Tensor:
        """Return the columns of the positions (rows, k). `seen` columns contain `tokens` (rows,) tokens of each row."""
        if self.holes.shape[1] == 0:
            return positions + (seen - tokens)[:, None]
        before = torch.searchsorted(self.holes, positions, right=True)
        return positions + before + (seen - tokens - (self.holes != NO_HOLE).sum(dim=1))[:, None]

    def is_token(self, seen: int, tokens: Tensor) -> Tensor:
        """Return a mask (rows, seen) that is True for the columns with the `tokens` (rows,) tokens of each row."""
        positions = self.holes.expand(len(tokens), -1)
        holes = positions != NO_HOLE
        first = (seen - tokens - holes.sum(dim=1))[:, None]
        is_token = torch.arange(seen, device="cpu") >= first
        row, ordinal = torch.nonzero(holes, as_tuple=True)
        is_token[row, positions[row, ordinal] + ordinal + first[row, 0]] = False
        return is_token


class SlotOffset(int):
    """The `kv_offset` of a compacted layer (tokens seen minus used slots), with the positions of the slots."""

    rows: StoredRows

    def __new__(cls, offset: int, rows: StoredRows) -> "SlotOffset":
        instance = super().__new__(cls, offset)
        instance.rows = rows
        return instance

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Tensor:
        """Return the positions of slots for the sum of slot numbers and the offset.

        The mask functions of `transformers` compute this sum if they need positions. Their masks are therefore correct
        for a compacted cache outside the context manager too. There, kvspec's mask function is not registered.
        """
        slots, offset = args
        if slots.dim() == 0:
            reason = "cannot read an evicted cache: type model.set_attn_implementation('sdpa')"
            raise SpecError("attn_implementation", "flex_attention", reason)
        if function not in (torch.Tensor.add, torch.Tensor.__add__) or kwargs or not isinstance(offset, cls):
            raise SpecError("kv_offset", int(offset), f"can be added to slot numbers, not used in {function}")
        if not offset.rows.shared:
            raise SpecError("past_key_values", "rows that differ", "can be used only inside `with policy(model)`")
        positions = offset.rows.positions(len(slots))[0]
        return positions.to(slots.device)


class LayersDiffer(int):
    """The `kv_offset` of a cache whose layers store different positions. Each layer makes a mask when it attends."""


def slots_of(stored: Tensor, wanted: Tensor) -> Tensor:
    """Return the slots that contain the `wanted` positions. Only this function converts positions to slots.

    Args:
        stored: positions of the slots, (stored,), ascending except for empty slots.
        wanted: positions to find, ascending, (kept,).

    Raises:
        SpecError: if a wanted position is not stored.
    """
    held, sought = stored.numpy(), wanted.numpy()
    at = np.searchsorted(held, sought)
    # If the binary search finds all wanted positions, the slots are right, even if empty slots break the order.
    if (at < len(held)).all() and np.array_equal(held[at], sought):
        return torch.from_numpy(at)
    full = np.flatnonzero(held != EMPTY)
    at = np.searchsorted(held[full], sought)
    is_stored = at < len(full)
    is_stored[is_stored] = held[full[at[is_stored]]] == sought[is_stored]
    if not is_stored.all():
        raise SpecError("positions", sought[~is_stored].tolist(), f"must be among the {len(stored)} stored positions")
    return torch.from_numpy(full[at])


def check_row_count(rows: int, shape: tuple[int, ...]) -> None:
    """Check that new tokens of this shape, (rows, n), have as many rows as a cache.

    Raises:
        SpecError: if the numbers of rows differ.
    """
    if shape[0] != rows:
        reason = f"must have {rows} row{'s' * (rows > 1)}, like the cache"
        if shape[0] % rows == 0:
            call = f"cache.batch_repeat_interleave({shape[0] // rows})"
            reason += f": for beams, answers or questions of one prefix, first type {call}"
        raise SpecError("input_ids", shape, reason)


def chosen_rows(argument: str, indices: Tensor, batch: int) -> Tensor:
    """Return the rows of a batch that an index or a mask (n,) selects, (rows,), counted from 0.

    Raises:
        SpecError: if a row does not exist, or if no row is selected.
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
    """Plan of one compaction, shared by all layers that store the same positions.

    Attributes:
        before: stored rows before the compaction.
        length: number of used slots before the compaction.
        slots: slots that are kept, for each row or for all rows. Empty if no slot is freed.
        after: stored rows after the compaction.
    """

    before: StoredRows
    length: int
    slots: tuple[Tensor, ...]
    after: StoredRows

    def fits(self, rows: StoredRows, length: int) -> bool:
        """Return True if a layer with these rows and slots stores the positions for which the plan was made."""
        if length != self.length:
            return False
        # Layers that followed the same earlier plan have the same `rows` object.
        before = self.before
        return rows is before or (
            torch.equal(rows.kept, before.kept) and torch.equal(rows.seen_at_compaction, before.seen_at_compaction)
        )


def gathered(tensor: Tensor, slots: Sequence[Tensor]) -> Tensor:
    """Return a copy of each row's slots, (rows, H_kv, longest, d), aligned right. A view would not free memory."""
    if len(slots) == 1:
        return _taken(tensor, slots[0])
    # The memory is zeroed, because a masked NaN would still make the sum over values NaN.
    out = tensor.new_zeros(len(slots), tensor.shape[1], max(map(len, slots)), tensor.shape[3])
    for row, row_slots in enumerate(slots):
        out[row, :, out.shape[2] - len(row_slots) :] = _taken(tensor[row], row_slots)
    return out


def _taken(tensor: Tensor, slots: Tensor) -> Tensor:
    """Return the slots of a tensor (..., stored, d). Long runs of slots, as after a breath, are copied as a whole."""
    ends = np.flatnonzero(np.diff(slots.numpy()) != 1) + 1
    if len(slots) < _LONG_RUN * (len(ends) + 1):
        return tensor.index_select(-2, slots.to(tensor.device, non_blocking=True))
    cuts = [0, *ends.tolist(), len(slots)]
    firsts = slots[cuts[:-1]].tolist()
    runs = zip(firsts, np.diff(cuts).tolist(), strict=True)
    return torch.cat([tensor.narrow(-2, first, length) for first, length in runs], dim=-2)


def filled(kept: Sequence[Tensor], width: int) -> Tensor:
    """Return positions by slot, (rows, width), with EMPTY on the left of shorter rows."""
    rows = torch.full((len(kept), width), EMPTY, device="cpu")
    for row, positions in enumerate(kept):
        rows[row, width - len(positions) :] = positions
    return rows


def select_columns(tensor: Tensor, shown: Tensor | None) -> Tensor:
    """Return the columns of (heads, columns, d) for which `shown` is True, as a view if these are the last columns."""
    if shown is None or bool(shown.all()):
        return tensor
    at = torch.nonzero(shown)[:, 0]
    first = tensor.shape[1] - len(at)
    if len(at) and int(at[0]) == first:
        return tensor[:, first:]
    return tensor.index_select(1, at.to(tensor.device, non_blocking=True))
