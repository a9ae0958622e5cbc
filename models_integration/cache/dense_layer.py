"""Full-attention layers of a cache with eviction: the common base class, and the dense layer."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer

from models_integration.cache.positions import (
    EMPTY,
    Plan,
    SlotOffset,
    StoredRows,
    filled,
    gathered,
    select_columns,
    slots_of,
)
from models_integration.cache.renumbering import LayerNumbering, TurnedKeys
from spec.errors import SpecError

__all__ = ["DenseLayer", "IndexedLayer", "RetainedLayer", "SplicedTokens", "drop_tensors", "on_host"]


class SplicedTokens(NamedTuple):
    """Tokens of an archived chunk that one layer stores."""

    keys: Tensor
    """Keys and values, (heads, n, d)."""
    values: Tensor
    positions: Tensor
    """Absolute positions, (sets, n), for one set or one set per head. EMPTY marks a slot without a token."""


# DynamicLayer of transformers 5.24 returns the number of stored tokens as the number of tokens seen, and removes tokens
# only from the end (`crop`).
class RetainedLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # the base's __init_subclass__ is untyped
    """Base class of a full-attention layer from which tokens can be evicted.

    Each stored key has the RoPE rotation at which the model computed the key. New tokens are appended, so only
    compaction causes gaps.
    """

    rows: StoredRows
    """Positions of the slots, if all heads of a row share the positions."""
    numbering: LayerNumbering | None = None
    """Numbering of a cache with renumbered positions. If None, each key has the rotary position of the text."""
    turned: TurnedKeys | None = None
    """Turned keys of the last forward pass. A change of the stored tensors removes the turned keys."""

    @property
    @abstractmethod
    def heads(self) -> int:
        """Number of KV heads."""

    @property
    @abstractmethod
    def batch(self) -> int:
        """Number of rows of the batch."""

    @property
    @abstractmethod
    def stored_length(self) -> int:
        """Number of used slots of the head with the most tokens."""

    @property
    @abstractmethod
    def mean_length(self) -> float:
        """Mean number of used slots per KV head."""

    @property
    @abstractmethod
    def uniform(self) -> bool:
        """True if the default positions of transformers are correct: rows have no padding and store equal positions."""

    @abstractmethod
    def held(self, row: int, heads: slice) -> tuple[Tensor, Tensor]:
        """Return keys and values (heads, stored, d) of KV heads with equally many tokens, as views if possible."""

    @abstractmethod
    def next_positions(self, tokens: int) -> Tensor:
        """Return the positions of the next tokens, (rows, tokens), or (1, tokens) if all rows have equal positions."""

    @abstractmethod
    def stored_positions(self) -> Tensor:
        """Return the absolute positions of the slots, ascending, (rows, stored).

        Raises:
            SpecError: if heads store different positions. Use `head_positions` for a single head.
        """

    @abstractmethod
    def head_positions(self, row: int, head: int) -> Tensor:
        """Return the absolute positions that one KV head of one row stores, ascending."""

    @abstractmethod
    def expect(self, is_token: Tensor) -> None:
        """Record the mask of the next columns, (rows, n), which is True for tokens and False for padding."""

    def check_crop(self, tokens_to_remove: int) -> None:
        """Check that `crop` can remove these tokens.

        Raises:
            SpecError: if `tokens_to_remove` is not a number from -(tokens seen) to 0.
        """
        seen = self.get_seq_length()
        if not isinstance(tokens_to_remove, Integral) or tokens_to_remove > 0 or seen + tokens_to_remove < 0:
            raise SpecError("tokens_to_remove", tokens_to_remove, f"must lie in [-{seen}, 0]")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        self.batch_select_indices(torch.arange(self.batch, device="cpu").repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the rows with these indices."""
        rows = torch.arange(self.batch, device="cpu")[indices.cpu()]
        self.reorder_cache(cast(torch.LongTensor, rows))

    @abstractmethod
    def splice(self, chunks: Sequence[SplicedTokens], seen: int) -> None:
        """Append chunks to the only row. After the call, the session has seen `seen` tokens."""


class DenseLayer(RetainedLayer):  # type: ignore[no-untyped-call]  # the base's __init_subclass__ is untyped
    """A layer whose heads all store the same positions: keys and values are (rows, H_kv, stored, d), ascending.

    The logical length is the number of columns seen. The stored length is the number of slots.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)  # type: ignore[no-untyped-call]
        self.rows = StoredRows.none()
        self.evicted = 0
        """Number of columns seen minus number of slots."""

    @property
    def heads(self) -> int:
        """Number of KV heads."""
        assert self.keys is not None
        return self.keys.shape[1]

    @property
    def batch(self) -> int:
        """Number of rows of the batch."""
        assert self.keys is not None
        return len(self.keys)

    @property
    def stored_length(self) -> int:
        """Number of used slots."""
        return int(super().get_seq_length())

    @property
    def mean_length(self) -> float:
        """Mean number of used slots per KV head."""
        return self.stored_length

    def get_seq_length(self) -> int:
        """Return the number of columns seen. Without padding, this is the position of the next query."""
        return self.stored_length + self.evicted

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of slots after `query_length` more tokens, and the offset from slots to positions."""
        return self.stored_length + query_length, SlotOffset(self.evicted, self.rows)

    def stored_positions(self) -> Tensor:
        """Return the absolute positions of the slots, ascending, (rows, stored)."""
        return self.rows.positions(self.stored_length)

    def attended(self) -> tuple[Tensor, Tensor]:
        """Return keys and values (rows, H_kv, stored, d) with the keys at the positions of the next forward pass."""
        assert self.keys is not None
        assert self.values is not None
        if self.numbering is None:
            return self.keys, self.values
        both, slot = {"keys": self.keys, "values": self.values}, self.numbering.turn.slot
        turned = self._turned_slots(both[slot], self.numbering)
        if turned is not None:
            both[slot] = torch.cat([turned, both[slot][:, :, turned.shape[2] :]], dim=2)
        return both["keys"], both["values"]

    def _turned_slots(self, tensor: Tensor, numbering: LayerNumbering) -> Tensor | None:
        """Return the rotated keys of the first slots, (rows, H_kv, turned, d), or None if no key must be rotated."""
        if self.turned is None or not self.turned.is_valid(self.rows, numbering):
            stored = self.stored_positions()
            computed, assigned = numbering.numbering.moves(stored, self.rows.tokens(self.stored_length))
            width, turned = computed.shape[1], None
            if width:
                turned = numbering.turned(tensor[:, :, :width], computed[:, None], assigned[:, None])
            self.turned = TurnedKeys(self.rows, numbering, turned)
        return self.turned.keys

    def held(self, row: int, heads: slice) -> tuple[Tensor, Tensor]:
        """Return keys and values (heads, stored, d) of KV heads of one row, if possible as views."""
        keys, values = (tensor[row, heads] for tensor in self.attended())
        if bool((self.rows.kept != EMPTY).all()):
            return keys, values
        stored = self.stored_positions()
        is_stored = stored[row if len(stored) > 1 else 0] != EMPTY
        return select_columns(keys, is_stored), select_columns(values, is_stored)

    def head_positions(self, row: int, head: int) -> Tensor:
        """Return the absolute positions that one KV head of one row stores, ascending."""
        rows = self.stored_positions()
        positions = rows[row if len(rows) > 1 else 0]
        return positions[positions != EMPTY]

    @property
    def uniform(self) -> bool:
        """True if all rows store the same positions, and no row has seen padding."""
        rows = self.rows
        return rows.shared and int(rows.seen_at_compaction[0]) - rows.kept.shape[1] == self.evicted

    def next_positions(self, tokens: int) -> Tensor:
        """Return the positions of the next tokens, (rows, tokens), or (1, tokens) if all rows have equal positions."""
        return self.rows.tokens(self.stored_length)[:, None] + torch.arange(tokens, device="cpu")

    def expect(self, is_token: Tensor) -> None:
        """Record the mask of the next columns, (rows, n), which is True for tokens and False for padding."""
        self.rows = self.rows.grown(self.stored_length, is_token)

    def retain(self, *kept: Tensor) -> None:
        """Keep the positions (kept,) in each row, and evict all others. If one tensor is given, it applies to all rows.

        Implements: CC-COMPACT

        Raises:
            SpecError: if a position is not stored. The layer is unchanged.
        """
        self.follow(self.plan(*kept))

    def plan(self, *kept: Tensor, padding: Tensor | None = None) -> Plan:
        """Return the plan of a compaction. Layers that store the same positions can share the plan.

        Args:
            kept: positions to keep, (kept,): one tensor per row, or one tensor for all rows.
            padding: number of padding columns on the left of each row, (rows,), before the first compaction.

        Raises:
            SpecError: if a position is not stored.
        """
        rows = self.rows if padding is None else StoredRows.padded(padding)
        stored = rows.positions(self.stored_length)
        sources = [0] * len(kept) if rows.shared else range(len(stored))
        if len(kept) == 1:
            kept = kept * len(sources)
        slots = [slots_of(stored[source], positions) for source, positions in zip(sources, kept, strict=True)]
        # Empty slots on the left of a shorter row may stay. Empty slots between tokens (of padded turns) are freed.
        width = max(map(len, slots))
        stays = width == self.stored_length and torch.equal(filled(kept, width), stored.expand(len(kept), -1))
        after = rows.compacted(filled(kept, width), rows.tokens(self.stored_length))
        return Plan(self.rows, self.stored_length, () if stays else tuple(slots), after)

    def replace_tensors(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace each tensor that has slots, (rows, heads, stored, d)."""
        assert self.keys is not None
        assert self.values is not None
        self.keys, self.values, self.turned = change(self.keys), change(self.values), None

    def follow(self, plan: Plan) -> None:
        """Gather the slots that the plan keeps, if the plan frees slots."""
        seen = self.get_seq_length()
        if plan.slots:
            self.replace_tensors(lambda tensor: gathered(tensor, plan.slots))
        self.rows = plan.after
        self.evicted = seen - self.stored_length

    def splice(self, chunks: Sequence[SplicedTokens], seen: int) -> None:
        """Append chunks, with one set of positions each, to the only row. The session has then seen `seen` tokens."""
        positions = torch.cat([self.stored_positions()[0], *(chunk.positions[0] for chunk in chunks)])
        if chunks:
            keys, values = [chunk.keys[None] for chunk in chunks], [chunk.values[None] for chunk in chunks]
            if self.keys is None or self.values is None:
                self.lazy_initialization(keys[0], values[0])
            else:
                keys, values = [self.keys, *keys], [self.values, *values]
            self.keys, self.values = (torch.cat([part.to(parts[0]) for part in parts], -2) for parts in (keys, values))
        self.rows = StoredRows(positions[None], torch.tensor([seen], device="cpu"))
        self.evicted = seen - len(positions)

    def restore(self, keys: Tensor, values: Tensor, rows: StoredRows, evicted: int) -> None:
        """Set the contents to those of a saved layer: keys and values (rows, H_kv, stored, d), `rows` and `evicted`."""
        self.lazy_initialization(keys, values)
        self.keys, self.values, self.rows, self.evicted, self.turned = keys, values, rows, evicted, None

    def reset(self) -> None:
        """Remove all tokens."""
        drop_tensors(self)
        self.rows = StoredRows.none()
        self.evicted = 0

    def check_crop(self, tokens_to_remove: int) -> None:
        """Check that `crop` can remove these tokens.

        Raises:
            SpecError: as in `crop`.
        """
        super().check_crop(tokens_to_remove)
        later = self.stored_length - self.rows.kept.shape[1]
        if not self.uniform and -tokens_to_remove > later:
            raise SpecError(
                "tokens_to_remove", tokens_to_remove,
                f"must be at least -{later}, because the rows store different tokens",
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last -tokens_to_remove tokens that the layer has seen, whether stored or evicted.

        Raises:
            SpecError: if `tokens_to_remove` is not a number from -(tokens seen) to 0. If rows store different tokens,
                only tokens read since then can be removed.
        """
        self.check_crop(tokens_to_remove)
        if tokens_to_remove == 0:
            return
        remaining = self.get_seq_length() + tokens_to_remove
        if self.uniform:
            left = int((self.stored_positions() < remaining).sum())
            rows = StoredRows(self.rows.kept[:, :left], self.rows.seen_at_compaction.clamp(max=remaining))
        else:
            left, rows = self.stored_length + tokens_to_remove, self.rows
        self.replace_tensors(lambda tensor: tensor[:, :, :left])
        self.rows, self.evicted = rows, remaining - left

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace each row i by row beam_idx[i]."""
        super().reorder_cache(cast(torch.LongTensor, beam_idx))
        self.rows, self.turned = self.rows.select(beam_idx), None
        self._free_empty()

    def _free_empty(self) -> None:
        """Free the slots that only removed rows had filled. A single remaining row then has no empty slots."""
        filled_by_some = (self.rows.kept != EMPTY).any(dim=0)
        if bool(filled_by_some.all()):
            return
        later = torch.ones(self.stored_length - len(filled_by_some), dtype=torch.bool, device="cpu")
        slots = torch.nonzero(torch.cat([filled_by_some, later]))[:, 0]
        seen = self.get_seq_length()
        self.replace_tensors(lambda tensor: gathered(tensor, [slots]))
        self.rows = replace(self.rows, kept=self.rows.kept[:, filled_by_some])
        self.evicted = seen - self.stored_length


# Models of transformers 5.24 with an indexer call `update_indexer` of the layer, which DenseLayer does not have.
class IndexedLayer(DenseLayer, DynamicIndexedLayer):  # type: ignore[no-untyped-call]
    """A layer with an indexer: indexer keys (rows, stored, d) decide which tokens a query of the model attends to."""

    def replace_tensors(self, change: Callable[[Tensor], Tensor]) -> None:
        """Change keys, values and indexer keys. A layer that uses the indexer of another layer has no indexer keys."""
        super().replace_tensors(change)
        if self.indexer_keys is not None:
            self.indexer_keys = change(self.indexer_keys[:, None])[:, 0]

    def reset(self) -> None:
        """Remove all tokens."""
        super().reset()
        self.indexer_keys, self.is_indexer_initialized = None, False


def on_host(tensor: Tensor | None) -> Any:
    """Return a tensor as a NumPy array. Half precision becomes float32 without rounding."""
    if tensor is None:
        return None
    wide = tensor if tensor.dtype == torch.float64 else tensor.float()
    return wide.detach().cpu().numpy()


def drop_tensors(layer: Any) -> None:
    """Remove the keys and values of a layer, so that the layer is uninitialised."""
    # `CacheLayerMixin.reset` zeroes the tensors of an initialised layer in place (transformers 5.24). Caches may share
    # tensors, so the tensors are removed instead.
    layer.keys = layer.values = layer.turned = None
    layer.is_initialized = False
