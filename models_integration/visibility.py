"""Who sees whom in a compacted cache: decided by the positions of the stored tokens, never by their slots.

`transformers` builds masks from slot numbers: a cache layer hands it `kv_length` and `kv_offset`, and slot s stands
for position s + kv_offset. A compacted layer has gaps, so its `kv_offset` is a `SlotOffset`: the number that keeps
stored slots in every new query's past, and the stored rows for those who need the positions themselves.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from transformers import masking_utils

from spec.errors import SpecError

__all__ = [
    "EMPTY", "AttentionFunction", "LayerMasks", "LayersDiffer", "MaskFunction", "Pattern", "SlotOffset", "StoredRows",
    "by_position", "retained_mask",
]

Pattern: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(row, head, query, key) to visible, over broadcast index tensors: causal, sliding window, ..."""
MaskFunction: TypeAlias = Callable[..., Tensor | None]
"""What `AttentionMaskInterface` holds: builds one attention mask from sizes, offsets and a pattern."""

AttentionFunction: TypeAlias = Callable[..., tuple[Tensor, Tensor | None]]
"""What `AttentionInterface` holds."""

_CAUSAL = cast(Pattern, masking_utils.causal_mask_function)

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


@dataclass(frozen=True)
class LayerMasks:
    """Stands where a forward's one attention mask would, and makes the mask of each layer, or of one of its heads."""

    mask: MaskFunction
    sizes: Mapping[str, int]
    """batch_size, q_length and q_offset."""
    pattern: Pattern
    padding: Tensor | None
    options: Mapping[str, Any]

    @property
    def plain(self) -> bool:
        """Whether a query sees all that is stored before it."""
        return self.pattern is _CAUSAL and (self.padding is None or bool(self.padding.all()))

    def of(self, rows: StoredRows, slots: int, seen: int, row: int | None = None) -> Tensor | None:
        """The mask over `slots` slots of these rows; None where all of them are visible.

        Args:
            rows: positions behind the slots.
            slots: how many there are, the queries' own included.
            seen: columns, the queries' own included.
            row: the row of the batch that `rows` is about; None where it is about all.
        """
        if self.sizes["q_length"] == 1 and rows.shared and self.plain:
            return None
        sizes, padding = dict(self.sizes), self.padding
        if row is not None:
            sizes["batch_size"], padding = 1, None if padding is None else padding[row : row + 1]
        return self.mask(
            **sizes, kv_length=slots, kv_offset=SlotOffset(seen - slots, rows), mask_function=self.pattern,
            attention_mask=padding, **self.options,
        )


def by_position(
    pattern: Pattern, rows: StoredRows, seen: int, q_length: int, kv_length: int, padding: Tensor | None, device: Any,
) -> Pattern:
    """The same pattern over slots: queries are numbered from 0, keys by slot; both are looked up as positions.

    Args:
        pattern: visibility over positions.
        rows: the layer's stored rows; the queries' own keys are its last `q_length` slots.
        seen: columns seen before this forward, padding included.
        q_length: queries of this forward.
        kv_length: slots, the queries' own keys included.
        padding: True where a column holds a token, (batch, seen + q_length), or None.
        device: where the indices are.

    Raises:
        SpecError: when `padding` does not cover all columns; a short one would silently hide the new tokens.
    """
    if padding is not None and padding.shape[1] != seen + q_length:
        raise SpecError("attention_mask", tuple(padding.shape), f"must cover the {seen + q_length} tokens seen so far")
    stored = rows.positions(kv_length)
    tokens = rows.marks + kv_length - rows.kept.shape[1]
    own = stored[:, kv_length - q_length :] != EMPTY
    # A query in a column without a token has no position, and no reader; it stands where the row's last token does.
    at = tokens[:, None] - own.sum(dim=1, keepdim=True) + own.cumsum(dim=1) - 1
    columns = rows.columns(stored, seen + q_length, tokens).clamp(min=0)
    stored, at, columns = stored.to(device), at.to(device), columns.to(device)

    def visible(row: Tensor, head: Tensor, query: Tensor, slot: Tensor) -> Tensor:
        of = torch.zeros_like(row) if rows.shared else row
        key = stored[of, slot]
        seen_by = pattern(row, head, at[of, query], key) & (key != EMPTY)
        if padding is None:
            return seen_by
        return seen_by & padding[row, columns[of, slot]]

    return visible


def retained_mask(stock: MaskFunction) -> MaskFunction:
    """The registered mask function: `stock`, with visibility decided by stored positions.

    Serves gaps, rows with different counts and sliding windows over positions. Where slots and positions agree, or
    one query sees all that is stored, it is `stock` itself, so that an uncompacted cache loses no fast path.
    """

    def mask(
        batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, kv_offset: int = 0,
        mask_function: Pattern = _CAUSAL, attention_mask: Tensor | None = None, **options: Any,
    ) -> Any:
        if isinstance(kv_offset, LayersDiffer):
            forward = {"batch_size": batch_size, "q_length": q_length, "q_offset": q_offset}
            return LayerMasks(mask, forward, mask_function, attention_mask, options)
        sizes = {"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length}
        if not isinstance(kv_offset, SlotOffset) or _stock_is_right(
            kv_offset, q_length, mask_function, attention_mask
        ):
            return stock(
                **sizes, q_offset=q_offset, kv_offset=int(kv_offset), mask_function=mask_function,
                attention_mask=attention_mask, **options,
            )
        pattern = by_position(
            mask_function, kv_offset.rows, q_offset, q_length, kv_length, attention_mask, options.get("device", "cpu")
        )
        # The queries' numbers start at 0 here, so stock's test for a plain causal mask would misfire.
        options["allow_is_causal_skip"] = False
        return stock(**sizes, mask_function=pattern, **options)

    return mask


def _stock_is_right(offset: SlotOffset, q_length: int, pattern: Pattern, padding: Tensor | None) -> bool:
    if not offset.rows.shared:
        return False
    if offset == 0:
        return True
    unpadded = padding is None or bool(padding.all())
    return q_length == 1 and pattern is _CAUSAL and unpadded
