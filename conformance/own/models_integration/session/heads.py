"""The oracle per layer and KV head: decoding from the full cache, with minus infinity on what each head evicted.

It shares no code with the storage under test: a mask for each query head is put before the attention of each layer.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from conformance.own.models_integration.session.families import MaskedReader

__all__ = ["MaskedHeads", "Sets"]

Sets = Mapping[int, Sequence[Sequence[int]]]
"""Kept positions by layer index, one sequence per KV head."""


class MaskedHeads(MaskedReader):
    """One prompt on a full, plain cache; `kept` says what the heads of the full-attention layers still see of it."""

    def __init__(self, model: PreTrainedModel, input_ids: Tensor, kept: Sets) -> None:
        self.model, self.cache = model, DynamicCache()
        n, heads = input_ids.shape[1], model.config.num_attention_heads
        self.visible = {layer: torch.zeros(heads, n, dtype=torch.bool) for layer in kept}
        for layer, sets in kept.items():
            group = heads // len(sets)
            for head, own in enumerate(sets):
                self.visible[layer][head * group : (head + 1) * group, list(own)] = True
        with torch.no_grad():
            self.prompt_logits = model(input_ids=input_ids, past_key_values=self.cache).logits

    def forget(self, layer: int, kept: Sequence[Sequence[int]]) -> None:
        """From now on the KV heads of this layer see these positions, of all that they were shown, and no others."""
        visible = self.visible[layer]
        group = len(visible) // len(kept)
        visible[:] = False
        for head, own in enumerate(kept):
            visible[head * group : (head + 1) * group, list(own)] = True

    def read(self, input_ids: Tensor) -> Tensor:
        """Logits of the next tokens, (1, q, vocabulary), which then belong to the past."""
        q, seen = input_ids.shape[1], next(iter(self.visible.values())).shape[1]
        for layer, visible in self.visible.items():
            self.visible[layer] = torch.cat([visible, torch.ones(len(visible), q, dtype=torch.bool)], dim=1)
        positions = torch.arange(seen, seen + q)[:, None]
        causal = torch.arange(seen + q)[None] <= positions
        hooks = [
            module.register_forward_pre_hook(self._before(causal), with_kwargs=True)
            for module in self.model.modules() if getattr(module, "layer_idx", None) in self.visible
            and type(module).__name__.endswith("Attention")
        ]
        assert len(hooks) == len(self.visible)
        try:
            with torch.no_grad():
                logits = self.model(
                    input_ids=input_ids, past_key_values=self.cache, position_ids=positions.T
                ).logits
        finally:
            for hook in hooks:
                hook.remove()
        assert isinstance(logits, Tensor)
        return logits

    def _before(self, causal: Tensor) -> Any:
        eager = self.model.config._attn_implementation == "eager"

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            mask = (causal[None] & self.visible[module.layer_idx][:, None])[None]  # type: ignore[index]
            if eager:
                mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
            assert "attention_mask" in kwargs
            return args, {**kwargs, "attention_mask": mask}

        return hook
