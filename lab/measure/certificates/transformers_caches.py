"""Caches of `transformers` as subjects of `kvspec verify --cache`: kept sets are gathered from their layers.

transformers does not evict; its users do, by writing what they keep into the layers. Each subject here is one way to
do that, judged as it is. Heads of one layer that keep other numbers of tokens, and layers that do, have no place in
these caches: refused.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, QuantizedCache, StaticCache

__all__ = ["dynamic", "dynamic_default_positions", "fp8", "static", "stored_equally"]

Kept = Mapping[int, Sequence[Sequence[int]]]
Gather = Callable[[Any, Tensor], None]
"""Leaves of a layer what stands at slots (1, H_kv, m)."""


def stored_equally(kept: Kept) -> dict[int, Tensor]:
    """Kept slots (1, H_kv, m) by layer.

    Raises:
        NotImplementedError: where heads or layers keep other numbers of tokens.
    """
    if len({len(own) for sets in kept.values() for own in sets}) > 1:
        raise NotImplementedError("every head stores as many tokens")
    return {layer: torch.tensor(sets)[None] for layer, sets in kept.items()}


def _gathered(stored: Tensor, slots: Tensor) -> Tensor:
    return stored.gather(2, slots[..., None].expand(*slots.shape, stored.shape[-1]))


def _answer(
    cache: Callable[[Any, int], Any], gather: Gather, prompt: list[int], kept: Kept, following: list[int], model: str,
    positions: bool = True,
) -> Tensor:
    slots = stored_equally(kept)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    n = len(prompt)
    past = cache(loaded.config, n + len(following))
    own = {"position_ids": torch.arange(n, n + len(following))[None]} if positions else {}
    with torch.no_grad():
        loaded(torch.tensor([prompt]), past_key_values=past)
        for layer, own_slots in slots.items():
            gather(past.layers[layer], own_slots)
        logits: Tensor = loaded(torch.tensor([following]), past_key_values=past, **own).logits
    return logits[0]


def _of_dynamic(layer: Any, slots: Tensor) -> None:
    layer.keys, layer.values = _gathered(layer.keys, slots), _gathered(layer.values, slots)


def _of_static(layer: Any, slots: Tensor) -> None:
    m = slots.shape[2]
    for stored in (layer.keys, layer.values):
        stored[:, :, :m] = _gathered(stored, slots)
    layer.cumulative_length.fill_(m)


def _of_fp8(layer: Any, slots: Tensor) -> None:
    for name in ("_quantized_keys", "_quantized_values"):
        stored, scale = getattr(layer, name)
        gathered = _gathered(stored.view(torch.uint8), slots).view(stored.dtype)
        setattr(layer, name, (gathered, scale))
    layer.cumulative_length = slots.shape[2]


def dynamic(prompt: list[int], kept: Kept, following: list[int], model: str) -> Tensor:
    """DynamicCache, with explicit `position_ids` behind it."""
    return _answer(lambda config, _: DynamicCache(config=config), _of_dynamic, prompt, kept, following, model)


def dynamic_default_positions(prompt: list[int], kept: Kept, following: list[int], model: str) -> Tensor:
    """The same, with positions left to the model, which counts what is stored."""
    return _answer(lambda config, _: DynamicCache(config=config), _of_dynamic, prompt, kept, following, model, False)


def static(prompt: list[int], kept: Kept, following: list[int], model: str) -> Tensor:
    """StaticCache with room for all tokens, with explicit `position_ids`."""
    return _answer(
        lambda config, tokens: StaticCache(config, max_cache_len=tokens), _of_static, prompt, kept, following, model
    )


def fp8(prompt: list[int], kept: Kept, following: list[int], model: str) -> Tensor:
    """QuantizedCache in 8-bit floating point, with explicit `position_ids`."""
    if "gemma3" in AutoModelForCausalLM.from_pretrained(model).config.model_type:
        raise NotImplementedError("QuantizedCache refuses sliding layers")
    return _answer(lambda config, _: QuantizedCache("fp8", config), _of_fp8, prompt, kept, following, model)
