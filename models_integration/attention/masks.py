"""Who sees whom in a compacted cache: decided by the positions of the stored tokens, never by their slots."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from transformers import masking_utils

from models_integration.cache.positions import EMPTY, LayersDiffer, SlotOffset, StoredRows
from spec.errors import SpecError

__all__ = ["AttentionFunction", "LayerMasks", "MaskFunction", "Pattern", "by_position", "chosen_alone", "retained_mask"]

Pattern: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(row, head, query, key) to visible, over broadcast index tensors: causal, sliding window, ..."""
MaskFunction: TypeAlias = Callable[..., Tensor | None]
"""What `AttentionMaskInterface` holds: builds one attention mask from sizes, offsets and a pattern."""

AttentionFunction: TypeAlias = Callable[..., tuple[Tensor, Tensor | None]]
"""What `AttentionInterface` holds."""

_CAUSAL = cast(Pattern, masking_utils.causal_mask_function)


@dataclass(frozen=True)
class LayerMasks:
    """Stands where a forward's one attention mask would, and makes the mask of each layer, or of one of its heads."""

    mask: MaskFunction
    sizes: Mapping[str, int]
    """batch_size, q_length and q_offset."""
    pattern: Pattern
    padding: Tensor | None
    options: Mapping[str, object]
    queries: slice | None = None
    """Of the forward, those whose masks are made; None: all."""

    def __getitem__(self, index: tuple[slice, ...]) -> "LayerMasks":
        """As a tensor (rows, heads, queries, slots) of which a model takes some queries."""
        return replace(self, queries=index[2])

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
        mask = self.mask(
            **sizes, kv_length=slots, kv_offset=SlotOffset(seen - slots, rows), mask_function=self.pattern,
            attention_mask=padding, **self.options,
        )
        return mask if mask is None or self.queries is None else mask[:, :, self.queries]


def chosen_alone(mask: Tensor, chosen: Tensor) -> Tensor:
    """A mask (rows, 1, queries, slots) that also hides the slots that an indexer has not chosen, (rows, queries, k).

    Models do so themselves if their attention is called sdpa or eager.
    """
    others = torch.ones_like(mask, dtype=torch.bool).scatter(-1, chosen[:, None].long(), False)
    return mask & ~others if mask.dtype == torch.bool else mask.masked_fill(others, torch.finfo(mask.dtype).min)


def by_position(
    pattern: Pattern, rows: StoredRows, seen: int, q_length: int, kv_length: int, padding: Tensor | None,
    device: torch.device | str,
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
    tokens = rows.tokens(kv_length)
    is_token = stored[:, kv_length - q_length :] != EMPTY
    # A query in a column without a token has no position, and no reader; it stands where the row's last token does.
    queries = tokens[:, None] - is_token.sum(dim=1, keepdim=True) + is_token.cumsum(dim=1) - 1
    columns = rows.columns(stored, seen + q_length, tokens).clamp(min=0)
    stored, queries, columns = (one.to(device, non_blocking=True) for one in (stored, queries, columns))

    def visible(row: Tensor, head: Tensor, query: Tensor, slot: Tensor) -> Tensor:
        stored_row = torch.zeros_like(row) if rows.shared else row
        key = stored[stored_row, slot]
        seen_by = pattern(row, head, queries[stored_row, query], key) & (key != EMPTY)
        if padding is None:
            return seen_by
        return seen_by & padding[row, columns[stored_row, slot]]

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
