"""The positions behind a cache's slots: absolute position is the only coordinate.

`transformers` builds masks from slot numbers: a cache layer hands it `kv_length` and `kv_offset`, and slot s stands
for position s + kv_offset. A compacted layer has gaps, so its `kv_offset` is a `SlotOffset`: the number that keeps
stored slots in every new query's past, and the stored rows for those who need the positions themselves.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spec.errors import SpecError

__all__ = ["EMPTY", "NO_HOLE", "LayersDiffer", "SlotOffset", "StoredRows"]

EMPTY = -1
"""The position of a slot that holds no token of its row."""
NO_HOLE = 2**62
"""Where a row has fewer holes than another."""


@dataclass(frozen=True)
class StoredRows:
    """The positions behind a cache layer's slots.

    Attributes:
        kept: positions that compaction kept, by slot, ascending in each row, (rows, k); EMPTY fills shorter rows on
            their left. One row may stand for all rows of the batch.
        marks: tokens that each row had seen by then, (rows,): the j-th slot after the kept ones holds marks + j.
        holes: columns of later segments that hold no token of a row, (rows, h), one row for all where there are none:
            each by the position of the row's next token, ascending, NO_HOLE behind those of rows with fewer.
    """

    kept: Tensor
    marks: Tensor
    holes: Tensor = torch.empty(1, 0, dtype=torch.int64)

    @classmethod
    def none(cls) -> "StoredRows":
        """Before any compaction: slots are positions."""
        return cls(torch.empty(1, 0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))

    @classmethod
    def padded(cls, padding: Tensor) -> "StoredRows":
        """Before any compaction, with `padding` (rows,) columns that hold no token left of each row's first."""
        width = int(padding.max())
        positions = torch.arange(width) - padding[:, None]
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
        return StoredRows(self.kept[chosen], self.marks[chosen], self.holes.expand(len(self.kept), -1)[chosen])

    def compacted(self, kept: Tensor, marks: Tensor) -> "StoredRows":
        """The same rows when they keep these positions (rows, k), and have seen `marks` (rows,) tokens."""
        return StoredRows(kept, marks.expand(len(kept)), self.holes.expand(len(kept), -1))

    def grown(self, slots: int, shown: Tensor) -> "StoredRows":
        """The same rows when columns of which `shown` (rows, n) hold a token of theirs are to follow `slots` slots."""
        rows = len(shown)
        seen = (self.marks + slots - self.kept.shape[1]).expand(rows)
        following = seen[:, None] + shown.cumsum(dim=1)
        kept = torch.cat([self.positions(slots).expand(rows, -1), torch.where(shown, following - 1, EMPTY)], dim=1)
        holes = torch.cat([self.holes.expand(rows, -1), torch.where(shown, NO_HOLE, following)], dim=1).sort(dim=1)
        most = int((holes.values != NO_HOLE).sum(dim=1).max())
        return StoredRows(kept, following[:, -1], holes.values[:, :most].contiguous())

    def positions(self, slots: int) -> Tensor:
        """Positions of the first `slots` slots, (rows, slots)."""
        later = torch.arange(slots - self.kept.shape[1], device=self.kept.device)
        return torch.cat([self.kept, self.marks[:, None] + later], dim=1)

    def columns(self, positions: Tensor, seen: int, tokens: Tensor) -> Tensor:
        """The columns of these positions (rows, k), of `seen` columns that hold `tokens` (rows,) tokens of each row."""
        if self.holes.shape[1] == 0:
            return positions + (seen - tokens)[:, None]
        before = torch.searchsorted(self.holes, positions, right=True)
        return positions + before + (seen - tokens - (self.holes != NO_HOLE).sum(dim=1))[:, None]

    def shown(self, seen: int, tokens: Tensor) -> Tensor:
        """Which of the `seen` columns hold one of the `tokens` (rows,) that each row has seen, (rows, seen)."""
        holes = self.holes.expand(len(tokens), -1) != NO_HOLE
        first = (seen - tokens - holes.sum(dim=1))[:, None]
        shown = torch.arange(seen) >= first
        row, at = torch.nonzero(holes, as_tuple=True)
        shown[row, self.holes.expand(len(tokens), -1)[row, at] + at + first[row, 0]] = False
        return shown


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
        if function not in (torch.Tensor.add, torch.Tensor.__add__) or kwargs or not isinstance(offset, cls):
            raise SpecError("kv_offset", int(offset), f"can be added to slot numbers, not used in {function}")
        if not offset.rows.shared:
            raise SpecError("past_key_values", "rows that differ", "can be read inside the context manager only")
        positions = offset.rows.positions(len(slots))[0]
        return positions.to(slots.device)


class LayersDiffer(int):
    """The `kv_offset` of a cache whose layers store different positions: each gets its mask when it attends."""
