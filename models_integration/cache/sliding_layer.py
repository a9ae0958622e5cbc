"""Sliding-window layers: removal of last tokens, and a layer whose stored positions have gaps."""

import torch
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

from models_integration.cache.positions import SlotOffset, StoredRows
from spec.errors import SpecError

__all__ = ["GappedSlidingLayer", "check_window_crop", "crop_window"]


def check_window_crop(layer: DynamicSlidingWindowLayer, tokens_to_remove: int) -> None:
    """Check that the layer stores the window that is needed after the last tokens are removed.

    Raises:
        SpecError: if the layer has freed tokens of this window.
    """
    first, remaining = _first_kept(layer), int(layer.get_seq_length()) + tokens_to_remove
    if max(0, remaining - layer.sliding_window + 1) < first:
        reason = f"sliding-window layers have freed the tokens before position {first}: use a new cache"
        raise SpecError("tokens_to_remove", tokens_to_remove, reason)


def crop_window(layer: DynamicSlidingWindowLayer, tokens_to_remove: int) -> None:
    """Remove the last tokens, and keep the tokens that the next query can attend to. Call `check_window_crop` first."""
    if layer.keys is None or layer.values is None:
        return
    layer.cumulative_length += tokens_to_remove
    end = layer.keys.shape[-2] + tokens_to_remove
    start = max(0, end - layer.sliding_window + 1)
    if isinstance(layer, GappedSlidingLayer):
        start, end = 0, int((layer.positions < layer.cumulative_length).sum())
        layer.positions = layer.positions[:end]
    layer.keys, layer.values = layer.keys[:, :, start:end], layer.values[:, :, start:end]


def _first_kept(layer: DynamicSlidingWindowLayer) -> int:
    """Return the position after the last freed token, or 0 if no token was freed."""
    if isinstance(layer, GappedSlidingLayer):
        return layer.first_kept
    return int(layer.get_seq_length()) - (0 if layer.keys is None else layer.keys.shape[-2])


class GappedSlidingLayer(DynamicSlidingWindowLayer):  # type: ignore[no-untyped-call]  # an untyped __init_subclass__
    """Sliding-window layer that has not processed some of the tokens seen.

    transformers measures a window in slots, so the window would extend over the gap. This layer measures positions.
    """

    positions: Tensor
    """Absolute positions of the slots, (stored,)."""
    first_kept = 0
    """Position after the last token that was processed and freed."""

    @classmethod
    def after(cls, layer: DynamicSlidingWindowLayer, seen: int) -> "GappedSlidingLayer":
        """Return the layer after the session has seen `seen` tokens, without new tokens in this layer."""
        made = cls(sliding_window=layer.sliding_window)
        stored = 0 if layer.keys is None else layer.keys.shape[-2]
        before = int(layer.get_seq_length())
        if isinstance(layer, GappedSlidingLayer):
            made.positions = layer.positions
        else:
            made.positions = torch.arange(before - stored, before, device="cpu")
        made.cumulative_length, made.first_kept = seen, _first_kept(layer)
        if layer.keys is not None and layer.values is not None:
            made.lazy_initialization(layer.keys, layer.values)
            made.keys, made.values = layer.keys, layer.values
            made._drop_unseen()
        return made

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values of new tokens. Return all keys and values that a new token can attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        tokens = key_states.shape[-2]
        keys, values = torch.cat([self.keys, key_states], -2), torch.cat([self.values, value_states], -2)
        later = torch.arange(self.cumulative_length, self.cumulative_length + tokens, device="cpu")
        self.positions = torch.cat([self.positions, later])
        self.cumulative_length += tokens
        self.keys, self.values = keys, values
        self._drop_unseen()
        return keys, values

    def _drop_unseen(self) -> None:
        """Free the tokens that no query from position `cumulative_length` on can attend to."""
        assert self.keys is not None
        assert self.values is not None
        first = int((self.positions <= self.cumulative_length - self.sliding_window).sum())
        if first:
            self.first_kept = int(self.positions[first - 1]) + 1
        self.keys, self.values = self.keys[:, :, first:], self.values[:, :, first:]
        self.positions = self.positions[first:]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of slots after `query_length` more tokens, and the offset from slots to positions."""
        stored, seen = len(self.positions), self.cumulative_length
        rows = StoredRows(self.positions[None], torch.tensor([seen], device="cpu"))
        return stored + query_length, SlotOffset(seen - stored, rows)

    def reset(self) -> None:
        """Remove all tokens."""
        super().reset()
        self.positions, self.first_kept = torch.empty(0, dtype=torch.int64, device="cpu"), 0
