"""Cache layer in which each KV head stores a separate set of tokens.

The layer stores the tokens of all heads one after the other, without padding, so eviction frees memory head by head.
Attention (`cached_attention`) runs once for rows whose heads are equally long, otherwise once for each head.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from models_integration.cache.dense_layer import DenseLayer, RetainedLayer, SplicedTokens, drop_tensors
from models_integration.cache.positions import EMPTY, StoredRows, slots_of
from models_integration.cache.renumbering import LayerNumbering, TurnedKeys
from spec.errors import SpecError

__all__ = ["HEADS", "HeadLayout", "RaggedLayer", "dense_view"]

HEADS = ("positions", "lengths", "seen", "holes")
"""Names of the tensors in a file that describe a layer's heads, in the order of the arguments of `unpacked`."""

# Number of used slots per spare slot. With spare slots, appending tokens rarely copies the whole layer.
_SPARE = 64


@dataclass(frozen=True)
class HeadLayout:
    """Layout of a flat storage: heads row by row, with the same number of spare slots after each head.

    Attributes:
        kept: positions kept by the last compaction, ascending, one vector for each row and KV head.
        grown: number of tokens appended since the last compaction.
        spare: number of free slots after each head.
    """

    kept: tuple[Tensor, ...]
    grown: int = 0
    spare: int = 0

    @cached_property
    def lengths(self) -> list[int]:
        """Number of used slots of each row and KV head."""
        return [len(positions) + self.grown for positions in self.kept]

    @property
    def default_spare(self) -> int:
        """Number of spare slots after each head in a new layout."""
        return sum(self.lengths) // (_SPARE * len(self.kept))

    @cached_property
    def starts(self) -> list[int]:
        """First slot of each row and KV head."""
        return [0, *np.cumsum([length + self.spare for length in self.lengths])[:-1].tolist()]


class RaggedLayer(RetainedLayer):  # type: ignore[no-untyped-call]  # the base's __init_subclass__ is untyped
    """Full-attention layer in which each KV head of each row stores a separate set of positions.

    Keys and values are flat, (slots, d). `plan_split` replaces a DenseLayer by a RaggedLayer.

    Args:
        keys: keys of all heads of all rows, (slots, d).
        values: values of all heads of all rows, (slots, d).
        rows: data that the heads of a row share: number of tokens seen, and columns without a token.
        kept: kept positions, one vector for each row and KV head.
        padded_seen: number of columns seen, including padding.
    """

    def __init__(
        self, keys: Tensor, values: Tensor, rows: StoredRows, kept: Sequence[Tensor], padded_seen: int,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lazy_initialization(keys, values)
        self.keys, self.values, self.rows = keys, values, rows
        self.layout, self.padded_seen = HeadLayout(tuple(kept)), padded_seen

    @classmethod
    def plan_split(
        cls, layer: DenseLayer, kept: Sequence[Sequence[Tensor]], padding: Tensor | None = None,
    ) -> Callable[[], "RaggedLayer"]:
        """Return a function that replaces `layer` by a ragged layer in which row r and head h store kept[r][h].

        Args:
            layer: dense layer. The returned function empties this layer.
            kept: positions to keep, ascending.
            padding: as in `DenseLayer.plan`.

        Raises:
            SpecError: if a position is not stored. The error is raised immediately, not by the returned function.
        """
        rows = layer.rows if padding is None else StoredRows.padded(padding)
        stored, seen = rows.positions(layer.stored_length), rows.tokens(layer.stored_length)
        slots = [
            [slots_of(stored[min(row, len(stored) - 1)], positions) for positions in heads]
            for row, heads in enumerate(kept)
        ]
        shared = _shared_by_heads(seen.expand(len(kept)), rows.holes)

        def split() -> RaggedLayer:
            assert layer.keys is not None
            assert layer.values is not None
            keys, values = _flattened(layer.keys, slots), _flattened(layer.values, slots)
            ragged = cls(keys, values, shared, tuple(chain.from_iterable(kept)), layer.get_seq_length())
            # The tensors are freed even if a caller still has a reference to the old layer.
            layer.reset()
            return ragged

        return split

    @property
    def batch(self) -> int:
        """Number of rows of the batch."""
        return len(self.rows.seen_at_compaction)

    @property
    def heads(self) -> int:
        """Number of KV heads of a row."""
        return len(self.layout.kept) // self.batch

    @property
    def stored_length(self) -> int:
        """Number of used slots of the head with the most tokens."""
        return max(self.layout.lengths)

    @property
    def mean_length(self) -> float:
        """Mean number of used slots per KV head."""
        return sum(self.layout.lengths) / len(self.layout.kept)

    def get_seq_length(self) -> int:
        """Return the number of columns seen. Without padding, this is the position of the next query."""
        return self.padded_seen

    @property
    def uniform(self) -> bool:
        """True if no row has seen padding."""
        return bool((self.next_positions(1) == self.padded_seen).all())

    def next_positions(self, tokens: int) -> Tensor:
        """Return the positions of the next tokens in each row, (rows, tokens)."""
        return self.rows.tokens(self.layout.grown)[:, None] + torch.arange(tokens, device="cpu")

    def head_rows(self, segment: int) -> StoredRows:
        """Return the positions of one row and head, as for a layer with one head. Heads are counted row by row."""
        row = segment // self.heads
        holes = self.rows.holes[row : row + 1] if len(self.rows.holes) > 1 else self.rows.holes
        return StoredRows(self.layout.kept[segment][None], self.rows.seen_at_compaction[row : row + 1], holes)

    def stored_positions(self) -> Tensor:
        """Raise an error, because heads store different positions.

        Raises:
            SpecError: always. Use `head_positions` for a single head.
        """
        raise SpecError("past_key_values", "heads that differ", "have different positions; use head_positions")

    def head_positions(self, row: int, head: int) -> Tensor:
        """Return the absolute positions that one head of one row stores, ascending."""
        segment = row * self.heads + head
        positions = self.head_rows(segment).positions(self.layout.lengths[segment])[0]
        return positions[positions != EMPTY]

    def expect(self, is_token: Tensor) -> None:
        """Record the mask of the next columns, (rows, n), which is True for tokens and False for padding."""
        grown, n = self.rows.grown(self.layout.grown, is_token), is_token.shape[1]
        kept = [torch.cat([positions, grown.kept[at // self.heads]]) for at, positions in enumerate(self.layout.kept)]
        # The next `update` adds the n columns, and makes the number of grown tokens 0.
        self.layout = HeadLayout(tuple(kept), -n, self.layout.spare)
        self.rows = _shared_by_heads(grown.seen_at_compaction, grown.holes)

    def free_padding(self) -> None:
        """Free the slots of padding columns."""
        heads = range(self.heads)
        self.plan_keep([[self.head_positions(row, head) for head in heads] for row in range(self.batch)])()

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """Append (rows, H_kv, q, d) to all heads. Return the flat storage, which only `ragged_attention` can read."""
        q, layout = key_states.shape[2], self.layout
        assert self.keys is not None
        assert self.values is not None
        if layout.spare < q or self.keys.is_inference() != torch.is_inference_mode_enabled():
            roomy = replace(layout, spare=max(q, layout.default_spare))
            self.keys, self.values = _moved(self.keys, layout, roomy), _moved(self.values, layout, roomy)
            layout = roomy
        ends = torch.tensor(layout.starts, device="cpu") + torch.tensor(layout.lengths, device="cpu")
        slots = (ends[:, None] + torch.arange(q, device="cpu")).flatten().to(self.keys.device, non_blocking=True)
        self.keys, self.values = _put(self.keys, slots, key_states), _put(self.values, slots, value_states)
        self.layout = HeadLayout(layout.kept, layout.grown + q, layout.spare - q)
        self.padded_seen += q
        return self.keys, self.values

    def segments(self) -> list[tuple[Tensor, Tensor]]:
        """Return the keys and values of each row and head, (1, 1, stored, d), as views."""
        assert self.keys is not None
        assert self.values is not None
        return [
            (self.keys[None, None, start : start + length], self.values[None, None, start : start + length])
            for start, length in zip(self.layout.starts, self.layout.lengths, strict=True)
        ]

    def attended(self) -> "RaggedLayer":
        """Return the layer, or a view of the layer with the keys at the positions of the next forward pass."""
        if self.numbering is None:
            return self
        if self.turned is None or not self.turned.is_valid(self.layout.kept, self.numbering):
            self.turned = self._turned_keys(self.numbering)
        turned = self.turned
        if turned.keys is None or self.keys is None:
            return self
        view, keys = copy(self), self.keys
        view.keys, view.numbering = keys.index_copy(0, self._slots(turned.widths).to(keys.device), turned.keys), None
        return view

    def _slots(self, widths: Sequence[int]) -> Tensor:
        """Return the first `widths` slots of each head, in the flat storage."""
        starts = self.layout.starts
        return torch.cat([start + torch.arange(n, device="cpu") for start, n in zip(starts, widths, strict=True)])

    def _turned_keys(self, numbering: LayerNumbering) -> TurnedKeys:
        assert self.keys is not None
        stored = [self.head_rows(segment).positions(length) for segment, length in enumerate(self.layout.lengths)]
        following = self.rows.tokens(self.layout.grown).repeat_interleave(self.heads)
        computed, assigned, widths = numbering.numbering.moves_of_heads(stored, following)
        keys = self.keys.index_select(0, self._slots(widths).to(self.keys.device))
        turned = numbering.turned(keys, computed, assigned)
        return TurnedKeys(self.layout.kept, numbering, turned if any(widths) else None, widths)

    def held(self, row: int, heads: slice) -> tuple[Tensor, Tensor]:
        """Return keys and values (heads, stored, d) of KV heads with equally many tokens, as views if possible."""
        layer = self.attended()
        if (as_one := dense_view(layer)) is not None:
            return as_one[0][row, heads], as_one[1][row, heads]
        segments = layer.segments()[row * self.heads : (row + 1) * self.heads][heads]
        return torch.cat([keys[0] for keys, _ in segments]), torch.cat([values[0] for _, values in segments])

    def packed(self) -> dict[str, Tensor]:
        """Return keys, values and positions of all heads, one after the other, by name. Spare slots are left out."""
        segments = self.segments()
        keys, values = (torch.cat([segment[part][0, 0] for segment in segments]) for part in (0, 1))
        positions = [self.head_positions(row, head) for row in range(self.batch) for head in range(self.heads)]
        lengths = torch.tensor(self.layout.lengths, device="cpu")
        heads = torch.cat(positions), lengths, self.rows.tokens(self.layout.grown), self.rows.holes.contiguous()
        return {"keys": keys, "values": values, **dict(zip(HEADS, heads, strict=True))}

    @classmethod
    def unpacked(cls, packed: Mapping[str, Tensor], padded_seen: int) -> "RaggedLayer":
        """Return the layer from the result of `packed`, on the device of the keys. All stored tokens count as kept."""
        positions, lengths, seen, holes = (packed[name] for name in HEADS)
        kept = torch.split(positions, lengths.tolist())
        return cls(packed["keys"], packed["values"], _shared_by_heads(seen, holes), kept, padded_seen)

    def plan_keep(self, kept: Sequence[Sequence[Tensor]]) -> Callable[[], "RaggedLayer"]:
        """Return a function that evicts tokens until row r and head h store kept[r][h]. The function returns the layer.

        Raises:
            SpecError: if a position is not stored. The error is raised immediately, not by the returned function.
        """
        chosen, layout, heads = tuple(chain.from_iterable(kept)), self.layout, self.heads
        later = self.rows.seen_at_compaction[:, None] + torch.arange(layout.grown, device="cpu")
        slots_of_heads = [
            start + slots_of(torch.cat([before, later[segment // heads]]), positions)
            for segment, (start, before, positions) in enumerate(zip(layout.starts, layout.kept, chosen, strict=True))
        ]
        after = HeadLayout(chosen)
        if all(map(len, slots_of_heads)):
            # With spare slots, the next token is stored without a move. A free slot contains a copy of a kept token.
            after = replace(after, spare=after.default_spare)
            slots_of_heads = [part for slots in slots_of_heads for part in (slots, slots[-1:].expand(after.spare))]
        slots = torch.cat(slots_of_heads)

        def keep() -> RaggedLayer:
            assert self.keys is not None
            assert self.values is not None
            gathered = slots.to(self.keys.device, non_blocking=True)
            self.keys, self.values = self.keys.index_select(0, gathered), self.values.index_select(0, gathered)
            self.rows = _shared_by_heads(self.rows.tokens(layout.grown), self.rows.holes)
            self.layout = after
            return self

        return keep

    def splice(self, chunks: Sequence[SplicedTokens], seen: int) -> None:
        """Append chunks to the only row, with one set of positions or one per head (see `DenseLayer.splice`)."""
        keys, values, kept = list[Tensor](), list[Tensor](), list[Tensor]()
        for head, (stored_keys, stored_values) in enumerate(self.segments()):
            keys.append(stored_keys[0, 0])
            values.append(stored_values[0, 0])
            positions = [self.head_positions(0, head)]
            for chunk in chunks:
                chunk_positions = chunk.positions[head % len(chunk.positions)]
                stored = chunk_positions != EMPTY
                on_device = stored.to(chunk.keys.device, non_blocking=True)
                keys.append(chunk.keys[head][on_device].to(stored_keys))
                values.append(chunk.values[head][on_device].to(stored_values))
                positions.append(chunk_positions[stored])
            kept.append(torch.cat(positions))
        self.keys, self.values = torch.cat(keys), torch.cat(values)
        self.rows, self.layout = _shared_by_heads(torch.tensor([seen], device="cpu")), HeadLayout(tuple(kept))
        self.padded_seen = seen

    def check_crop(self, tokens_to_remove: int) -> None:
        """Check that `crop` can remove these tokens. Columns that include padding cannot be removed.

        Raises:
            SpecError: as in `crop`.
        """
        super().check_crop(tokens_to_remove)
        grown = self.layout.grown
        if self.rows.holes.shape[1] and -tokens_to_remove > grown:
            reason = f"would remove columns of a padded turn; at most the last {grown} tokens can be removed"
            raise SpecError("tokens_to_remove", tokens_to_remove, reason)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last -tokens_to_remove tokens that the layer has seen, whether stored or evicted.

        Raises:
            SpecError: if `tokens_to_remove` is not a number from -(tokens seen) to 0.
        """
        self.check_crop(tokens_to_remove)
        seen = (self.next_positions(1)[:, 0] + tokens_to_remove).clamp(min=0)
        left = []
        for row, end in enumerate(seen.tolist()):
            stored = [self.head_positions(row, head) for head in range(self.heads)]
            left.append([positions[positions < end] for positions in stored])
        self.plan_keep(left)()
        self.rows = _shared_by_heads(seen, self.rows.holes)
        self.padded_seen += tokens_to_remove

    def reset(self) -> None:
        """Remove all tokens. The cache then replaces this layer by a DenseLayer."""
        drop_tensors(self)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace each row i by row beam_idx[i]."""
        rows, heads = beam_idx.cpu(), self.heads
        chosen, parts = (rows[:, None] * heads + torch.arange(heads, device="cpu")).flatten().tolist(), self.segments()
        self.keys = torch.cat([parts[segment][0][0, 0] for segment in chosen])
        self.values = torch.cat([parts[segment][1][0, 0] for segment in chosen])
        self.turned = None
        holes = self.rows.holes if len(self.rows.holes) == 1 else self.rows.holes[rows]
        self.rows = _shared_by_heads(self.rows.seen_at_compaction[rows], holes)
        self.layout = HeadLayout(tuple(self.layout.kept[segment] for segment in chosen), self.layout.grown)


def _shared_by_heads(seen: Tensor, holes: Tensor | None = None) -> StoredRows:
    """Return stored rows after a compaction at `seen` (rows,) tokens. Each head has a separate vector of positions."""
    empty = torch.empty(len(seen), 0, dtype=torch.int64, device="cpu")
    return StoredRows(empty, seen) if holes is None else StoredRows(empty, seen, holes)


def _flattened(tensor: Tensor, slots: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return chosen slots of a tensor (rows, H_kv, stored, d) as (slots, d), sorted by row, then by head."""
    parts = [
        tensor[row, head].index_select(0, head_slots.to(tensor.device, non_blocking=True))
        for row, heads in enumerate(slots) for head, head_slots in enumerate(heads)
    ]
    return torch.cat(parts)


def _moved(storage: Tensor, before: HeadLayout, after: HeadLayout) -> Tensor:
    """Return the storage (slots, d) with the tokens moved from the slots of `before` to the slots of `after`."""
    moved = storage.new_zeros(sum(after.lengths) + after.spare * len(after.kept), storage.shape[1])
    for source, target, length in zip(before.starts, after.starts, before.lengths, strict=True):
        moved[target : target + length] = storage[source : source + length]
    return moved


def _put(storage: Tensor, slots: Tensor, new: Tensor) -> Tensor:
    """Write new tokens (rows, H_kv, q, d) to slots of the storage (slots, d). With gradients, write to a copy.

    The backward pass needs the tensors of an earlier forward pass unchanged. Different dtypes, as under autocast, are
    promoted as in `torch.cat`.
    """
    dtype = torch.promote_types(storage.dtype, new.dtype)
    storage, tokens = storage.to(dtype), new.reshape(-1, new.shape[-1]).to(dtype)
    if torch.is_grad_enabled() and (storage.requires_grad or tokens.requires_grad):
        return storage.index_copy(0, slots, tokens)
    return storage.index_copy_(0, slots, tokens.detach())


def dense_view(layer: RaggedLayer, first: int = 0, stop: int | None = None) -> tuple[Tensor, Tensor] | None:
    """Return keys and values (rows, H_kv, stored, d) of these rows as views, if all heads store equally many tokens."""
    assert layer.keys is not None
    assert layer.values is not None
    heads, layout = slice(first * layer.heads, (layer.batch if stop is None else stop) * layer.heads), layer.layout
    lengths = layout.lengths[heads]
    if len(set(lengths)) > 1:
        return None
    start, size = layout.starts[heads.start], lengths[0] + layout.spare
    slots = slice(start, start + len(lengths) * size)
    shape = len(lengths) // layer.heads, layer.heads, size
    keys, values = (x[slots].view(*shape, x.shape[1]) for x in (layer.keys, layer.values))
    return keys[:, :, : lengths[0]], values[:, :, : lengths[0]]
