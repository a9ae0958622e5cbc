"""A sliding-window layer whose past has gaps: its window counts positions."""


import torch
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

from models_integration.cache.positions import SlotOffset, StoredRows

__all__ = ["GappedSlidingLayer"]


class GappedSlidingLayer(DynamicSlidingWindowLayer):  # type: ignore[no-untyped-call]  # an untyped __init_subclass__
    """A sliding-window layer that has not read some of the tokens seen.

    transformers counts a window in slots, which would stretch it over the gap. Here it counts positions.
    """

    positions: Tensor
    """Absolute positions behind the slots, (stored,)."""

    @classmethod
    def after(cls, layer: DynamicSlidingWindowLayer, seen: int) -> "GappedSlidingLayer":
        """The same layer once `seen` tokens are behind the session, of which it has read no more than it had."""
        made = cls(sliding_window=layer.sliding_window)
        stored = 0 if layer.keys is None else layer.keys.shape[-2]
        before = int(layer.get_seq_length())
        if isinstance(layer, GappedSlidingLayer):
            made.positions = layer.positions
        else:
            made.positions = torch.arange(before - stored, before)
        made.cumulative_length = seen
        if layer.keys is not None and layer.values is not None:
            made.lazy_initialization(layer.keys, layer.values)
            made.keys, made.values = layer.keys, layer.values
            made._drop_unseen()
        return made

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values of new tokens; all that some of them may see."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        tokens = key_states.shape[-2]
        keys, values = torch.cat([self.keys, key_states], -2), torch.cat([self.values, value_states], -2)
        later = torch.arange(self.cumulative_length, self.cumulative_length + tokens)
        self.positions = torch.cat([self.positions, later])
        self.cumulative_length += tokens
        self.keys, self.values = keys, values
        self._drop_unseen()
        return keys, values

    def _drop_unseen(self) -> None:
        """Free what the next query, at position `cumulative_length`, and all after it cannot see."""
        assert self.keys is not None
        assert self.values is not None
        first = int((self.positions <= self.cumulative_length - self.sliding_window).sum())
        self.keys, self.values = self.keys[:, :, first:], self.values[:, :, first:]
        self.positions = self.positions[first:]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Slots after `query_length` more tokens, and the offset that leads to their positions."""
        stored, seen = len(self.positions), self.cumulative_length
        rows = StoredRows(self.positions[None], torch.tensor([seen]))
        return stored + query_length, SlotOffset(seen - stored, rows)

    def reset(self) -> None:
        """Forget everything: as new."""
        super().reset()
        self.positions = torch.empty(0, dtype=torch.int64)
