"""CacheBlend: the model reads some of the inserted tokens again, with all earlier tokens as context."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from models_integration.archive.layer_masks import additive
from models_integration.cache.dense_layer import DenseLayer
from models_integration.cache.retained_cache import RetainedCache
from models_integration.model.architecture import restored_rotation
from models_integration.model.cache_argument import cache_name
from models_integration.model.rotation import plain_layers, prefilled
from reference.injection.splicing import most_deviating
from spec.errors import SpecError

__all__ = ["blend"]


def blend(model: PreTrainedModel, cache: RetainedCache, ids: Sequence[int], start: int, r: float) -> list[int]:
    """Recompute a share r of the tokens from `start` on, and return their positions.

    These tokens have the stored keys that differ most from fresh keys (IN-CACHEBLEND), in the second layer. In each
    layer a recomputed token attends to recomputed keys of recomputed tokens, and to stored keys of all other tokens.
    CacheBlend computes the fresh keys of two layers. This function runs the whole model.

    Args:
        cache: cache after `splice`, with one row and without evicted tokens.
        ids: ids of all tokens that the cache has seen.

    Raises:
        SpecError: if r is outside [0, 1], or if a layer does not store all tokens. The cache has not changed.
    """
    layers: list[Any] = cache.layers
    if not all(isinstance(layer, DenseLayer) and layer.stored_length == len(ids) for layer in layers):
        raise SpecError("cache", type(cache).__name__, f"must store all {len(ids)} tokens in every layer")
    with torch.no_grad(), restored_rotation(model):
        fresh = plain_layers(prefilled(model, ids))
        second = min(1, len(fresh) - 1)
        spliced, new = (_float64(each[second].keys[0, :, start:]) for each in (layers, fresh))
        if chosen := most_deviating(spliced, new, start, r):
            for layer, again in zip(layers, plain_layers(_read_again(model, cache, ids, chosen)), strict=True):
                for stored, read in ((layer.keys, again.keys), (layer.values, again.values)):
                    stored[0, :, chosen] = read[0, :, len(ids) :]
    return chosen


def _read_again(
    model: PreTrainedModel, cache: RetainedCache, ids: Sequence[int], chosen: Sequence[int],
) -> DynamicCache:
    """Return a plain copy of the cache, followed by the recomputed keys and values of the chosen tokens."""
    copied = DynamicCache()
    for index, layer in enumerate(plain_layers(cache)):
        copied.update(layer.keys, layer.values, index)
    at, every = torch.tensor(chosen, device=model.device), torch.arange(len(ids), device=model.device)
    stored = (every <= at[:, None]) & ~torch.isin(every, at)
    visible = additive(torch.cat([stored, at <= at[:, None]], dim=1), plain_layers(cache)[0].keys.dtype)
    given = torch.tensor([ids], device=model.device)[:, at]
    model(
        input_ids=given, position_ids=at[None], attention_mask=visible, use_cache=True, **{cache_name(model): copied},
    )
    return copied


def _float64(x: Tensor) -> np.ndarray[tuple[int, int, int], np.dtype[np.float64]]:
    return x.double().cpu().numpy()
