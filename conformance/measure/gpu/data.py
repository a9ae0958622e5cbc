"""First-layer inputs made on the device: the twin of `benchmarks.data.first_layer`, which takes minutes at 128K."""

import numpy as np
import torch

from accelerated.triton_gpu.device import default_device
from conformance.measure.benchmarks.data import ARCHETYPES, VOCABULARY, zipf_tokens
from conformance.measure.gpu.scale import Scale

__all__ = ["first_layer"]

Tensor = torch.Tensor
MATCH = 10.0  # what a match adds to a logit


def first_layer(scale: Scale, n: int, kind: str) -> tuple[Tensor, Tensor]:
    """q (H, n, d) and k (H_kv, n, d) after rotation; "mixed" or "peaky" as there, the same statistics."""
    H, H_kv, d, dtype = scale.H, scale.H_kv, scale.d, getattr(torch, scale.dtype)
    torch.manual_seed(n)
    device = default_device()
    q = torch.empty(H, n, d, device=device, dtype=dtype)
    k = torch.empty(H_kv, n, d, device=device, dtype=dtype)
    tokens = torch.from_numpy(zipf_tokens(n, np.random.default_rng(n))).to(device)
    for head in range(H_kv):
        rows, keys = _shared(ARCHETYPES[head % len(ARCHETYPES)] if kind == "mixed" else "diffuse", tokens, d)
        noise, near = (0.5, 0.8) if kind == "mixed" else (2.0, 0.0)
        k[head] = _rotated(keys + noise * torch.randn(n, d, device=device)).to(dtype)
        for query in range(H // H_kv):
            mine = (near + 0.1 * query) * rows + noise * torch.randn(n, d, device=device)
            q[head * (H // H_kv) + query] = _rotated(mine).to(dtype)
    return q, k


def _shared(archetype: str, tokens: Tensor, d: int) -> tuple[Tensor, Tensor]:
    """What the queries and the keys of one head have in common."""
    n, length, device = len(tokens), (MATCH * d**0.5) ** 0.5, tokens.device
    if archetype == "diffuse":
        return torch.zeros(n, d, device=device), torch.zeros(n, d, device=device)
    if archetype == "token":
        table = torch.nn.functional.normalize(torch.randn(VOCABULARY, d, device=device), dim=1)
        rows = length * table[tokens]
        return rows, rows
    v = torch.randn(d, device=device)
    if archetype == "sink":
        v[: d // 4] = v[d // 2 : d // 2 + d // 4] = 0
    rows = (length * v / v.norm()).repeat(n, 1)
    keys = rows.clone()
    if archetype == "sink":
        keys[1:] = 0
    return rows, keys


def _rotated(x: Tensor, base: float = 5e5) -> Tensor:
    n, half = x.shape[0], x.shape[1] // 2
    at = torch.arange(n, device=x.device, dtype=torch.float64)
    angle = at[:, None] * base ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    cos, sin = angle.cos().float(), angle.sin().float()
    low, high = x[:, :half], x[:, half:]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=1)
