"""A Llama in plain torch with random weights, for machines without transformers: shapes and times, no language.

Each later layer is compacted as soon as it is done, so the full cache never exists.
"""

import time

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu

from accelerated.triton_gpu.device import default_device
from conformance.measure.gpu.measure import synchronize
from conformance.measure.gpu.scale import Scale
from reference.policies import crystalcache, retain
from spec.arrays import IntVector
from spec.backend import Backend
from spec.budget import parse_budget
from spec.policy import LayerView, Observation
from spec.records import CrystalRetention

__all__ = ["PlainLlama"]

THETA = 5e5
Layer = dict[str, Tensor]


class PlainLlama:
    """Decoder layers with rotary positions, grouped heads and a gated MLP."""

    def __init__(self, scale: Scale, sentence_ends: frozenset[int]) -> None:
        self.scale, self.sentence_ends = scale, sentence_ends
        self.name = f"random Llama, {scale.layers} layers, plain torch: transformers is not installed"
        self.device, self.dtype = default_device(), getattr(torch, scale.dtype)
        torch.manual_seed(0)
        width, kv = scale.hidden, scale.H_kv * scale.d
        self.embedding, self.head = self._matrix(scale.vocabulary, width), self._matrix(scale.vocabulary, width)
        self.layers: list[Layer] = [
            {
                "q": self._matrix(width, width), "k": self._matrix(kv, width), "v": self._matrix(kv, width),
                "o": self._matrix(width, width), "gate": self._matrix(scale.inner, width),
                "up": self._matrix(scale.inner, width), "down": self._matrix(width, scale.inner),
            }
            for _ in range(scale.layers)
        ]

    def _matrix(self, rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, device=self.device, dtype=self.dtype) * 0.02

    def prompt(self, n: int) -> IntVector:
        return np.random.default_rng(n).integers(0, self.scale.vocabulary, n)

    @torch.no_grad()
    def forward(self, ids: IntVector) -> None:
        cache: list[tuple[Tensor, Tensor]] = []
        x = self._embed(ids)
        for layer in self.layers:
            q, k, v = self._project(layer, x, 0)
            cache.append((k, v))
            x = self._finish(layer, x, q, k, v)
        self._logits(x)

    @torch.no_grad()
    def generate(
        self, ids: IntVector, backend: Backend, scale: Scale, new_tokens: int,
    ) -> tuple[CrystalRetention, dict[str, float]]:
        cache: list[tuple[Tensor, Tensor]] = []
        x, retention, seconds = self._embed(ids), None, 0.0
        for layer in self.layers:
            q, k, v = self._project(layer, x, 0)
            if retention is None:
                retention = self._decide(ids, q, k, backend, scale)
                kept = torch.from_numpy(retention.kept).to(self.device)
            x = self._finish(layer, x, q, k, v)
            synchronize()
            start = time.perf_counter()
            cache.append((k.index_select(1, kept), v.index_select(1, kept)))
            synchronize()
            seconds += time.perf_counter() - start
        assert retention is not None
        token = self._logits(x).argmax()
        for step in range(new_tokens - 1):
            x = embedding(token[None], self.embedding)
            for at, layer in enumerate(self.layers):
                q, k, v = self._project(layer, x, len(ids) + step)
                keys, values = torch.cat([cache[at][0], k], 1), torch.cat([cache[at][1], v], 1)
                cache[at] = keys, values
                x = self._finish(layer, x, q, keys, values)
            token = self._logits(x).argmax()
        return retention, {"compaction": seconds}

    def _decide(self, ids: IntVector, q: Tensor, k: Tensor, backend: Backend, scale: Scale) -> CrystalRetention:
        policy = crystalcache(self.sentence_ends, scale.parameters, backend)
        view = LayerView(q, k, None, scale.d**-0.5, None)
        _, records = retain(policy, parse_budget(0.5), Observation(len(ids), 1, ids, {0: view}))
        assert records is not None
        return records

    def _embed(self, ids: IntVector) -> Tensor:
        return embedding(torch.from_numpy(ids).to(self.device), self.embedding)

    def _logits(self, x: Tensor) -> Tensor:
        return linear(self._normed(x[-1:]), self.head)

    def _normed(self, x: Tensor) -> Tensor:
        return rms_norm(x, (x.shape[-1],), eps=1e-5)

    def _project(self, layer: Layer, x: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
        """q (H, n, d), k and v (H_kv, n, d), q and k rotated."""
        normed = self._normed(x)
        q, k, v = (linear(normed, layer[name]).view(len(x), -1, self.scale.d).transpose(0, 1) for name in "qkv")
        return self._rotated(q, first), self._rotated(k, first), v

    def _rotated(self, x: Tensor, first: int) -> Tensor:
        half = self.scale.d // 2
        at = torch.arange(first, first + x.shape[1], device=self.device, dtype=torch.float32)
        angle = at[:, None] * THETA ** (-torch.arange(half, device=self.device) / half)
        cos, sin = angle.cos().to(self.dtype), angle.sin().to(self.dtype)
        low, high = x[..., :half], x[..., half:]
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)

    def _finish(self, layer: Layer, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention and the MLP. The heads are repeated: without a mask, every version of torch then has flash."""
        group = self.scale.H // self.scale.H_kv
        keys, values = k.repeat_interleave(group, 0)[None], v.repeat_interleave(group, 0)[None]
        mixed = scaled_dot_product_attention(q[None], keys, values, is_causal=q.shape[1] > 1)[0]
        x = x + linear(mixed.transpose(0, 1).reshape(len(x), -1), layer["o"])
        normed = self._normed(x)
        return x + linear(silu(linear(normed, layer["gate"])) * linear(normed, layer["up"]), layer["down"])
