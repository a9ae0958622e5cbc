"""A cache that forgets: tensors and positions of the kept tokens, and the number of tokens seen."""

from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from models_integration.visibility import SlotOffset, StoredRows
from spec.errors import SpecError
from spec.retention import Granularity, Retention

__all__ = ["RetainedCache", "RetainedLayer", "slots_of", "storage_bytes"]


def slots_of(stored: Tensor, wanted: Tensor) -> Tensor:
    """Slots that hold the `wanted` positions; the only place where a position becomes a slot.

    Args:
        stored: the positions behind the slots, ascending, (stored,).
        wanted: positions, ascending, (kept,).

    Raises:
        SpecError: when a wanted position is not stored.
    """
    slots = torch.searchsorted(stored, wanted)
    found = slots < len(stored)
    found &= stored[slots.clamp(max=len(stored) - 1)] == wanted
    if not found.all():
        raise SpecError("positions", wanted[~found].tolist(), f"must be among the {len(stored)} stored positions")
    return slots


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
    def stored_length(self) -> int:
        """Slots in use."""
        return int(super().get_seq_length())

    def get_seq_length(self) -> int:
        """Tokens seen: the position of the next query."""
        return self.stored_length + self.evicted

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Slots after `query_length` more tokens, and the offset that leads to their positions."""
        return self.stored_length + query_length, SlotOffset(self.evicted, self.rows)

    def stored_positions(self) -> Tensor:
        """Absolute positions behind the slots, ascending, (rows, stored)."""
        return self.rows.positions(self.stored_length)

    def retain(self, kept: Tensor) -> None:
        """Keep these positions (kept,) of every row, and free the others.

        Implements: CC-COMPACT

        Raises:
            SpecError: when one is not stored; nothing has changed then.
        """
        assert self.rows.shared
        assert self.keys is not None
        assert self.values is not None
        seen = self.get_seq_length()
        slots = slots_of(self.stored_positions()[0], kept).to(self.keys.device)
        if len(slots) < self.stored_length:
            # Copies, not views: a view would keep the evicted tokens' memory alive.
            keys, values = self.keys.index_select(2, slots), self.values.index_select(2, slots)
            self.keys, self.values = keys, values
        self.rows = StoredRows(kept[None], torch.full((1,), seen, dtype=torch.int64))
        self.evicted = seen - len(kept)

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
        assert self.rows.shared
        assert self.keys is not None
        assert self.values is not None
        left = int((self.stored_positions() < remaining).sum())
        self.keys, self.values = self.keys[:, :, :left], self.values[:, :, :left]
        kept = self.rows.kept[:, :left]
        self.rows = StoredRows(kept, self.rows.marks.clamp(max=remaining))
        self.evicted = remaining - left


class RetainedCache(DynamicCache):
    """A DynamicCache whose full-attention layers can be compacted. Sliding-window layers stay as they are.

    Outside the context manager it only grows: default position ids and masks continue right from the tokens seen.
    2D attention masks count tokens seen, evicted ones included.

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

    @property
    def full_layers(self) -> list[RetainedLayer]:
        """The layers that can be compacted."""
        return [layer for layer in self.layers if isinstance(layer, RetainedLayer)]

    @property
    def stored_length(self) -> int:
        """Slots of a full-attention layer."""
        return self.full_layers[0].stored_length

    def stored_positions(self) -> Tensor:
        """Absolute positions behind the slots of the full-attention layers, (stored,)."""
        return self.full_layers[0].stored_positions()[0]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen, as a full-attention layer counts them."""
        self.check_usable()
        layer = self.layers[layer_idx]
        return (layer if isinstance(layer, RetainedLayer) else self.full_layers[0]).get_seq_length()

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """See the layers."""
        self.check_usable()
        sizes: tuple[int, int] = super().get_mask_sizes(query_length, layer_idx)
        return sizes

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values of new tokens, and return all that are stored."""
        self.check_usable()
        stored: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return stored

    def compact(self, retention: Retention) -> None:
        """Keep what the retention says, in every full-attention layer.

        Raises:
            SpecError: when it is about another number of tokens, or not one kept set for the whole model.
        """
        if retention.granularity is not Granularity.MODEL:
            raise SpecError("retention", retention.granularity, "only one kept set for all layers is served so far")
        if retention.seen != self.get_seq_length():
            raise SpecError("retention", f"{retention.seen} tokens", f"the cache has seen {self.get_seq_length()}")
        kept = torch.tensor(retention.positions, dtype=torch.int64)
        for layer in self.full_layers:
            layer.retain(kept)

    def reset(self) -> None:
        """Forget everything: ready for a new prompt."""
        for layer in self.layers:
            layer.reset()
            _drop_tensors(layer)

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


def storage_bytes(cache: DynamicCache) -> int:
    """Bytes that the cache's tensors occupy, each memory block counted once."""
    blocks = {}
    for layer in cache.layers:
        for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None)):
            if isinstance(tensor, Tensor):
                block = tensor.untyped_storage()
                blocks[block.data_ptr()] = block.nbytes()
    return sum(blocks.values())
