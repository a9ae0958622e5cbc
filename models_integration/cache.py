"""A cache that forgets: tensors and positions of the kept tokens, and the number of tokens seen."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from models_integration.running import Decoding
from models_integration.slots import Plan, filled, gathered, slots_of
from models_integration.states import RowStates
from models_integration.visibility import EMPTY, LayersDiffer, SlotOffset, StoredRows
from spec.errors import SpecError
from spec.retention import Granularity, Retention

__all__ = ["RetainedCache", "RetainedLayer", "slots_of", "storage_bytes"]


class RetainedLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # the base's __init_subclass__ is untyped
    """One full-attention layer: keys and values (rows, H_kv, stored, d) of the kept positions, in ascending order.

    Keys keep the rotation of their own position. The logical length counts tokens seen; the stored length counts
    slots. New tokens are appended, so only compaction opens gaps.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)  # type: ignore[no-untyped-call]
        self.rows = StoredRows.none()
        self.evicted = 0

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

    def head_positions(self, row: int, head: int) -> Tensor:
        """Absolute positions that one KV head of one row stores, ascending."""
        rows = self.stored_positions()
        own = rows[row if len(rows) > 1 else 0]
        return own[own != EMPTY]

    @property
    def uniform(self) -> bool:
        """Whether all rows store the same positions, and have no padding among what they have seen."""
        rows = self.rows
        return rows.shared and int(rows.marks[0]) - rows.kept.shape[1] == self.evicted

    def next_positions(self, tokens: int) -> Tensor:
        """Positions of the next tokens in each row, (rows, tokens); one row where all rows agree."""
        grown = self.stored_length - self.rows.kept.shape[1]
        return self.rows.marks[:, None] + grown + torch.arange(tokens)

    def pad(self, padding: Tensor) -> None:
        """Note, before the first compaction, how many columns (rows,) stand left of each row's first token."""
        self.rows = StoredRows.padded(padding)

    def retain(self, *kept: Tensor) -> None:
        """Keep these positions (kept,) of each row, and free the others; one tensor may stand for all rows.

        Implements: CC-COMPACT

        Raises:
            SpecError: when one is not stored; nothing has changed then.
        """
        self.follow(self.plan(*kept))

    def plan(self, *kept: Tensor) -> Plan:
        """What `retain` will do; other layers that store the same positions may follow the same plan.

        Raises:
            SpecError: when a position is not stored.
        """
        stored, marks = self.stored_positions(), self.next_positions(1)[:, 0]
        of = [0] * len(kept) if self.rows.shared else range(len(stored))
        if len(kept) == 1:
            kept = kept * len(of)
        slots = [slots_of(stored[row], own) for row, own in zip(of, kept, strict=True)]
        frees = sum(map(len, slots)) < sum(int((stored[row] != EMPTY).sum()) for row in of)
        width = max(map(len, slots)) if frees else self.stored_length
        after = StoredRows(filled(kept, width), marks.expand(len(kept)))
        return Plan(self.rows, self.stored_length, tuple(slots) if frees else (), after)

    def follow(self, plan: Plan) -> None:
        """Gather the slots of a plan, if it frees any."""
        assert self.keys is not None
        assert self.values is not None
        seen = self.get_seq_length()
        if plan.slots:
            slots = [own.to(self.keys.device) for own in plan.slots]
            keys, values = gathered(self.keys, slots), gathered(self.values, slots)
            self.keys, self.values = keys, values
        self.rows = plan.after
        self.evicted = seen - self.stored_length

    def reset(self) -> None:
        """Forget everything: as new."""
        _drop_tensors(self)
        self.rows = StoredRows.none()
        self.evicted = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens seen, stored or evicted: as many as -tokens_to_remove.

        Raises:
            SpecError: when that is not a number from 0 down to minus the tokens seen.
        """
        remaining = self.get_seq_length() + tokens_to_remove
        if tokens_to_remove > 0 or remaining < 0:
            raise SpecError("tokens_to_remove", tokens_to_remove, f"must lie in [-{self.get_seq_length()}, 0]")
        if tokens_to_remove == 0:
            return
        assert self.keys is not None
        assert self.values is not None
        if self.rows.shared:
            left = int((self.stored_positions() < remaining).sum())
            rows = StoredRows(self.rows.kept[:, :left], self.rows.marks.clamp(max=remaining))
        else:
            later = self.stored_length - self.rows.kept.shape[1]
            if -tokens_to_remove > later:
                raise SpecError("tokens_to_remove", tokens_to_remove, f"rows that differ can give back {later} so far")
            left, rows = self.stored_length + tokens_to_remove, self.rows
        self.keys, self.values = self.keys[:, :, :left], self.values[:, :, :left]
        self.rows, self.evicted = rows, remaining - left

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row i go on as row beam_idx[i] was."""
        super().reorder_cache(cast(torch.LongTensor, beam_idx))
        self.rows = self.rows.select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, one after the other."""
        super().batch_repeat_interleave(repeats)
        self.rows = self.rows.select(torch.arange(len(self.rows.kept)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only these rows."""
        super().batch_select_indices(indices)
        self.rows = self.rows.select(indices)


class RetainedCache(DynamicCache):
    """A DynamicCache whose full-attention layers can be compacted. Sliding-window layers stay as they are.

    Outside the context manager it only grows: default position ids and masks continue right from the tokens seen.
    2D attention masks count tokens seen, evicted ones included. Rows that store different positions can be read inside
    the context manager only.

    Args:
        config: the (text) config of the model.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config=config)
        self._take_over(config)

    @staticmethod
    def check_adoptable(cache: Cache) -> None:
        """Refuse a cache that cannot take a prompt.

        Raises:
            SpecError: unless it is an empty DynamicCache that stays on its device.
        """
        if isinstance(cache, RetainedCache):
            cache.check_usable()
        elif type(cache) is not DynamicCache:
            raise SpecError("past_key_values", type(cache).__name__, "must be a DynamicCache, or left to the policy")
        if cache.offloading:
            raise SpecError("past_key_values", "offloading=True", "an offloaded cache cannot be compacted")
        if cache.get_seq_length() > 0:
            raise SpecError("past_key_values", f"{cache.get_seq_length()} tokens", "must be empty before a prompt")

    @classmethod
    def adopt(cls, cache: Cache, config: PretrainedConfig) -> "RetainedCache":
        """Make this very object, which generate or the caller holds, a RetainedCache.

        Raises:
            SpecError: as `check_adoptable`.
        """
        cls.check_adoptable(cache)
        if not isinstance(cache, RetainedCache):
            cache.__class__ = cls
            assert isinstance(cache, RetainedCache)
            cache._take_over(config)
        return cache

    def _take_over(self, config: PretrainedConfig) -> None:
        # A cache made without a config grows plain layers for all; the config says which of them slide.
        layers = DynamicCache(config=config).layers
        self.layers = [RetainedLayer() if type(layer) is DynamicLayer else layer for layer in layers]
        self.layer_class_to_replicate = None
        self.failure: str | None = None
        self.layers_differ = False
        """Whether layers, or their heads, store different positions."""
        self.states = RowStates()
        """What decode and later segments go on from, row by row."""
        self.decoding: Decoding | None = None
        """What a policy that decides in its steps goes on from."""
        self._in_context = False

    @property
    def full_layers(self) -> list[RetainedLayer]:
        """The layers that can be compacted."""
        return [layer for layer in self.layers if isinstance(layer, RetainedLayer)]

    def _full_layer(self, index: int) -> RetainedLayer:
        layer = self.layers[index]
        assert isinstance(layer, RetainedLayer)
        return layer

    @property
    def stored_length(self) -> int:
        """Slots of a full-attention layer; of the first, where they differ."""
        return self.full_layers[0].stored_length

    @property
    def mean_length(self) -> float:
        """Slots of a full-attention layer and KV head, on average."""
        return sum(layer.mean_length for layer in self.full_layers) / len(self.full_layers)

    def stored_positions(self, row: int = 0) -> Tensor:
        """Absolute positions that the full-attention layers store of one row, ascending, (stored,).

        Where layers or heads differ, those of the first; each layer's `head_positions` has its own.
        """
        return self.full_layers[0].head_positions(row, 0)

    @property
    def observed_keys(self) -> Tensor:
        """The observed layer's stored keys, (rows, H_kv, stored, d)."""
        keys = self.full_layers[0].keys
        assert isinstance(keys, Tensor)
        return keys

    @property
    def padding(self) -> Tensor:
        """Columns left of each row's first token, (rows,); one row where all rows agree."""
        return self.get_seq_length() - self.full_layers[0].next_positions(1)[:, 0]

    def step_inputs(self, tokens: int, device: torch.device) -> dict[str, Tensor]:
        """What the next tokens of padded rows need, where their caller leaves it out: position ids and a 2D mask.

        Empty where the defaults of transformers are right.
        """
        first = self.full_layers[0]
        if first.uniform:
            return {}
        positions, columns = first.next_positions(tokens), self.get_seq_length()
        shown = torch.arange(columns + tokens) >= columns - positions[:, :1]
        return {"position_ids": positions.to(device), "attention_mask": shown.to(device, torch.int64)}

    @contextmanager
    def in_context(self) -> Iterator[None]:
        """The model reads this cache through our masks."""
        self._in_context = True
        try:
            yield
        finally:
            self._in_context = False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen, as a full-attention layer counts them."""
        self.check_usable()
        layer = self.layers[layer_idx]
        return (layer if isinstance(layer, RetainedLayer) else self.full_layers[0]).get_seq_length()

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """See the layers.

        Raises:
            SpecError: outside the context manager, where rows differ: a mask of transformers cannot tell them apart.
                Where layers do, `update` refuses.
        """
        self.check_usable()
        if not self._in_context and not self.full_layers[0].uniform:
            raise SpecError("past_key_values", "rows that differ", "can be read inside the context manager only")
        if self.layers_differ and isinstance(self.layers[layer_idx], RetainedLayer):
            return self.get_seq_length() + query_length, LayersDiffer()
        sizes: tuple[int, int] = super().get_mask_sizes(query_length, layer_idx)
        return sizes

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values of new tokens, and return all that are stored."""
        self.check_usable()
        if self.layers_differ and not self._in_context:
            raise SpecError("past_key_values", "layers that differ", "can be read inside the context manager only")
        stored: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return stored

    def compact(
        self, retentions: Sequence[Retention], padding: Tensor | None = None, layers: Iterable[int] | None = None,
    ) -> None:
        """Keep what the retentions say: one per row, or one for all rows.

        Args:
            retentions: what to keep.
            padding: columns left of each row's first token, (rows,), where a first prompt is padded.
            layers: indices of full-attention layers; None means all of them.

        Raises:
            SpecError: when one is about another number of tokens, or not one kept set for the whole model.
        """
        chosen = self.full_layers if layers is None else [self._full_layer(index) for index in layers]
        if not chosen:
            return
        first = chosen[0]
        tokens = first.next_positions(1)[:, 0] if padding is None else first.get_seq_length() - padding
        kept = []
        for retention, seen in zip(retentions, tokens.expand(len(retentions)).tolist(), strict=True):
            if retention.granularity is not Granularity.MODEL:
                raise SpecError("retention", retention.granularity, "only one kept set for all layers is served so far")
            if retention.seen != seen:
                raise SpecError("retention", f"{retention.seen} tokens", f"the cache has seen {seen}")
            kept.append(torch.tensor(retention.positions, dtype=torch.int64))
        if padding is None and all(torch.equal(kept[0], other) for other in kept):
            kept = kept[:1]
        plan: Plan | None = None
        for layer in chosen:
            if padding is not None:
                layer.pad(padding)
            if plan is None or not plan.fits(layer.rows, layer.stored_length):
                plan = layer.plan(*kept)
            layer.follow(plan)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row i go on as row beam_idx[i] was."""
        super().reorder_cache(cast(torch.LongTensor, beam_idx))
        self.states = self.states.select(beam_idx)
        self.decoding = self.decoding and self.decoding.select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, one after the other."""
        super().batch_repeat_interleave(repeats)
        self.states = self.states.select(torch.arange(len(self.states.rows)).repeat_interleave(repeats))
        self.decoding = self.decoding and self.decoding.repeat(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only these rows."""
        super().batch_select_indices(indices)
        self.states = self.states.select(indices)
        self.decoding = self.decoding and self.decoding.select(indices)

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens seen, stored or evicted: as many as -tokens_to_remove.

        The rows' states are forgotten where they know one of these tokens: the cache then grows on without them.
        """
        super().crop(tokens_to_remove)
        self.states = self.states.crop(-tokens_to_remove)
        self.decoding = self.decoding if tokens_to_remove == 0 else None

    def reset(self) -> None:
        """Forget everything: ready for a new prompt."""
        self.states = RowStates()
        for layer in self.layers:
            layer.reset()
            _drop_tensors(layer)
        self.layers_differ, self.decoding = False, None

    def fail(self, reason: str) -> None:
        """Drop everything and refuse any further use."""
        self.reset()
        self.failure = reason

    def check_usable(self) -> None:
        """Refuse a cache that a failure has emptied.

        Raises:
            SpecError: when it has.
        """
        if self.failure is not None:
            raise SpecError("past_key_values", "an unusable cache", f"{self.failure}; start again with a new one")


def _drop_tensors(layer: Any) -> None:
    # Layers of some releases zero their tensors on a reset, and keep their length.
    layer.keys = layer.values = None
    layer.is_initialized = False


def storage_bytes(layers: Iterable[Any]) -> int:
    """Bytes that the tensors of these cache layers occupy, each memory block counted once."""
    blocks = {}
    for layer in layers:
        for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None)):
            if isinstance(tensor, Tensor):
                block = tensor.untyped_storage()
                blocks[block.data_ptr()] = block.nbytes()
    return sum(blocks.values())
