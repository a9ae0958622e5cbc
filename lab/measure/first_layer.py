"""Inputs like those of a first layer, and S1 in eager PyTorch for comparison."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Kind = str  # "mixed" or "peaky"

VOCABULARY = 20_000
ARCHETYPES = ("local", "token", "diffuse", "token", "sink", "local", "token", "diffuse")


def rotate(x: Floats, base: float = 5e5) -> Floats:
    """Return x with rotary embedding by position, with half-split pairs."""
    n, d = x.shape[-2:]
    angle = np.arange(n)[:, None] * base ** (-np.arange(d // 2) / (d // 2))
    cos, sin = np.cos(angle), np.sin(angle)
    low, high = x[..., : d // 2], x[..., d // 2 :]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(np.float32)


def zipf_tokens(n: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return ids with a heavy tail, so that some tokens recur often and most never."""
    weight = 1.0 / np.arange(1, VOCABULARY + 1) ** 1.05
    return rng.choice(VOCABULARY, size=n, p=weight / weight.sum())


def first_layer(n: int, H: int, H_kv: int, d: int, kind: Kind, seed: int = 0) -> tuple[Floats, Floats]:
    """Return q (H, n, d) and k (H_kv, n, d) after rotation.

    "mixed" has heads like those of first layers. They attend to nearby tokens, to the same token, to the first token,
    or evenly. "peaky" is Gaussian with logits four times as wide, so that no tile of keys can be skipped.
    """
    rng = np.random.default_rng(seed)
    if kind == "peaky":
        q = 2 * rng.standard_normal((H, n, d), dtype=np.float32)
        return rotate(q), rotate(2 * rng.standard_normal((H_kv, n, d), dtype=np.float32))
    tokens = zipf_tokens(n, rng)
    shared = [direction(ARCHETYPES[head % len(ARCHETYPES)], tokens, d, rng) for head in range(H_kv)]
    group = H // H_kv
    k = np.stack([keys + 0.5 * _noise(n, d, rng) for _, keys in shared])
    q = np.stack([(0.8 + 0.1 * (h % group)) * shared[h // group][0] + 0.5 * _noise(n, d, rng) for h in range(H)])
    return rotate(q), rotate(k)


def _noise(n: int, d: int, rng: np.random.Generator) -> Floats:
    return rng.standard_normal((n, d), dtype=np.float32)


def direction(archetype: str, tokens: NDArray[np.int64], d: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Return the common part of one head's queries and keys, scaled so that a match adds about 10 to a logit."""
    n, length = len(tokens), np.sqrt(10 * np.sqrt(d))
    if archetype == "diffuse":
        return np.zeros((n, d), np.float32), np.zeros((n, d), np.float32)
    if archetype == "token":
        table = rng.standard_normal((VOCABULARY, d), dtype=np.float32)
        rows = (length * table / np.linalg.norm(table, axis=1, keepdims=True))[tokens]
        return rows, rows
    v = rng.standard_normal(d)
    if archetype == "sink":
        # Only slowly rotating channels, so that all tokens attend to the first token.
        v[: d // 4] = v[d // 2 : d // 2 + d // 4] = 0
    rows = np.tile((length * v / np.linalg.norm(v)).astype(np.float32), (n, 1))
    keys = rows.copy()
    if archetype == "sink":
        keys[1:] = 0
    return rows, keys


C, K_INTRA, K_CROSS = 1024, 8, 4


def torch_s1(q: Any, k: Any) -> list[Any]:
    """Run S1 in eager PyTorch, with topk."""
    import torch

    H, n, d = q.shape
    result = []
    shared = k.repeat_interleave(H // len(k), dim=0)
    for c in range(0, n, C):
        stop = min(n, c + C)
        S = (q[:, c:stop] @ shared[:, :stop].transpose(1, 2)) * d**-0.5
        S[:, :, c:].masked_fill_(torch.ones(stop - c, stop - c, dtype=torch.bool, device=q.device).triu(1), -torch.inf)
        S = torch.softmax(S, dim=2)
        salience = S[:, :, c:].sum(dim=1).topk(min(3, H), dim=0).values.sum(dim=0).clamp(0.1, 20)
        A = S.mean(dim=0)
        inside = A[:, c:] / (A[:, c:].norm(dim=1, keepdim=True) + 1e-8)
        cosine = (inside @ inside.T).fill_diagonal_(-1)
        intra = cosine.topk(min(K_INTRA, stop - c), dim=1)
        cross = A[:, :c].topk(min(K_CROSS, c), dim=1) if c else None
        result.append((salience, intra, cross))
    return result
