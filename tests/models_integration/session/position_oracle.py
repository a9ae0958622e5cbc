"""Oracle of rotary positions: attention over raw keys, with a written position for each layer, head and token.

The model computes queries and keys at position 0, so a rotation has no effect. The oracle rotates them itself, in
float64, and stores raw keys with two arrays: positions of the text, and rotary positions.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

NAME = "position_oracle"
_READERS: dict[int, "Oracle"] = {}


class Oracle:
    """One row of text in a model.

    Args:
        model: a model with rotary positions.
        rule: "kept" or "renumbered".
        interleaved: True if the model rotates neighbouring channels.
        first: first rotated channel of a head.
    """

    def __init__(
        self, model: PreTrainedModel, rule: str = "renumbered", interleaved: bool = False, first: int = 0,
    ) -> None:
        self.model, self.rule, self.interleaved, self.seen = deepcopy(model), rule, interleaved, 0
        self.first = first
        AttentionInterface.register(NAME, _attention)
        self.model.set_attn_implementation(NAME)
        self.raw: dict[int, list[list[Tensor]]] = {}
        """Raw keys, values, positions of the text and rotary positions of each KV head, by layer."""

    def read(self, ids: Sequence[int]) -> Tensor:
        """Return the logits (n, vocabulary) of the next tokens."""
        tokens = torch.tensor([list(ids)])
        _READERS[0] = self
        with torch.no_grad():
            logits = self.model(tokens, position_ids=torch.zeros_like(tokens), use_cache=False).logits
        self.seen += len(ids)
        actual: Tensor = logits[0]
        return actual

    def evict(self, kept: Mapping[int, Sequence[Sequence[int] | Tensor]]) -> None:
        """Keep these positions of the text, by layer and KV head. One set of a layer is that of all heads."""
        for layer, heads in kept.items():
            for head, positions in enumerate([*heads] * (len(self.raw[layer]) // len(heads))):
                k, v, text, _ = self.raw[layer][head]
                slots = [slot for slot, position in enumerate(text.tolist()) if position in {*map(int, positions)}]
                assert len(slots) == len(positions)
                text = text[slots]
                rotary = torch.arange(self.seen - len(slots), self.seen) if self.rule == "renumbered" else text
                self.raw[layer][head] = [k[slots], v[slots], text, rotary]

    def frequencies(self, layer: int) -> Tensor:
        """Return the inverse frequencies of a layer, as the model states them."""
        kind = (getattr(self.model.config, "layer_types", None) or ["full_attention"] * (layer + 1))[layer]
        buffers = {name.rpartition(".")[2]: one for name, one in self.model.named_buffers()}
        return buffers.get(f"{kind}_inv_freq", buffers.get("inv_freq")).double()  # type: ignore[union-attr]

    def rotated(self, x: Tensor, at: Tensor, layer: int) -> Tensor:
        """Return vectors (n, d) rotated to positions (n,)."""
        if not (getattr(self.model.config, "no_rope_layers", None) or [1] * (layer + 1))[layer]:
            return x.double()
        f, x = self.frequencies(layer), x.double()
        pairs, first = len(f), self.first
        end = first + 2 * pairs
        one, two = (slice(first, end, 2), slice(first + 1, end, 2)) if self.interleaved else (
            slice(first, first + pairs), slice(first + pairs, end))
        z = torch.complex(x[:, one], x[:, two]) * torch.polar(torch.ones(len(at), pairs).double(), at[:, None] * f)
        turned = x.clone()
        turned[:, one], turned[:, two] = z.real, z.imag
        return turned

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        """Return the attention output (n, H, d) of new tokens: queries (H, n, d), keys and values (H_kv, n, d)."""
        n, outputs = q.shape[1], []
        new = self.seen + torch.arange(n)
        empty = torch.empty(0, dtype=torch.int64)
        heads = self.raw.setdefault(layer, [[k[h, :0], v[h, :0], empty, empty] for h in range(len(k))])
        for h, kept in enumerate(heads):
            heads[h] = [torch.cat(pair) for pair in zip(kept, [k[h], v[h], new, new], strict=True)]
        for head in range(len(q)):
            keys, values, text, rotary = heads[head * len(k) // len(q)]
            scaling = options["scaling"] if options.get("scaling") is not None else q.shape[-1] ** -0.5
            logits = self.rotated(q[head], new, layer) @ self.rotated(keys, rotary, layer).T * scaling
            if options.get("softcap") is not None:
                logits = options["softcap"] * torch.tanh(logits / options["softcap"])
            visible = text[None] <= new[:, None]
            if (window := options.get("sliding_window")) is not None:
                visible &= text[None] > new[:, None] - window
            outputs.append(logits.masked_fill(~visible, -torch.inf).softmax(-1) @ values.double())
        return torch.stack(outputs, dim=1).to(q.dtype)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any,
) -> tuple[Tensor, None]:
    return _READERS[0].attend(module.layer_idx, query[0], key[0], value[0], options)[None], None
