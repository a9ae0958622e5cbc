"""The full-attention layers of a cache that forgets: what all of them say, and the one that is a rectangle of slots."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
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
    shown_columns,
    slots_of,
)
from spec.errors import SpecError

__all__ = ["DenseLayer", "IndexedLayer", "RetainedLayer", "SplicedTokens", "drop_tensors", "on_host"]


class SplicedTokens(NamedTuple):
    """What one layer stores of a chunk that was computed elsewhere."""

    keys: Tensor
    """(heads, n, d)."""
    values: Tensor
    positions: Tensor
    """Absolute positions, (sets, n), one set or one for each head; EMPTY where a head stores none."""


class RetainedLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # the base's __init_subclass__ is untyped
    """One full-attention layer of a cache that forgets, however it stores what is kept.

    Keys keep the rotation of their own position. New tokens are appended, so only compaction opens gaps.
    """

    rows: StoredRows
    """The positions behind the slots: as far as all heads of a row share them."""

    @property
    @abstractmethod
    def heads(self) -> int:
        """KV heads."""

    @property
    @abstractmethod
    def batch(self) -> int:
        """Rows of the batch."""

    @property
    @abstractmethod
    def stored_length(self) -> int:
        """Slots in use, by the fullest head."""

    @property
    @abstractmethod
    def mean_length(self) -> float:
        """Slots in use of a KV head, on average."""

    @property
    @abstractmethod
    def uniform(self) -> bool:
        """Whether transformers places the next tokens right by default: no row has padding, or tokens of its own."""

    @abstractmethod
    def held(self, row: int, heads: slice) -> tuple[Tensor, Tensor]:
        """Keys and values (heads, stored, d) of KV heads of one row that store as many tokens: views, if possible."""

    @abstractmethod
    def next_positions(self, tokens: int) -> Tensor:
        """Positions of the next tokens in each row, (rows, tokens); one row where all rows agree."""

    @abstractmethod
    def stored_positions(self) -> Tensor:
        """Absolute positions behind the slots, ascending, (rows, stored).

        Raises:
            SpecError: where heads differ; `head_positions` has those of a head.
        """

    @abstractmethod
    def head_positions(self, row: int, head: int) -> Tensor:
        """Absolute positions that one KV head of one row stores, ascending."""

    @abstractmethod
    def retain(self, *kept: Tensor) -> None:
        """Keep these positions (kept,) of each row, and free the others; one tensor may stand for all rows.

        Raises:
            SpecError: when one is not stored; nothing has changed then.
        """

    @abstractmethod
    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise a SpecError where these cannot be taken back."""

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, one after the other."""
        self.batch_select_indices(torch.arange(self.batch, device="cpu").repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only these rows."""
        rows = torch.arange(self.batch, device="cpu")[indices.cpu()]
        self.reorder_cache(cast(torch.LongTensor, rows))

    @abstractmethod
    def splice(self, chunks: Sequence[SplicedTokens], seen: int) -> None:
        """Put chunks behind what the one row stores; `seen` tokens are then behind the session."""


class DenseLayer(RetainedLayer):  # type: ignore[no-untyped-call]  # the base's __init_subclass__ is untyped
    """A layer whose heads all store the same positions: keys and values are (rows, H_kv, stored, d), ascending.

    The logical length counts columns seen; the stored length counts slots.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)  # type: ignore[no-untyped-call]
        self.rows = StoredRows.none()
        self.evicted = 0
        """Columns seen, less slots."""

    @property
    def heads(self) -> int:
        """KV heads."""
        assert self.keys is not None
        return self.keys.shape[1]

    @property
    def batch(self) -> int:
        """Rows of the batch."""
        assert self.keys is not None
        return len(self.keys)

    @property
    def stored_length(self) -> int:
        """Slots in use."""
        return int(super().get_seq_length())

    @property
    def mean_length(self) -> float:
        """Slots in use of a KV head, on average."""
        return self.stored_length

    def get_seq_length(self) -> int:
        """Tokens seen: the position of the next query."""
        return self.stored_length + self.evicted

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Slots after `query_length` more tokens, and the offset that leads to their positions."""
        return self.stored_length + query_length, SlotOffset(self.evicted, self.rows)

    def stored_positions(self) -> Tensor:
        """Absolute positions behind the slots, ascending, (rows, stored)."""
        return self.rows.positions(self.stored_length)

    def held(self, row: int, heads: slice) -> tuple[Tensor, Tensor]:
        """Keys and values (heads, stored, d) of KV heads of one row: views, if they can be."""
        assert self.keys is not None
        assert self.values is not None
        keys, values = self.keys[row, heads], self.values[row, heads]
        if bool((self.rows.kept != EMPTY).all()):
            return keys, values
        stored = self.stored_positions()
        is_stored = stored[row if len(stored) > 1 else 0] != EMPTY
        return shown_columns(keys, is_stored), shown_columns(values, is_stored)

    def head_positions(self, row: int, head: int) -> Tensor:
        """Absolute positions that one KV head of one row stores, ascending."""
        rows = self.stored_positions()
        positions = rows[row if len(rows) > 1 else 0]
        return positions[positions != EMPTY]

    @property
    def uniform(self) -> bool:
        """Whether all rows store the same positions, and have no padding among what they have seen."""
        rows = self.rows
        return rows.shared and int(rows.seen_at_compaction[0]) - rows.kept.shape[1] == self.evicted

    def next_positions(self, tokens: int) -> Tensor:
        """Positions of the next tokens in each row, (rows, tokens); one row where all rows agree."""
        return self.rows.tokens(self.stored_length)[:, None] + torch.arange(tokens, device="cpu")

    def expect(self, is_token: Tensor) -> None:
        """Note, before columns are read, which of them (rows, n) hold a token of their row."""
        self.rows = self.rows.grown(self.stored_length, is_token)

    def retain(self, *kept: Tensor) -> None:
        """Keep these positions (kept,) of each row, and free the others; one tensor may stand for all rows.

        Implements: CC-COMPACT

        Raises:
            SpecError: when one is not stored; nothing has changed then.
        """
        self.follow(self.plan(*kept))

    def plan(self, *kept: Tensor, padding: Tensor | None = None) -> Plan:
        """What `retain` will do; other layers that store the same positions may follow the same plan.

        Args:
            kept: positions, (kept,), of each row or of all.
            padding: before the first compaction, columns left of each row's first token, (rows,).

        Raises:
            SpecError: when a position is not stored.
        """
        rows = self.rows if padding is None else StoredRows.padded(padding)
        stored = rows.positions(self.stored_length)
        sources = [0] * len(kept) if rows.shared else range(len(stored))
        if len(kept) == 1:
            kept = kept * len(sources)
        slots = [slots_of(stored[source], positions) for source, positions in zip(sources, kept, strict=True)]
        # Empty slots left of a shorter row's tokens may stay; those of a turn stand among them, and go.
        width = max(map(len, slots))
        stays = width == self.stored_length and torch.equal(filled(kept, width), stored.expand(len(kept), -1))
        after = rows.compacted(filled(kept, width), rows.tokens(self.stored_length))
        return Plan(self.rows, self.stored_length, () if stays else tuple(slots), after)

    def replace_tensors(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace all that has slots, (rows, heads, stored, d)."""
        assert self.keys is not None
        assert self.values is not None
        self.keys, self.values = change(self.keys), change(self.values)

    def follow(self, plan: Plan) -> None:
        """Gather the slots of a plan, if it frees any."""
        seen = self.get_seq_length()
        if plan.slots:
            self.replace_tensors(lambda tensor: gathered(tensor, plan.slots))
        self.rows = plan.after
        self.evicted = seen - self.stored_length

    def splice(self, chunks: Sequence[SplicedTokens], seen: int) -> None:
        """Put chunks of one set each behind what the one row stores; `seen` tokens are then behind the session."""
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
        """Hold what another layer held: keys and values (rows, H_kv, stored, d), and its `rows` and `evicted`."""
        self.lazy_initialization(keys, values)
        self.keys, self.values, self.rows, self.evicted = keys, values, rows, evicted

    def reset(self) -> None:
        """Forget everything: as new."""
        drop_tensors(self)
        self.rows = StoredRows.none()
        self.evicted = 0

    def check_crop(self, tokens_to_remove: int) -> None:
        """These can be taken back.

        Raises:
            SpecError: as `crop`.
        """
        seen = self.get_seq_length()
        if tokens_to_remove > 0 or seen + tokens_to_remove < 0:
            raise SpecError("tokens_to_remove", tokens_to_remove, f"must lie in [-{seen}, 0]")
        later = self.stored_length - self.rows.kept.shape[1]
        if not self.uniform and -tokens_to_remove > later:
            raise SpecError(
                "tokens_to_remove", tokens_to_remove,
                f"must be at least -{later}, because the rows store different tokens",
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens seen, stored or evicted: as many as -tokens_to_remove.

        Raises:
            SpecError: when that is not a number from 0 down to minus the tokens seen, or more than have been read since
                rows store different tokens.
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
        """Let row i go on as row beam_idx[i] was."""
        super().reorder_cache(cast(torch.LongTensor, beam_idx))
        self.rows = self.rows.select(beam_idx)
        self._free_empty()

    def _free_empty(self) -> None:
        """Slots go that a row had filled which is here no more: a row that is left alone has none that are empty."""
        filled_by_some = (self.rows.kept != EMPTY).any(dim=0)
        if bool(filled_by_some.all()):
            return
        later = torch.ones(self.stored_length - len(filled_by_some), dtype=torch.bool, device="cpu")
        slots = torch.nonzero(torch.cat([filled_by_some, later]))[:, 0]
        seen = self.get_seq_length()
        self.replace_tensors(lambda tensor: gathered(tensor, [slots]))
        self.rows = replace(self.rows, kept=self.rows.kept[:, filled_by_some])
        self.evicted = seen - self.stored_length


class IndexedLayer(DenseLayer, DynamicIndexedLayer):  # type: ignore[no-untyped-call]
    """A layer whose model chooses by the keys of an indexer, (rows, stored, d), which tokens a query reads."""

    def replace_tensors(self, change: Callable[[Tensor], Tensor]) -> None:
        """Change keys, values and indexer keys. A layer that uses the indexer of another layer has no indexer keys."""
        super().replace_tensors(change)
        if self.indexer_keys is not None:
            self.indexer_keys = change(self.indexer_keys[:, None])[:, 0]

    def reset(self) -> None:
        """Forget everything: as new."""
        super().reset()
        self.indexer_keys, self.is_indexer_initialized = None, False


def on_host(tensor: Tensor | None) -> Any:
    """As a NumPy array; half precision as float32, which is exact."""
    if tensor is None:
        return None
    wide = tensor if tensor.dtype == torch.float64 else tensor.float()
    return wide.detach().cpu().numpy()


def drop_tensors(layer: Any) -> None:
    """Forget a layer's keys and values, and that it had any."""
    # Layers of some releases zero their tensors on a reset, and keep their length.
    layer.keys = layer.values = None
    layer.is_initialized = False
