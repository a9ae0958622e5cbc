"""Presses of kvpress that renumber, as subjects of `kvspec verify --cache FILE:NAME --positions renumbered`.

Both presses rotate the kept keys to the positions 0, 1, ..., and get the kept sets as scores. As in the pipeline of
kvpress 0.5.5, the next token has the number of stored tokens as its position.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from kvpress import FinchPress, KeyRerotationPress, KnormPress  # type: ignore[import-not-found]
from kvpress.presses.base_press import SUPPORTED_MODELS  # type: ignore[import-not-found]
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, Gemma3ForCausalLM

__all__ = ["finch", "rerotated"]

Kept = Mapping[int, Sequence[Sequence[int]]]


def _scores(module: Any, keys: Tensor, kept: Kept) -> Tensor:
    """Return 1 for tokens to keep, and 0 for other tokens."""
    scores = torch.zeros(keys.shape[:3])
    for head, positions in enumerate(kept[module.layer_idx]):
        scores[:, head, list(positions)] = 1.0
    return scores


@dataclass
class _Given(KnormPress):  # type: ignore[misc]
    """Press whose scores are the kept sets."""

    kept: Kept = field(default_factory=dict)

    def score(self, module: Any, hidden: Tensor, keys: Tensor, *_: Any) -> Tensor:
        return _scores(module, keys, self.kept)


@dataclass
class _Rerotated(KeyRerotationPress):  # type: ignore[misc]
    """KeyRerotationPress on the full-attention layers."""

    def compress(self, module: Any, hidden: Tensor, keys: Tensor, values: Tensor, *others: Any) -> Any:
        if module.layer_idx not in self.press.kept:
            return keys, values
        self.compression_ratio = _ratio(self.press.kept[module.layer_idx], keys)
        return super().compress(module, hidden, keys, values, *others)


@dataclass
class _Finch(FinchPress):  # type: ignore[misc]
    """FinchPress on the full-attention layers, without its delimiter in the prompt."""

    kept: Kept = field(default_factory=dict)

    def score(self, module: Any, hidden: Tensor, keys: Tensor, *_: Any) -> Tensor:
        return _scores(module, keys, self.kept)

    def compress(self, module: Any, hidden: Tensor, keys: Tensor, values: Tensor, *others: Any) -> Any:
        if module.layer_idx not in self.kept:
            return keys, values
        self.compression_ratio = _ratio(self.kept[module.layer_idx], keys)
        return super().compress(module, hidden, keys, values, *others)


def _ratio(sets: Sequence[Sequence[int]], keys: Tensor) -> float:
    m, n = len(sets[0]), keys.shape[2]
    return 1 - (m + 0.5) / n if m < n else 0.0  # half a token more, because floats round down


def _answer(press: Any, prompt: list[int], kept: Kept, following: list[int], model: str) -> Tensor:
    sizes = {len(tokens) for sets in kept.values() for tokens in sets}
    if len(sizes) > 1:
        raise NotImplementedError("every head stores as many tokens")
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if not isinstance(loaded, (*SUPPORTED_MODELS, Gemma3ForCausalLM)):
        raise NotImplementedError(f"kvpress does not list {type(loaded).__name__}")
    if len(kept) < loaded.config.num_hidden_layers and sizes != {len(prompt)}:
        raise NotImplementedError("layers with a sliding window are not rotated, so their positions would differ")
    cache, (first,) = DynamicCache(config=loaded.config), sizes
    positions = torch.arange(first, first + len(following))[None]
    with torch.no_grad(), press(loaded):
        loaded(torch.tensor([prompt]), past_key_values=cache)
        logits: Tensor = loaded(torch.tensor([following]), past_key_values=cache, position_ids=positions).logits
    return logits[0]


def rerotated(prompt: list[int], kept: Kept, following: list[int], model: str) -> Tensor:
    """KeyRerotationPress around a press that scores the kept sets."""
    return _answer(_Rerotated(_Given(kept=kept)), prompt, kept, following, model)


def finch(prompt: list[int], kept: Kept, following: list[int], model: str) -> Tensor:
    """FinchPress with its default `rerotate_keys=True`."""
    press = _Finch(kept=kept)
    press.window_size, press.delimiter_token_id = 1, -1
    return _answer(press, prompt, kept, following, model)
