"""A later segment under a policy without states: what each kept set stores by then, and what its scorer is shown."""

import torch
from torch import Tensor

from models_integration.attention.capture import Recorder, shown_columns
from models_integration.cache.dense_layer import RetainedLayer
from models_integration.cache.positions import EMPTY
from models_integration.cache.ragged_layer import RaggedLayer
from models_integration.cache.retained_cache import RetainedCache
from models_integration.model.architecture import Architecture
from spec.arrays import IntVector
from spec.policy import Observation
from spec.retention import Granularity

__all__ = ["of_all_sets", "of_each_set"]


def keys_of(layer: RetainedLayer, row: int, heads: slice) -> tuple[Tensor, Tensor]:
    """Keys and values (heads, stored, d) of KV heads of one row that store as many tokens: views, where they can be."""
    if isinstance(layer, RaggedLayer):
        own = layer.segments()[row * layer.heads : (row + 1) * layer.heads][heads]
        return torch.cat([keys[0] for keys, _ in own]), torch.cat([values[0] for _, values in own])
    assert layer.keys is not None
    assert layer.values is not None
    stored = layer.stored_positions()
    shown = stored[row if len(stored) > 1 else 0] != EMPTY
    return shown_columns(layer.keys[row, heads], shown), shown_columns(layer.values[row, heads], shown)


def of_all_sets(
    cache: RetainedCache, recorder: Recorder, architecture: Architecture, groups: int, row: int,
    queries: Tensor | None = None,
) -> Observation:
    """One row, where the heads of a layer store as many tokens; `queries` are the columns (n,) that are its tokens'."""
    layers = architecture.full_layers if recorder.needs.layers == "all" else tuple(recorder.seen)
    every = slice(None)
    views = {at: recorder.view(at, row, every, *keys_of(_layer(cache, at), row, every), queries) for at in layers}
    return Observation(_seen(cache, row), groups, None, views)


def of_each_set(
    cache: RetainedCache, recorder: Recorder, architecture: Architecture, granularity: Granularity, row: int,
) -> tuple[list[IntVector], list[Observation]]:
    """Of each kept set of one row: the positions that it stores, and its layer (and head) alone."""
    live: list[IntVector] = []
    shown = []
    for at in architecture.full_layers:
        layer = _layer(cache, at)
        G = architecture.config.num_attention_heads // layer.heads
        sets = [slice(head, head + 1) for head in range(layer.heads)]
        for own in sets if granularity is Granularity.HEAD else [slice(0, layer.heads)]:
            asked = slice(own.start * G, own.stop * G)
            view = recorder.view(at, row, asked, *keys_of(layer, row, own))
            live.append(layer.head_positions(row, own.start).numpy())
            shown.append(Observation(_seen(cache, row), 1, None, {at: view}))
    return live, shown


def _layer(cache: RetainedCache, index: int) -> RetainedLayer:
    layer = cache.layers[index]
    assert isinstance(layer, RetainedLayer)
    return layer


def _seen(cache: RetainedCache, row: int) -> int:
    tokens = cache.full_layers[0].next_positions(1)[:, 0]
    return int(tokens[row if len(tokens) > 1 else 0])
