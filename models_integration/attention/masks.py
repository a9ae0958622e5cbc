"""Attention masks for a compacted cache. Visibility depends on the positions of stored tokens, not on slots."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from transformers import masking_utils

from models_integration.cache.positions import EMPTY, LayersDiffer, SlotOffset, StoredRows
from spec.errors import SpecError

__all__ = ["AttentionFunction", "LayerMasks", "MaskFunction", "Pattern", "by_position", "chosen_alone", "retained_mask"]

Pattern: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Function from broadcast index tensors (row, head, query, key) to visibility: causal, sliding window, ..."""
MaskFunction: TypeAlias = Callable[..., Tensor | None]
"""Function type in `AttentionMaskInterface`: builds one attention mask from sizes, offsets and a pattern."""

AttentionFunction: TypeAlias = Callable[..., tuple[Tensor, Tensor | None]]
"""Function type in `AttentionInterface`."""

_CAUSAL = cast(Pattern, masking_utils.causal_mask_function)


@dataclass(frozen=True)
class LayerMasks:
    """Placeholder for the single attention mask of a forward pass. It makes a separate mask for each layer or head."""

    mask: MaskFunction
    sizes: Mapping[str, int]
    """The numbers batch_size, q_length and q_offset of the forward pass."""
    pattern: Pattern
    padding: Tensor | None
    options: Mapping[str, object]
    queries: slice | None = None
    """Queries of the forward pass for which masks are made. None means all queries."""

    def __getitem__(self, index: tuple[slice, ...]) -> "LayerMasks":
        """Return the placeholder for some queries, indexed like a mask tensor (rows, heads, queries, slots)."""
        return replace(self, queries=index[2])

    @cached_property
    def plain(self) -> bool:
        """True if each query attends to all tokens stored before the query. Computed once per forward pass."""
        return self.pattern is _CAUSAL and (self.padding is None or bool(self.padding.all()))

    def of(self, rows: StoredRows, slots: int, seen: int, row: int | None = None) -> Tensor | None:
        """Return the mask over `slots` slots of these rows, or None if all slots are visible.

        Args:
            rows: positions of the slots.
            slots: number of slots, including the slots of the queries.
            seen: number of columns seen, including the columns of the queries.
            row: row of the batch to which `rows` belongs. None means all rows.
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
    """Hide all slots that an indexer did not choose, (rows, queries, k), in a mask (rows, 1, queries, slots).

    Models hide these slots themselves only if the name of their attention is "sdpa" or "eager".
    """
    others = torch.ones_like(mask, dtype=torch.bool).scatter(-1, chosen[:, None].long(), False)
    return mask & ~others if mask.dtype == torch.bool else mask.masked_fill(others, torch.finfo(mask.dtype).min)


def by_position(
    pattern: Pattern, rows: StoredRows, seen: int, q_length: int, kv_length: int, padding: Tensor | None,
    device: torch.device | str,
) -> Pattern:
    """Return the pattern over slots. Queries are numbered from 0, keys by slot. Both numbers are mapped to positions.

    Args:
        pattern: visibility as a function of positions.
        rows: stored rows of the layer. The last `q_length` slots contain the keys of the queries.
        seen: number of columns seen before this forward pass, including padding.
        q_length: number of queries in this forward pass.
        kv_length: number of slots, including the keys of the queries.
        padding: mask (batch, seen + q_length) that is True for tokens, or None.
        device: device of the index tensors.

    Raises:
        SpecError: if `padding` does not cover all columns. A shorter mask would silently hide the new tokens.
    """
    if padding is not None and padding.shape[1] != seen + q_length:
        raise SpecError("attention_mask", tuple(padding.shape), f"must cover the {seen + q_length} tokens seen so far")
    stored = rows.positions(kv_length)
    tokens = rows.tokens(kv_length)
    is_token = stored[:, kv_length - q_length :] != EMPTY
    # A query in a padding column has no position, and its result is unused. It has the position of the last token.
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
    """Return the mask function to register: `stock`, but with visibility by stored positions.

    The mask function supports gaps, rows with different numbers of tokens, and sliding windows over positions. If slots
    equal positions, or if a single query attends to all stored tokens, `stock` is called unchanged. The fast paths for
    a cache without evictions therefore remain.
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
        # Queries are numbered from 0 here, so the test of `stock` for a plain causal mask would give a wrong result.
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
