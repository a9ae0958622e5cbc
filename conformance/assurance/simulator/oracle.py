"""Eviction equals masking, told anew for every question: one forward over all that a row has read, without a cache.

Each query of each layer and KV head sees what was stored when it was read. Nothing here knows how a cache stores it.
"""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

__all__ = ["HEADS", "LAYERS", "VOCABULARY", "MaskedModel", "Row", "Sets", "tiny_model"]

VOCABULARY, LAYERS, HEADS = 61, 2, 2
Sets = list[list[list[int]]]
"""Stored positions of one row, by layer and KV head."""


def tiny_model() -> PreTrainedModel:
    """Two layers of four heads that share two keys, with weights so large that attention is not uniform."""
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=HEADS, max_position_embeddings=1024, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    ))
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data.copy_(noise * (1.2 / parameter.shape[1] ** 0.5))
    model.train(False)
    return model


@dataclass(frozen=True)
class Row:
    """What one row has read, and which positions each of its queries saw, (layers, H_kv, n, n)."""

    tokens: tuple[int, ...] = ()
    seen: Tensor = torch.zeros(LAYERS, HEADS, 0, 0, dtype=torch.bool)

    def read(self, tokens: Iterable[int], stored: Sets) -> "Row":
        """These come next, in one forward: each sees what is stored, and those before it."""
        return self._grown(tuple(tokens), stored)

    def splice(self, tokens: Sequence[int]) -> "Row":
        """A chunk comes next, which was read alone: its tokens see each other only."""
        return self._grown(tuple(tokens), [[[]] * HEADS] * LAYERS)

    def _grown(self, tokens: tuple[int, ...], stored: Sets) -> "Row":
        before, n = len(self.tokens), len(tokens)
        seen = torch.nn.functional.pad(self.seen, (0, n, 0, n))
        seen[:, :, before:, before:] = torch.ones(n, n, dtype=torch.bool).tril()
        for layer, sets in enumerate(stored):
            for head, positions in enumerate(sets):
                seen[layer, head, before:, positions] = True
        return Row(self.tokens + tokens, seen)

    def cropped(self, n: int) -> "Row":
        """Without the last n tokens."""
        left = max(0, len(self.tokens) - n)
        return Row(self.tokens[:left], self.seen[:, :, :left, :left])


class MaskedModel:
    """A copy of the model, each of whose layers is handed a mask for each head."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = copy.deepcopy(model)
        self._masks: Tensor | None = None
        self._asked = 0
        for layer in self._model.model.layers:
            layer.self_attn.register_forward_pre_hook(self._before, with_kwargs=True)

    def logits(self, row: Row) -> Tensor:
        """Of all that the row has read, (n, vocabulary)."""
        groups = self._model.config.num_attention_heads // HEADS
        self._masks, self._asked = row.seen.repeat_interleave(groups, dim=1), 0
        n = len(row.tokens)
        with torch.no_grad():
            output = self._model(
                input_ids=torch.tensor([row.tokens]), position_ids=torch.arange(n)[None], use_cache=False
            )
        assert self._asked == LAYERS
        found: Tensor = output.logits[0]
        return found

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._masks is not None
        self._asked += 1
        return args, {**kwargs, "attention_mask": self._masks[None, module.layer_idx]}  # type: ignore[index]
