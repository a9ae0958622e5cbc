"""Attention masks for layers that store different positions, for use outside a policy's context."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from models_integration.attention.capture import observing, untraced
from models_integration.attention.handover import check_readable
from models_integration.cache.dense_layer import RetainedLayer
from models_integration.cache.ragged_layer import RaggedLayer
from models_integration.cache.retained_cache import RetainedCache
from models_integration.model.architecture import attention_modules, decoder_inputs, decoders_of, describe
from models_integration.model.cache_argument import cache_name, with_one_cache
from models_integration.model.layer_kinds import cache_owners
from models_integration.model.seams import attention_of
from models_integration.session.admission import check_axes, check_forward
from models_integration.session.inputs import OPEN, accepted, later_span
from spec.errors import SpecError

__all__ = ["additive", "layer_masks"]


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an additive mask (1, 1, queries, slots) for sdpa and eager: 0 if visible, otherwise the lowest number."""
    lowest = torch.full(visible.shape, torch.finfo(dtype).min, dtype=dtype, device=visible.device)
    return lowest.masked_fill(visible, 0.0)[None, None]


@contextmanager
def layer_masks(model: PreTrainedModel, cache: RetainedCache) -> Iterator[None]:
    """Context manager for a cache whose full-attention layers store different positions. Each layer has its own mask.

    Without kvspec, transformers uses the mask of the first full-attention layer for all of them. If heads store
    different positions, attention runs separately for each head. Every forward pass inside the block must use this
    cache. Position ids and masks must match the tokens seen, as inside a policy's context.

    Raises:
        SpecError: if the attention is neither sdpa nor eager, if heads differ and kvspec does not support the model, or
            if heads agree and rows differ. A forward pass raises the error for a different cache, for inputs that do
            not match the cache, and for padding. Nothing has changed then.
    """
    ragged = any(isinstance(layer, RaggedLayer) for layer in cache.layers)
    if not ragged and attention_of(model.config) not in ("sdpa", "eager"):
        raise SpecError("attn_implementation", attention_of(model.config), "must be sdpa or eager")
    if not ragged and not all(layer.rows.shared for layer in cache.full_layers):
        raise SpecError("past_key_values", "rows that differ", "can be used only inside `with policy(model)`")
    decoder, text = decoders_of(model)
    vocabulary = cast(Tensor, model.get_input_embeddings().weight).shape[0]
    with ExitStack() as undo:
        agreeing = untraced(_agreeing(decoder, cache, vocabulary))
        undo.callback(decoder.register_forward_pre_hook(agreeing, with_kwargs=True).remove)
        if ragged:
            architecture = describe(model)
            check_readable(architecture, cache)
            undo.enter_context(observing(architecture, cache))
        else:
            undo.enter_context(cache.in_context())
            owners = cache_owners(model.config.get_text_config(decoder=True))
            for index, module in attention_modules(text).items():
                # A model of transformers 5.24 passes one mask to all its full-attention layers.
                with_mask = _masked(cache, owners[index])
                undo.callback(module.register_forward_pre_hook(with_mask, with_kwargs=True).remove)
        yield


def _agreeing(
    decoder: nn.Module, cache: RetainedCache, vocabulary: int,
) -> Callable[..., tuple[tuple[()], dict[str, object]]]:
    """Return a hook that, before a forward pass, checks that the inputs match the cache and adds missing inputs."""
    names, cache_argument = tuple(inspect.signature(decoder.forward).parameters), cache_name(decoder)
    inputs = decoder_inputs(decoder)

    def agreeing(
        _: nn.Module, args: tuple[object, ...], kwargs: dict[str, object],
    ) -> tuple[tuple[()], dict[str, object]]:
        given = with_one_cache({**dict(zip(names, args, strict=False)), **kwargs})
        if (other := given.get("past_key_values")) is not cache:
            raise SpecError("past_key_values", type(other).__name__, "must be the cache that layer_masks was given")
        arguments = check_forward(given, getattr(cast(PreTrainedModel, decoder).config, "use_cache", True))
        check_axes(decoder, arguments)
        span = later_span(vocabulary, arguments, cache, OPEN)
        if span.padded:
            raise SpecError("attention_mask", "zeros", "must be all ones: layer_masks does not support padding")
        others = {name: value for name, value in arguments.items() if name != "past_key_values"}
        return (), {**accepted(span.defaults, inputs), **others, cache_argument: cache}

    return agreeing


def _masked(cache: RetainedCache, index: int) -> Callable[..., tuple[tuple[object, ...], dict[str, object]]]:
    """Return a hook that, before a layer attends, sets the mask for the layer's stored tokens."""

    def with_mask(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        layer = cache.layers[index]
        if not isinstance(layer, RetainedLayer):
            return args, options
        states = options["hidden_states"] if "hidden_states" in options else args[0]
        tokens = states.shape[1]
        stored = torch.cat([layer.stored_positions()[0], layer.next_positions(tokens)[0]])
        queries = stored[len(stored) - tokens :]
        mask = additive((stored <= queries[:, None]).to(states.device), states.dtype)
        return args, {**options, "attention_mask": mask}

    return with_mask
