"""The oracle: one forward of a whole text without any cache, where later queries do not see the evicted keys.

It shares no code with the package. Each attention module is handed a mask of its own, so that the kept sets of layers
and heads may differ.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

KeptSets = Sequence[Sequence[Sequence[int]]]
"""The kept positions of each layer and KV head."""


def masked_logits(model: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int], kept: KeptSets) -> Tensor:
    """Logits of each token of the answer, (tokens, vocabulary), which are read behind the prompt and one another."""
    text = torch.tensor([[*prompt, *answer[:-1]]])
    decoder: Any = model.model
    with ExitStack() as undo, torch.no_grad():
        for layer, heads in zip(decoder.layers, kept, strict=True):
            mask = _mask(len(prompt), text.shape[1], heads, layer.self_attn.num_key_value_groups)
            handle = layer.self_attn.register_forward_pre_hook(_masking(mask), with_kwargs=True)
            undo.callback(handle.remove)
        logits: Tensor = model(text, use_cache=False).logits[0, len(prompt) - 1 :]
    return logits


def _mask(prompt: int, tokens: int, heads: Sequence[Sequence[int]], queries_per_head: int) -> Tensor:
    """Minus infinity on what a query does not see, (1, H, tokens, tokens)."""
    mask = torch.full((len(heads), tokens, tokens), -torch.inf).triu(1)
    for own, kept in zip(mask, heads, strict=True):
        gone = sorted(set(range(prompt)) - set(kept))
        own[prompt:, gone] = -torch.inf
    return mask.repeat_interleave(queries_per_head, dim=0)[None]


def _masking(mask: Tensor) -> Any:
    def hook(module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Any:
        return args, {**kwargs, "attention_mask": mask}

    return hook
