"""Eviction from the stored keys and values of a request in LMCache.

LMCache 0.5.6 stores the keys and values of a text as [2, L, T, D]. D are the channels of all KV heads. An engine reads
a stored text as the tokens 0, 1, ..., so the kept keys are turned to these positions.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol
from uuid import uuid4

import torch
from torch import Tensor
from transformers import PreTrainedModel

from models_integration.cache.compaction import kept_by_layer
from models_integration.cache.renumbering import LayerNumbering, numbering_of
from models_integration.model.architecture import Architecture, describe
from spec.errors import SpecError
from spec.retention import Retention
from spec.validate import check_seconds

__all__ = ["RequestStream", "evict"]

Editor = Callable[[Mapping[Any, Tensor], list[int]], tuple[Tensor, list[int]]]


class RequestStream(Protocol):
    """The attributes of LMCache's `LMCacheRequestStream` that `evict` uses."""

    tokens: list[int]
    cache_salt: str
    # LMCache 0.5.6 has no public names for the contexts, and for the tokens after the last whole chunk.
    _contexts: Mapping[Any, Any]
    _suffix_tokens: list[int]

    def modify_kv(self, fn: Editor, timeout: float = 30.0) -> None: ...


def evict(stream: RequestStream, retention: Retention, model: PreTrainedModel, timeout: float = 30.0) -> None:
    """Keep the tokens of a retention in the stored chunks of a request, at the positions 0, 1, ...

    After the call, the request has the ids of the kept tokens and a new `cache_salt`. LMCache finds stored keys by ids
    and salt. With the old salt, a different text with these ids would get the edited keys.

    Args:
        stream: `LMCacheRequestStream` after `generate` has stored the text.
        retention: kept positions. `retention.seen` is the number of tokens in whole chunks of the text.
        model: model whose keys are stored. The weights are used to recognise the rotation.
        timeout: seconds to wait for the stored keys.

    Raises:
        SpecError: if the timeout is not a positive, finite number, if the kept tokens do not fill whole chunks, or if
            two sets have different sizes. Also if the retention is about a different number of tokens, or if keys of
            the model cannot be turned. The request is unchanged.
    """
    check_seconds("timeout", timeout)
    _check_sizes(retention, next(iter(stream._contexts.values())).chunk_size, len(stream.tokens))
    architecture = describe(model)
    if architecture.latent or len(architecture.full_layers) != architecture.config.num_hidden_layers:
        raise SpecError("model", architecture.name, "must store keys of all tokens in each layer")
    numbering = numbering_of(model, architecture)
    turns = {index: LayerNumbering(numbering, turn) for index, turn in numbering.layers.items()}
    salt, suffix = stream.cache_salt, stream._suffix_tokens

    def edit(tensors: Mapping[Any, Tensor], tokens: list[int]) -> tuple[Tensor, list[int]]:
        (stored,) = (tensor for kind, tensor in tensors.items() if kind.value == "kv")
        edited = _kept(stored, retention, architecture, turns)
        stream.cache_salt = uuid4().hex  # LMCache retrieves with the old salt before, and stores with the new one after
        return edited, [tokens[position] for position in retention.group(0).tolist()]

    try:
        stream.modify_kv(edit, timeout=timeout)
    except BaseException:
        stream.cache_salt, stream._suffix_tokens = salt, suffix
        raise


def _check_sizes(retention: Retention, chunk: int, tokens: int) -> None:
    """Check that each kept set fills whole chunks, and that the retention is about the whole chunks of the text.

    Raises:
        SpecError: if this is not so.
    """
    whole = tokens // chunk * chunk
    if retention.seen != whole:
        reason = f"must be {whole}, the tokens in whole chunks of {chunk}: decide about the first {whole} tokens"
        raise SpecError("retention.seen", retention.seen, reason)
    sizes = sorted({len(retention.group(group)) for group in range(retention.groups)})
    if len(sizes) > 1:
        reason = "must be equal, because LMCache stores equally many tokens in all layers and heads"
        raise SpecError("retention", f"sets of {sizes[0]} to {sizes[-1]} tokens", reason)
    if sizes[0] % chunk or not sizes[0]:
        below = sizes[0] // chunk * chunk
        budgets = f"budget={below + chunk}" if not below else f"budget={below} or budget={below + chunk}"
        raise SpecError("retention", f"{sizes[0]} tokens", f"must fill whole chunks of {chunk}: type {budgets}")


def _kept(
    stored: Tensor, retention: Retention, architecture: Architecture, turns: Mapping[int, LayerNumbering],
) -> Tensor:
    """Return the kept keys and values [2, L, T', D], with the keys turned once to the positions 0, 1, ..."""
    layers, config = architecture.full_layers, architecture.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if stored.shape[1:3] != (len(layers), retention.seen) or stored.shape[3] % heads:
        wanted = f"[2, {len(layers)}, {retention.seen}, channels of {heads} heads]"
        raise SpecError("stream", f"stored keys of shape {list(stored.shape)}", f"must have the shape {wanted}")
    result = []
    for index, sets in kept_by_layer(retention, layers, layers, heads).items():
        at = torch.stack(sets).to(stored.device)
        by_head = stored[:, index].reshape(2, retention.seen, heads, -1).transpose(1, 2)
        keys, values = by_head.take_along_dim(at[None, :, :, None], dim=2)
        if index in turns:
            keys = turns[index].turned(keys, at, torch.arange(at.shape[1], device=at.device).expand_as(at))
        result.append(torch.stack([keys, values]).transpose(1, 2).flatten(2))
    return torch.stack(result, dim=1)
