"""kvpress as a subject of `kvspec verify --cache`: what its presses do with the cache, for kept sets that are given."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from kvpress import BasePress, ScorerPress  # type: ignore[import-not-found]
from kvpress.presses.base_press import SUPPORTED_MODELS  # type: ignore[import-not-found]
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, Gemma3ForCausalLM

__all__ = ["gathered", "masked"]

Kept = Mapping[int, Sequence[Sequence[int]]]


@dataclass
class Told(ScorerPress):  # type: ignore[misc]
    """Scores 1 for what is to be kept: ScorerPress gathers it, as most presses do. Sliding layers are left whole."""

    kept: Kept = field(default_factory=dict)

    def score(self, module: Any, hidden: Tensor, keys: Tensor, *_: Any) -> Tensor:
        scores = torch.zeros(keys.shape[:3])
        for head, own in enumerate(self.kept[module.layer_idx]):
            scores[:, head, list(own)] = 1.0
        return scores

    def compress(self, module: Any, hidden: Tensor, keys: Tensor, values: Tensor, *others: Any) -> Any:
        if module.layer_idx not in self.kept:
            return keys, values
        m, n = len(self.kept[module.layer_idx][0]), keys.shape[2]
        self.compression_ratio = 1 - (m + 0.5) / n if m < n else 0.0  # half a token more: floats round down
        return super().compress(module, hidden, keys, values, *others)


@dataclass
class Masked(BasePress):  # type: ignore[misc]
    """Says which keys are to be hidden, as AdaKVPress does: kvpress replaces them by fake keys."""

    kept: Kept = field(default_factory=dict)

    def compress(self, module: Any, hidden: Tensor, keys: Tensor, values: Tensor, *_: Any) -> Any:
        hidden_keys = torch.ones(keys.shape[:3], dtype=torch.bool)
        for head, own in enumerate(self.kept.get(module.layer_idx, ())):
            hidden_keys[:, head, list(own)] = False
        if module.layer_idx in self.kept and hidden_keys.any():
            module.masked_key_indices = torch.nonzero(hidden_keys, as_tuple=True)
        return keys, values


def _answer(press: Any, prompt: list[int], following: list[int], model: str) -> Tensor:
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if not isinstance(loaded, (*SUPPORTED_MODELS, Gemma3ForCausalLM)):
        raise NotImplementedError(f"kvpress does not list {type(loaded).__name__}")
    cache, n = DynamicCache(config=loaded.config), len(prompt)
    positions = torch.arange(n, n + len(following))[None]
    with torch.no_grad(), press(loaded):
        loaded(torch.tensor([prompt]), past_key_values=cache)
        logits: Tensor = loaded(torch.tensor([following]), past_key_values=cache, position_ids=positions).logits
    return logits[0]


def gathered(prompt: list[int], kept: Kept, following: list[int], model: str) -> Tensor:
    """ScorerPress: every head of every layer stores as many tokens, as one ratio gives it."""
    if len({len(own) for sets in kept.values() for own in sets}) > 1:
        raise NotImplementedError("every head stores as many tokens")
    return _answer(Told(kept=kept), prompt, following, model)


def masked(prompt: list[int], kept: Kept, following: list[int], model: str) -> Tensor:
    """Fake keys: any set, by head; nothing is freed."""
    return _answer(Masked(kept=kept), prompt, following, model)
