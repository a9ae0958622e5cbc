"""Recurrent states beside keys and values: a policy leaves them alone, and a forward writes into them."""

import copy
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin, LinearAttentionLayer

__all__ = ["copy_layers", "fill_states", "fresh_layer", "is_recurrent", "state_tensors"]

STATES = ("conv_states", "recurrent_states")
"""The tensors of a recurrent layer, by number."""


def is_recurrent(layer: object) -> bool:
    """Whether a cache layer holds a state, and no keys."""
    return isinstance(layer, LinearAttentionCacheLayerMixin) and not isinstance(layer, CacheLayerMixin)


def state_tensors(layer: Any) -> dict[str, Tensor]:
    """The states of a layer by name; none for a layer of keys and values."""
    if not is_recurrent(layer):
        return {}
    states = {f"{name}.{number}": tensor for name in STATES for number, tensor in getattr(layer, name).items()}
    return {name: tensor for name, tensor in states.items() if tensor is not None}


def copy_layers(layers: Iterable[Any]) -> list[Any]:
    """Layers that share keys and values with these, and have their own states: a forward changes states in place."""
    copies = [copy.copy(layer) for layer in layers]
    for layer in filter(is_recurrent, copies):
        for name, value in vars(layer).items():
            if isinstance(value, dict):
                own = {key: one.clone() if isinstance(one, Tensor) else one for key, one in value.items()}
                setattr(layer, name, own)
    return copies


def fresh_layer(layer: Any) -> LinearAttentionLayer:
    """A recurrent layer that has read nothing, in place of this one."""
    return LinearAttentionLayer(number_of_states=layer.number_of_states)


def fill_states(layer: Any, states: dict[str, Tensor]) -> None:
    """Give a fresh layer the states of `state_tensors`."""
    for name, tensor in states.items():
        kind, _, number = name.partition(".")
        layer.lazy_initialization(**{kind: tensor}, state_idx=int(number))
        getattr(layer, kind)[int(number)].copy_(tensor)
        layer.has_previous_state[int(number)] = True
