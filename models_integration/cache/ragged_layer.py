"""Kept sets of their own for each layer, or for each layer and KV head: real eviction, and attention over it.

A layer whose heads keep different tokens stores them one after the other, without padding: what is evicted is freed,
head by head. Attention then runs once for each head, over views of that storage; where all heads of the batch keep as
many tokens, it runs once for all of them.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from models_integration.cache.dense_layer import RetainedLayer
from models_integration.cache.positions import StoredRows
from models_integration.cache.slots import slots_of
from spec.errors import SpecError

__all__ = ["RaggedLayer"]

# Spare slots of a layer, as a part of those in use: appending copies a layer once in so many tokens.
_SPARE = 64


class RaggedLayer(RetainedLayer):  # type: ignore[no-untyped-call]  # the base's __init_subclass__ is untyped
    """A full-attention layer of which each KV head of each row stores its own positions.

    Keys and values are flat, (slots, d): the heads of a row side by side, row after row, each with the same few spare
    slots behind it. It is made of a RetainedLayer by `splitting`. Keys and values that grow are not differentiated.
    """

    kept: tuple[Tensor, ...]
    """Positions kept at the last compaction, ascending, one vector for each row and KV head."""
    marks: Tensor
    """Tokens that each row had seen by then, (rows,)."""
    columns: int
    """Tokens seen, padding included."""
    grown: int
    """Tokens since the last compaction."""
    spare: int
    """Slots behind each head that no token has taken."""

    @classmethod
    def splitting(cls, layer: RetainedLayer, kept: Sequence[Sequence[Tensor]]) -> Callable[[], None]:
        """What makes this layer one whose row r and head h keep kept[r][h], and frees the rest.

        Raises:
            SpecError: at once, when one of these is not stored.
        """
        columns, stored, marks = layer.get_seq_length(), layer.stored_positions(), layer.next_positions(1)[:, 0]
        slots = [[slots_of(stored[min(row, len(stored) - 1)], own) for own in heads] for row, heads in enumerate(kept)]

        def split() -> None:
            assert layer.keys is not None
            assert layer.values is not None
            flat = [_flattened(tensor, slots) for tensor in (layer.keys, layer.values)]
            layer.__class__ = cls
            assert isinstance(layer, cls)
            layer.keys, layer.values = flat
            layer.kept, layer.marks, layer.columns = _in_a_row(kept), marks.expand(len(kept)), columns
            layer.grown = layer.spare = 0

        return split

    @property
    def batch(self) -> int:
        """Rows of the batch."""
        return len(self.marks)

    @property
    def heads(self) -> int:
        """KV heads of a row."""
        return len(self.kept) // self.batch

    @property
    def lengths(self) -> list[int]:
        """Slots in use, for each row and KV head."""
        return [len(own) + self.grown for own in self.kept]

    @property
    def stored_length(self) -> int:
        """Slots of the fullest head."""
        return max(self.lengths)

    @property
    def mean_length(self) -> float:
        """Slots in use of a KV head, on average."""
        return sum(self.lengths) / len(self.kept)

    @property
    def _starts(self) -> list[int]:
        return [0, *np.cumsum([length + self.spare for length in self.lengths])[:-1].tolist()]

    def get_seq_length(self) -> int:
        """Tokens seen: the position of the next query."""
        return self.columns

    @property
    def uniform(self) -> bool:
        """Whether no row has padding among what it has seen."""
        return bool((self.next_positions(1) == self.columns).all())

    def next_positions(self, tokens: int) -> Tensor:
        """Positions of the next tokens in each row, (rows, tokens)."""
        return self.marks[:, None] + self.grown + torch.arange(tokens)

    def head_rows(self, segment: int) -> StoredRows:
        """The positions of one row and head, as a layer of its own would have them."""
        row = segment // self.heads
        return StoredRows(self.kept[segment][None], self.marks[row : row + 1])

    def stored_positions(self) -> Tensor:
        """No one row of positions stands for all heads.

        Raises:
            SpecError: always; `head_positions` has those of a head.
        """
        raise SpecError("past_key_values", "heads that differ", "have positions of their own: head_positions")

    def head_positions(self, row: int, head: int) -> Tensor:
        """Absolute positions that one head of one row stores, ascending."""
        segment = row * self.heads + head
        return self.head_rows(segment).positions(self.lengths[segment])[0]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append (rows, H_kv, q, d) to every head; returns the flat storage, which only `ragged_attention` can read."""
        q = key_states.shape[2]
        assert self.keys is not None
        if self.spare < q or self.keys.is_inference() != torch.is_inference_mode_enabled():
            self._lay_out(max(q, sum(self.lengths) // (_SPARE * len(self.kept))))
        ends = torch.tensor(self._starts) + torch.tensor(self.lengths)
        slots = (ends[:, None] + torch.arange(q)).flatten().to(self.keys.device)
        for storage, new in ((self.keys, key_states), (self.values, value_states)):
            assert storage is not None
            storage.index_copy_(0, slots, new.detach().reshape(-1, new.shape[-1]))
        self.columns, self.grown, self.spare = self.columns + q, self.grown + q, self.spare - q
        assert self.values is not None
        return self.keys, self.values

    def _lay_out(self, spare: int) -> None:
        """The same tokens with this many spare slots behind each head."""
        old, sizes = self._starts, self.lengths
        new = [start + segment * (spare - self.spare) for segment, start in enumerate(old)]
        for name in ("keys", "values"):
            storage = cast(Tensor, getattr(self, name))
            moved = storage.new_zeros(sum(sizes) + spare * len(sizes), storage.shape[1])
            for source, target, size in zip(old, new, sizes, strict=True):
                moved[target : target + size] = storage[source : source + size].detach()
            setattr(self, name, moved)
        self.spare = spare

    def segments(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each row and head, (1, 1, stored, d): views."""
        assert self.keys is not None
        assert self.values is not None
        return [
            (self.keys[None, None, start : start + length], self.values[None, None, start : start + length])
            for start, length in zip(self._starts, self.lengths, strict=True)
        ]

    def rectangle(self) -> tuple[Tensor, Tensor] | None:
        """Keys and values (rows, H_kv, stored, d), views, where every head stores as many tokens; else None."""
        assert self.keys is not None
        assert self.values is not None
        if len(set(self.lengths)) > 1:
            return None
        length = self.lengths[0]
        shape = (self.batch, self.heads, length + self.spare, -1)
        return self.keys.view(shape)[:, :, :length], self.values.view(shape)[:, :, :length]

    def keep(self, kept: Sequence[Sequence[Tensor]]) -> None:
        """Of row r and head h keep kept[r][h], and free the rest.

        Raises:
            SpecError: when one of these is not stored; nothing has changed then.
        """
        self.keeping(kept)()

    def keeping(self, kept: Sequence[Sequence[Tensor]]) -> Callable[[], None]:
        """What does so.

        Raises:
            SpecError: at once, when one of these is not stored.
        """
        chosen = _in_a_row(kept)
        slots = torch.cat([
            start + slots_of(self.head_rows(segment).positions(length)[0], own)
            for segment, (start, length, own) in enumerate(zip(self._starts, self.lengths, chosen, strict=True))
        ])

        def keep() -> None:
            assert self.keys is not None
            assert self.values is not None
            at = slots.to(self.keys.device)
            self.keys, self.values = self.keys.index_select(0, at), self.values.index_select(0, at)
            self.kept, self.marks, self.grown, self.spare = chosen, self.next_positions(1)[:, 0], 0, 0

        return keep

    def retain(self, *kept: Tensor) -> None:
        """Keep these positions (kept,) of all heads of each row; one tensor may stand for all rows.

        Raises:
            SpecError: when a head does not store one; nothing has changed then.
        """
        rows = kept * self.batch if len(kept) == 1 else kept
        self.keep([[own] * self.heads for own in rows])

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens seen, stored or evicted: as many as -tokens_to_remove.

        Raises:
            SpecError: when that is not a number from 0 down to minus the tokens seen.
        """
        if tokens_to_remove > 0 or self.columns + tokens_to_remove < 0:
            raise SpecError("tokens_to_remove", tokens_to_remove, f"must lie in [-{self.columns}, 0]")
        marks = (self.next_positions(1)[:, 0] + tokens_to_remove).clamp(min=0)
        rows = range(len(marks))
        stored = [[self.head_positions(row, head) for head in range(self.heads)] for row in rows]
        self.keep([[own[own < marks[row]] for own in stored[row]] for row in rows])
        self.marks, self.columns = marks, self.columns + tokens_to_remove

    def reset(self) -> None:
        """Forget everything: a RetainedLayer, as new."""
        layer = cast(RetainedLayer, self)
        layer.__class__ = RetainedLayer
        layer.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row i go on as row beam_idx[i] was."""
        rows, parts = beam_idx.tolist(), self.segments()
        chosen = [row * self.heads + head for row in rows for head in range(self.heads)]
        self.keys, self.values = (torch.cat([parts[own][which][0, 0] for own in chosen]) for which in (0, 1))
        self.kept, self.marks, self.spare = tuple(self.kept[own] for own in chosen), self.marks[rows], 0

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, one after the other."""
        self.reorder_cache(torch.arange(self.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only these rows."""
        self.reorder_cache(torch.arange(self.batch)[indices.cpu()])


def _in_a_row(kept: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
    return tuple(own for heads in kept for own in heads)


def _flattened(tensor: Tensor, slots: Sequence[Sequence[Tensor]]) -> Tensor:
    """Each row's and head's slots of (rows, H_kv, stored, d), one after the other, (slots, d)."""
    parts = [
        tensor[row, head].index_select(0, own.to(tensor.device))
        for row, heads in enumerate(slots) for head, own in enumerate(heads)
    ]
    return torch.cat(parts).detach()
