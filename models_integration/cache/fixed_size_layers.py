"""Layers from which no token is evicted: sliding windows, and recurrent states (also beside keys and values).

A sliding-window layer can remove its last tokens, and can store positions with gaps.
"""

import copy
from collections.abc import Iterable
from functools import cache
from typing import Any, Self, cast

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicCache,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from models_integration.cache.positions import SlotOffset, StoredRows
from spec.errors import SpecError

__all__ = [
    "INDEXER_KEYS", "GappedSlidingLayer", "StatefulCache", "cache_sizes", "check_window_crop", "crop_window",
    "fill_states", "fresh_layer", "is_recurrent", "state_tensors",
]


_SIZES = ("num_hidden_layers", "layer_types", "num_key_value_heads", "head_dim", "hidden_size", "sliding_window")


def cache_sizes(config: PretrainedConfig) -> dict[str, object]:
    """Return the fields of a config that determine the sizes of a cache's layers. A missing field is None."""
    text = config.get_text_config(decoder=True)
    # In transformers 5.24, getattr raises for a field of which the layers of Gemma 4 have different values.
    return {name: vars(text).get(text.attribute_map.get(name, name)) for name in _SIZES}


# A layer of transformers 5.24 can have keys and a state in one object (LinearAttentionAndFullAttentionLayer). kvspec
# replaces the part with keys by a layer that evicts, so the cache stores the state itself.
class StatefulCache(DynamicCache):
    """DynamicCache in which a layer with keys and values can also have a recurrent state.

    Args:
        config: config of the model, or text config of a model that also accepts images.

    Attributes:
        beside: recurrent state of each layer that has keys and values too, by layer index. Each state is a layer
            without keys.
        sizes: sizes of the model's layers, by the name of the config's field.
    """

    def __new__(cls, config: PretrainedConfig | None = None) -> Self:
        """Make an object of the class that the model accepts. A copy has the class of the original."""
        return super().__new__(cls if config is None else cls.class_for(config))

    def __init__(self, config: PretrainedConfig) -> None:
        DynamicCache.__init__(self, config=config)
        self.sizes = cache_sizes(config)
        self.beside = {
            index: fresh_layer(layer) for index, layer in enumerate(self.layers)
            if type(layer) is LinearAttentionAndFullAttentionLayer
        }

    @classmethod
    def class_for(cls, config: PretrainedConfig) -> type[Self]:
        """Return this class, or the subclass that MiniMax accepts."""
        if config.model_type != "minimax" or issubclass(cls, _minimax_cache()):
            return cls
        return cast(type[Self], _of_minimax(cast(Any, cls)))

    @property
    def recurrent(self) -> list[Any]:
        """All recurrent states, as layers without keys."""
        return [*filter(is_recurrent, self.layers), *self.beside.values()]

    def branch(self) -> Self:
        """Return a cache that shares keys and values with this cache, and has separate states.

        A layer whose heads store different positions appends in place. Compact such a branch before it grows.
        """
        branch = copy.copy(self)
        branch.layers = _copies(self.layers)
        branch.beside = dict(zip(self.beside, _copies(self.beside.values()), strict=True))
        return branch

    def reorder_cache(self, beam_idx: Any) -> None:
        """Replace row i by row beam_idx[i]."""
        super().reorder_cache(beam_idx)
        for layer in self.beside.values():
            layer.reorder_cache(beam_idx)

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        """Append inputs of a convolution, and return all inputs of the convolution."""
        inputs: Tensor = self._state(layer_idx).update_conv_state(conv_states, *args, **kwargs)
        return inputs

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        """Replace a recurrent state."""
        state: Tensor = self._state(layer_idx).update_recurrent_state(recurrent_states, *args, **kwargs)
        return state

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the inputs of a convolution, or None before the first token."""
        layer = self._state(layer_idx)
        return layer.conv_states[state_idx] if layer.has_previous_state[state_idx] else None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return a recurrent state, or None before the first token."""
        layer = self._state(layer_idx)
        return layer.recurrent_states[state_idx] if layer.has_previous_state[state_idx] else None

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """Return the state of a layer of MiniMax, or None before the first token."""
        return cast(Tensor | None, self._state(layer_idx).recurrent_states[0])

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """Replace the state of a layer of MiniMax."""
        self.update_recurrent_state(linear_cache, layer_idx)

    def __len__(self) -> int:
        """Return the number of layers."""
        return len(self.layers)

    def _state(self, index: int) -> Any:
        return self.beside.get(index, self.layers[index])


def _minimax_cache() -> type:
    from transformers.models.minimax.modeling_minimax import MiniMaxCache

    return MiniMaxCache


@cache
def _of_minimax(kind: type[Any]) -> type[Any]:
    """Return a cache class that is also a subclass of MiniMax's cache class."""
    # `forward` of MiniMax raises ValueError for any other class (transformers 5.21 to 5.24).
    return type(kind.__name__, (kind, _minimax_cache()), {})


STATES = ("conv_states", "recurrent_states")
"""Names of the tensors of a recurrent layer."""
INDEXER_KEYS = "indexer_keys"


def is_recurrent(layer: object) -> bool:
    """Return True if a cache layer stores a recurrent state and no keys."""
    return isinstance(layer, LinearAttentionCacheLayerMixin) and not isinstance(layer, CacheLayerMixin)


def state_tensors(layer: Any) -> dict[str, Tensor]:
    """Return the tensors of a layer that are not keys or values: recurrent states, or the keys of an indexer."""
    if not is_recurrent(layer):
        indexer_keys = getattr(layer, "indexer_keys", None)
        return {} if indexer_keys is None else {INDEXER_KEYS: indexer_keys}
    states = {f"{name}.{number}": tensor for name in STATES for number, tensor in getattr(layer, name).items()}
    return {name: tensor for name, tensor in states.items() if tensor is not None}


def _copies(layers: Iterable[Any]) -> list[Any]:
    """Copy layers with shared keys and values but separate states, because a forward pass changes states in place."""
    copies = [copy.copy(layer) for layer in layers]
    for layer in filter(is_recurrent, copies):
        for name, value in vars(layer).items():
            if isinstance(value, dict):
                copied = {key: one.clone() if isinstance(one, Tensor) else one for key, one in value.items()}
                setattr(layer, name, copied)
    return copies


def fresh_layer(layer: Any) -> LinearAttentionLayer:
    """Return an empty recurrent layer that can replace `layer`."""
    return LinearAttentionLayer(number_of_states=layer.number_of_states)


def fill_states(layer: Any, states: dict[str, Tensor]) -> None:
    """Set the states of an empty layer from the result of `state_tensors`. Tensors with unknown names are ignored."""
    for name, tensor in states.items():
        kind, _, number = name.partition(".")
        if kind not in STATES:
            continue
        layer.lazy_initialization(**{kind: tensor}, state_idx=int(number))
        getattr(layer, kind)[int(number)].copy_(tensor)
        layer.has_previous_state[int(number)] = True


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


# DynamicSlidingWindowLayer of transformers 5.24 computes the size and offset of a mask from the number of tokens seen.
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
        gapped = cls(sliding_window=layer.sliding_window)
        stored = 0 if layer.keys is None else layer.keys.shape[-2]
        before = int(layer.get_seq_length())
        if isinstance(layer, GappedSlidingLayer):
            gapped.positions = layer.positions
        else:
            gapped.positions = torch.arange(before - stored, before, device="cpu")
        gapped.cumulative_length, gapped.first_kept = seen, _first_kept(layer)
        if layer.keys is not None and layer.values is not None:
            gapped.lazy_initialization(layer.keys, layer.values)
            gapped.keys, gapped.values = layer.keys, layer.values
            gapped._drop_unseen()
        return gapped

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
