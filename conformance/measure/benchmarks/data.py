"""Synthetic first-layer inputs: what the speed of a data-dependent S1 is measured on."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["Kind", "edges_like", "first_layer"]

Floats = NDArray[np.float32]
Kind = str  # "mixed" or "peaky"

VOCABULARY = 20_000
ARCHETYPES = ("local", "token", "diffuse", "token", "sink", "local", "token", "diffuse")


def rotate(x: Floats, base: float = 5e5) -> Floats:
    """Rotary embedding by position, half-split pairs."""
    n, d = x.shape[-2:]
    angle = np.arange(n)[:, None] * base ** (-np.arange(d // 2) / (d // 2))
    cos, sin = np.cos(angle), np.sin(angle)
    low, high = x[..., : d // 2], x[..., d // 2 :]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(np.float32)


def zipf_tokens(n: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Ids with a heavy tail, so that some tokens recur all the time and most never."""
    weight = 1.0 / np.arange(1, VOCABULARY + 1) ** 1.05
    return rng.choice(VOCABULARY, size=n, p=weight / weight.sum())


def first_layer(n: int, H: int, H_kv: int, d: int, kind: Kind, seed: int = 0) -> tuple[Floats, Floats]:
    """q (H, n, d) and k (H_kv, n, d) after rotation.

    "mixed" has heads that look nearby, at the same token, at the first token, and nowhere in particular, as first
    layers do. "peaky" is Gaussian with logits four times as wide: no tile of keys can be skipped.
    """
    rng = np.random.default_rng(seed)
    if kind == "peaky":
        q = 2 * rng.standard_normal((H, n, d), dtype=np.float32)
        return rotate(q), rotate(2 * rng.standard_normal((H_kv, n, d), dtype=np.float32))
    tokens = zipf_tokens(n, rng)
    shared = [_direction(ARCHETYPES[head % len(ARCHETYPES)], tokens, d, rng) for head in range(H_kv)]
    group = H // H_kv
    k = np.stack([keys + 0.5 * _noise(n, d, rng) for _, keys in shared])
    q = np.stack([(0.8 + 0.1 * (h % group)) * shared[h // group][0] + 0.5 * _noise(n, d, rng) for h in range(H)])
    return rotate(q), rotate(k)


def _noise(n: int, d: int, rng: np.random.Generator) -> Floats:
    return rng.standard_normal((n, d), dtype=np.float32)


def _direction(archetype: str, tokens: NDArray[np.int64], d: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """What the queries and the keys of one head have in common, scaled so that a match adds about 10 to a logit."""
    n, length = len(tokens), np.sqrt(10 * np.sqrt(d))
    if archetype == "diffuse":
        return np.zeros((n, d), np.float32), np.zeros((n, d), np.float32)
    if archetype == "token":
        table = rng.standard_normal((VOCABULARY, d), dtype=np.float32)
        rows = (length * table / np.linalg.norm(table, axis=1, keepdims=True))[tokens]
        return rows, rows
    v = rng.standard_normal(d)
    if archetype == "sink":
        # Only slowly turning channels, so that the first token is seen from everywhere.
        v[: d // 4] = v[d // 2 : d // 2 + d // 4] = 0
    rows = np.tile((length * v / np.linalg.norm(v)).astype(np.float32), (n, 1))
    keys = rows.copy()
    if archetype == "sink":
        keys[1:] = 0
    return rows, keys


def edges_like(n: int, share: float, k: int, rng: np.random.Generator, reach: int) -> tuple[NDArray[np.int64], Floats]:
    """Neighbour arrays (n, k) with that share of their places filled, up to `reach` tokens away."""
    offset = rng.integers(-reach, reach + 1, (n, k))
    index = np.arange(n)[:, None] + offset
    good = (rng.random((n, k)) < share) & (offset != 0) & (index >= 0) & (index < n)
    weight = rng.uniform(0.31, 1, (n, k)).astype(np.float32)
    return np.where(good, index, -1), np.where(good, weight, np.float32(0))
