"""Kept sets of their own for each layer, or for each layer and KV head: real eviction, and attention over it.

A layer whose heads keep different tokens stores them one after the other, without padding: what is evicted is freed,
head by head. Attention then runs once for each head, over views of that storage; where all heads of the batch keep as
many tokens, it runs once for all of them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward, use_gqa_in_sdpa

from models_integration.cache import RetainedCache, RetainedLayer, undone
from models_integration.slots import slots_of
from models_integration.visibility import AttentionFunction, LayerMasks, StoredRows
from spec.errors import SpecError
from spec.retention import Granularity, Retention

__all__ = ["RaggedLayer", "compact", "ragged_attention"]

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


def compact(
    cache: RetainedCache, retentions: Sequence[Retention], padding: Tensor | None = None,
    layers: Iterable[int] | None = None,
) -> None:
    """Keep what the retentions say, at their own granularity: one per row, or one for all rows.

    Heads that keep the same stay together, and so do layers: a full budget changes no tensor.

    Args:
        cache: what is compacted.
        retentions: what to keep.
        padding: columns left of each row's first token, (rows,), where a first prompt is padded.
        layers: indices of full-attention layers; None means all of them.

    Raises:
        SpecError: when one is about another number of tokens, or of layers and heads, or names a token that is not
            stored; nothing has changed then.
    """
    if not cache.layers_differ and all(one.granularity is Granularity.MODEL for one in retentions):
        cache.compact(retentions, padding, layers)
        return
    full = [index for index, layer in enumerate(cache.layers) if isinstance(layer, RetainedLayer)]
    kept = [_by_layer(retention, cache, full, row, padding) for row, retention in enumerate(retentions)]
    chosen = [(at, layer) for at, layer in zip(full, cache.full_layers, strict=True) if layers is None or at in layers]
    with undone(layer for _, layer in chosen):
        todo = [_keeping(layer, [sets[full.index(at)] for sets in kept], padding) for at, layer in chosen]
    with cache.whole():
        for apply in todo:
            apply()
    cache.layers_differ |= any(not _agree(own for heads in sets for own in heads) for sets in kept)


def _by_layer(
    retention: Retention, cache: RetainedCache, full: Sequence[int], row: int, padding: Tensor | None,
) -> list[list[Tensor]]:
    """The kept positions of each full-attention layer and KV head."""
    layer = cache.full_layers[0]
    seen = int(layer.next_positions(1)[min(row, len(layer.next_positions(1)) - 1), 0])
    seen -= 0 if padding is None else int(padding[row])
    if retention.seen != seen:
        raise SpecError("retention", f"{retention.seen} tokens", f"the cache has seen {seen}")
    heads = layer.heads
    sets = [torch.tensor(retention.group(group), dtype=torch.int64) for group in range(retention.groups)]
    if retention.granularity is not Granularity.HEAD:
        sets = [own for own in sets for _ in range(heads * (1 if retention.groups > 1 else len(full)))]
    if len(sets) != heads * len(full):
        expected = f"must have a group for each of {len(full)} layers, or for each of their {heads} KV heads"
        raise SpecError("retention", f"{retention.groups} groups", expected)
    return [sets[heads * ordinal : heads * (ordinal + 1)] for ordinal in range(len(full))]


def _keeping(layer: RetainedLayer, kept: list[list[Tensor]], padding: Tensor | None) -> Callable[[], None]:
    """What lets row r and head h keep kept[r][h]; a layer of which no two heads of a row differ stays one rectangle."""
    if isinstance(layer, RaggedLayer):
        return layer.keeping(kept)
    rows = kept * layer.batch if len(kept) == 1 else kept
    if padding is not None:
        layer.pad(padding)
    if not all(map(_agree, rows)):
        return RaggedLayer.splitting(layer, rows)
    one = padding is None and layer.rows.shared and _agree(heads[0] for heads in rows)
    return partial(layer.follow, layer.plan(*(heads[0] for heads in (rows[:1] if one else rows))))


def _agree(sets: Iterable[Tensor]) -> bool:
    first, *others = sets
    return all(torch.equal(first, other) for other in others)


def _in_a_row(kept: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
    return tuple(own for heads in kept for own in heads)


def _flattened(tensor: Tensor, slots: Sequence[Sequence[Tensor]]) -> Tensor:
    """Each row's and head's slots of (rows, H_kv, stored, d), one after the other, (slots, d)."""
    parts = [
        tensor[row, head].index_select(0, own.to(tensor.device))
        for row, heads in enumerate(slots) for head, own in enumerate(heads)
    ]
    return torch.cat(parts).detach()


def ragged_attention(
    own: AttentionFunction, module: nn.Module, query: Tensor, layer: RaggedLayer, masks: object,
    options: Mapping[str, Any],
) -> Tensor:
    """The model's own attention over a ragged layer, (rows, q, H, d), without weights.

    Args:
        own: the model's attention function, eager or SDPA.
        module: the attention module.
        query: (rows, H, q, d), after RoPE; the last q tokens of the layer are its own.
        layer: keys and values, those of this forward included.
        masks: what our mask function made of this forward.
        options: what the module passed on.

    Raises:
        SpecError: for a mask of the caller's own, which knows nothing of heads.
    """
    if not isinstance(masks, LayerMasks):
        raise SpecError("attention_mask", type(masks).__name__, "must be 2D, or left out: heads store different tokens")
    rectangle = layer.rectangle() if masks.plain and len(set(layer.marks.tolist())) == 1 else None
    if rectangle is not None:
        mask = masks.of(layer.head_rows(0), layer.lengths[0], layer.columns)
        return _attended(own, module, query, *rectangle, mask, options)
    G, outputs = query.shape[1] // layer.heads, []
    for segment, (keys, values) in enumerate(layer.segments()):
        row, head = divmod(segment, layer.heads)
        asked = query[row : row + 1, head * G : (head + 1) * G]
        mask = masks.of(layer.head_rows(segment), keys.shape[2], layer.columns, row)
        outputs.append(_attended(own, module, asked, keys, values, mask, options))
    rows = [torch.cat(outputs[first : first + layer.heads], dim=2) for first in range(0, len(outputs), layer.heads)]
    return torch.cat(rows)


def _attended(
    own: AttentionFunction, module: nn.Module, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None,
    options: Mapping[str, Any],
) -> Tensor:
    """The model's attention, (rows, q, H, d); one query of a group of heads goes in as that many rows of one head.

    SDPA would otherwise repeat the keys for each head of the group: on a CPU that takes twice the time.
    """
    rows, H, q, d = query.shape
    grouped = q == 1 and mask is None and keys.shape[1] < H and use_gqa_in_sdpa(None, keys, values)
    if own is not sdpa_attention_forward or not grouped:
        return own(module, query, keys, values, mask, **options)[0]
    packed = query.reshape(rows, keys.shape[1], -1, d)
    output = own(module, packed, keys, values, None, **{**options, "is_causal": False})[0]
    return output.transpose(1, 2).reshape(rows, 1, H, -1)
