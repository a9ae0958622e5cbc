"""q and k of a layer of a Llama, computed from the layer's own input: nothing of the integration's capture."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

__all__ = ["Observed", "Seen"]


@dataclass
class Seen:
    """What one forward attends with: q (H, n, d) and the new keys (H_kv, n, d)."""

    q: Any = None
    new_k: Any = None


@dataclass
class Observed:
    """Watches one row of a Llama's layer, and remembers every key that it ever made."""

    model: PreTrainedModel
    row: int = 0
    layer: int = 0
    keys: list[Any] = field(default_factory=list)

    @contextmanager
    def forward(self) -> Iterator[Seen]:
        """What the forwards inside the block attend with, one after the other."""
        seen = Seen()
        attention: Any = self.model.get_submodule(f"model.layers.{self.layer}.self_attn")

        def look(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden, (cos, sin) = kwargs["hidden_states"], kwargs["position_embeddings"]
            shape = (*hidden.shape[:-1], -1, module.head_dim)
            with torch.no_grad():
                q, k = module.q_proj(hidden).view(shape), module.k_proj(hidden).view(shape)
                q, k = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
            new = [tensor[self.row].numpy() for tensor in (q, k)]
            seen.q = new[0] if seen.q is None else np.concatenate([seen.q, new[0]], axis=1)
            seen.new_k = new[1] if seen.new_k is None else np.concatenate([seen.new_k, new[1]], axis=1)
            self.keys.extend(new[1].transpose(1, 0, 2))

        handle = attention.register_forward_pre_hook(look, with_kwargs=True)
        try:
            yield seen
        finally:
            handle.remove()

    def stored(self, positions: Any, seen: Seen) -> Any:
        """Keys of stored positions, and behind them those of the forwards just seen."""
        old = [self.keys[i][:, None] for i in positions.tolist()]
        return np.concatenate([*old, seen.new_k], axis=1)
