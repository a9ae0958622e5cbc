"""Attention over layers whose heads store different tokens.

Attention runs once for each head, over views of the storage. If all heads of the batch store equally many tokens,
attention runs once for all heads.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward, use_gqa_in_sdpa

from models_integration.attention.masks import AttentionFunction, LayerMasks
from models_integration.cache.ragged_layer import RaggedLayer, rectangle
from spec.errors import SpecError

__all__ = ["ragged_attention"]


def ragged_attention(
    stock: AttentionFunction, module: nn.Module, query: Tensor, layer: RaggedLayer, masks: object,
    options: Mapping[str, Any],
) -> Tensor:
    """Return the output of the model's own attention over a ragged layer, (rows, q, H, d), without weights.

    Args:
        stock: the model's attention function, eager or SDPA.
        module: the attention module.
        query: queries after RoPE, (rows, H, q, d). The last q tokens of the layer are the tokens of the queries.
        layer: layer with all keys and values, including those of this forward pass.
        masks: masks that kvspec's mask function made for this forward pass.
        options: options that the module passed to the attention function.

    Raises:
        SpecError: if the caller passes a custom mask, because it does not distinguish heads.
    """
    if not isinstance(masks, LayerMasks):
        raise SpecError("attention_mask", type(masks).__name__, "must be 2D, or left out: heads store different tokens")
    as_one = rectangle(layer) if masks.plain and len(set(layer.rows.seen_at_compaction.tolist())) == 1 else None
    if as_one is not None:
        mask = masks.of(layer.head_rows(0), layer.layout.lengths[0], layer.padded_seen)
        return _attended(stock, module, query, *as_one, mask, options)
    G, outputs = query.shape[1] // layer.heads, []
    for segment, (keys, values) in enumerate(layer.segments()):
        row, head = divmod(segment, layer.heads)
        asked = query[row : row + 1, head * G : (head + 1) * G]
        mask = masks.of(layer.head_rows(segment), keys.shape[2], layer.padded_seen, row)
        own, given = _of_heads(module, head * G, (head + 1) * G, options)
        outputs.append(_attended(stock, own, asked, keys, values, mask, given))
    rows = [torch.cat(outputs[first : first + layer.heads], dim=2) for first in range(0, len(outputs), layer.heads)]
    return torch.cat(rows)


class _SinksOfHeads:
    """View of an attention module that has only the sinks of some heads."""

    def __init__(self, module: nn.Module, sinks: Tensor) -> None:
        self._module, self.sinks = module, sinks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _of_heads(
    module: nn.Module, first: int, stop: int, options: Mapping[str, Any],
) -> tuple[nn.Module, Mapping[str, Any]]:
    """Return module and options for the query heads from first to stop. If the model has sinks, each head has one."""
    sinks = getattr(module, "sinks", None)
    if not isinstance(sinks, Tensor):
        return module, options
    own = sinks[first:stop]
    return cast(nn.Module, _SinksOfHeads(module, own)), {**options, "s_aux": own}


def _attended(
    stock: AttentionFunction, module: nn.Module, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None,
    options: Mapping[str, Any],
) -> Tensor:
    """Run the model's attention, (rows, q, H, d). A single query of a group of heads becomes several rows of one head.

    Otherwise SDPA would repeat the keys for each head of the group, which takes twice the time on a CPU.
    """
    rows, H, q, d = query.shape
    grouped = q == 1 and mask is None and keys.shape[1] < H and use_gqa_in_sdpa(None, keys, values)
    if stock is not sdpa_attention_forward or not grouped:
        return stock(module, query, keys, values, mask, **options)[0]
    packed = query.reshape(rows, keys.shape[1], -1, d)
    output = stock(module, packed, keys, values, None, **{**options, "is_causal": False})[0]
    return output.transpose(1, 2).reshape(rows, 1, H, -1)
