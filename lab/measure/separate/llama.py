"""Forward pass of a Llama model in float32, from the tensors of a GGUF file."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lab.measure.separate.weights import Floats, Weights

__all__ = ["Layer", "Llama"]


class Layer(NamedTuple):
    """Queries (H, n, d), keys (H_kv, n, d) and values (H_kv, n, d) of a layer, after rotation."""

    q: Floats
    k: Floats
    v: Floats


class Llama:
    """Llama model. Channels 2i and 2i + 1 of a head are a pair, as llama.cpp stores them."""

    def __init__(self, weights: Weights) -> None:
        self._tensors, about = weights.tensors, weights.metadata
        self.layers: int = about["llama.block_count"]
        self._heads = {"q": about["llama.attention.head_count"], "k": about["llama.attention.head_count_kv"]}
        self._heads["v"] = self._heads["k"]
        width = self._tensors["blk.0.attn_q.weight"].shape[0] // self._heads["q"]
        self._frequencies = about["llama.rope.freq_base"] ** (-np.arange(0, width, 2) / width)
        self._epsilon = np.float32(about["llama.attention.layer_norm_rms_epsilon"])

    def read(self, ids: Sequence[int], layers: int, before: Sequence[Layer] = ()) -> list[Layer]:
        """Return the first `layers` layers of a text, or of a text after the tokens of `before`."""
        start = before[0].k.shape[1] if before else 0
        positions, x, result = np.arange(start, start + len(ids)), self._tensors["token_embd.weight"][list(ids)], []
        for at in range(layers):
            y = self._norm(x, f"blk.{at}.attn_norm")
            q, k, v = (self._projected(y, at, name) for name in "qkv")
            layer = Layer(self._turned(q, positions), self._turned(k, positions), v)
            result.append(layer)
            if at + 1 < layers:
                x = x + self._times(self._attended(layer, positions, before[at] if before else None), at, "attn_output")
                y = self._norm(x, f"blk.{at}.ffn_norm")
                gate = self._times(y, at, "ffn_gate")
                x = x + self._times(gate / (1 + np.exp(-gate)) * self._times(y, at, "ffn_up"), at, "ffn_down")
        return result

    def _times(self, x: Floats, at: int, name: str) -> Floats:
        result: Floats = x @ self._tensors[f"blk.{at}.{name}.weight"].T
        return result

    def _norm(self, x: Floats, name: str) -> Floats:
        result: Floats = x / np.sqrt((x * x).mean(-1, keepdims=True) + self._epsilon)
        return result * self._tensors[f"{name}.weight"]

    def _projected(self, x: Floats, at: int, name: str) -> Floats:
        return self._times(x, at, f"attn_{name}").reshape(len(x), self._heads[name], -1).swapaxes(0, 1)

    def _turned(self, x: Floats, positions: Floats) -> Floats:
        angles, result = np.outer(positions, self._frequencies), np.empty_like(x)
        cosine, sine = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        even, odd = x[..., 0::2], x[..., 1::2]
        result[..., 0::2], result[..., 1::2] = even * cosine - odd * sine, even * sine + odd * cosine
        return result

    def _attended(self, layer: Layer, positions: Floats, before: Layer | None) -> Floats:
        """Return the mixed values (n, H d)."""
        keys = layer.k if before is None else np.concatenate([before.k, layer.k], axis=1)
        values = layer.v if before is None else np.concatenate([before.v, layer.v], axis=1)
        later, group = np.arange(keys.shape[1])[None] > positions[:, None], len(layer.q) // len(keys)
        mixed = []
        for head, q in enumerate(layer.q):
            logits = q @ keys[head // group].T * np.float32(q.shape[1] ** -0.5)
            logits[later] = -np.inf
            weights = np.exp(logits - logits.max(1, keepdims=True))
            mixed.append(weights / weights.sum(1, keepdims=True) @ values[head // group])
        return np.concatenate(mixed, axis=1)
