"""Masks for layers that store different positions."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from models_integration.attention.capture import observing
from models_integration.attention.handover import check_readable
from models_integration.cache.dense_layer import RetainedLayer
from models_integration.cache.ragged_layer import RaggedLayer
from models_integration.cache.retained_cache import RetainedCache
from models_integration.model.architecture import attention_modules, describe
from spec.errors import SpecError

__all__ = ["additive", "layer_masks"]


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask (1, 1, queries, slots) that sdpa and eager attention read alike: 0 where visible, else the lowest."""
    lowest = torch.full(visible.shape, torch.finfo(dtype).min, dtype=dtype, device=visible.device)
    return lowest.masked_fill(visible, 0.0)[None, None]


@contextmanager
def layer_masks(model: PreTrainedModel, cache: RetainedCache) -> Iterator[None]:
    """Read a cache whose full-attention layers store different positions: each layer gets a mask of its own.

    transformers makes one mask for all full-attention layers, from the first of them. Where heads differ, each head
    attends alone.

    Raises:
        SpecError: for attention that is neither sdpa nor eager, and for a model that no policy serves, if heads differ.
    """
    if any(isinstance(layer, RaggedLayer) for layer in cache.layers):
        architecture = describe(model)
        check_readable(architecture, cache)
        with observing(architecture, cache):
            yield
        return
    if model.config._attn_implementation not in ("sdpa", "eager"):
        raise SpecError("attn_implementation", model.config._attn_implementation, "must be sdpa or eager")

    def own_mask(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        layer = cache.layers[cast(int, module.layer_idx)]
        # Families name the argument differently.
        if not isinstance(layer, RetainedLayer) or not any(value is cache for value in (*args, *options.values())):
            return args, options
        states = options["hidden_states"] if "hidden_states" in options else args[0]
        tokens = states.shape[1]
        stored = torch.cat([layer.stored_positions()[0], layer.next_positions(tokens)[0]])
        queries = stored[len(stored) - tokens :]
        mask = additive((stored <= queries[:, None]).to(states.device), states.dtype)
        return args, {**options, "attention_mask": mask}

    with ExitStack() as undo:
        undo.enter_context(cache.in_context())
        for module in attention_modules(model).values():
            undo.callback(module.register_forward_pre_hook(own_mask, with_kwargs=True).remove)
        yield
