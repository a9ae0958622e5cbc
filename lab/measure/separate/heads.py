"""SnapKV, NestedKV and KVzip from queries and keys: a set of kept positions for each layer and KV head."""

from collections.abc import Sequence
from math import sqrt

import numpy as np

from lab.measure.separate.crystalcache import softmax
from lab.measure.separate.llama import Layer, Llama
from lab.measure.separate.weights import Floats

__all__ = ["kvzip", "nestedkv", "snapkv"]

WINDOW, SINK = 32, 4


def _best(scores: Floats, count: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count]


def _attention(q: Floats, keys: Floats, start: int) -> Floats:
    """Return the attention of one head's queries, of which the first is at `start`."""
    logits: Floats = q.astype(float) @ keys.astype(float).T / sqrt(q.shape[1])
    logits[np.arange(len(keys))[None] > start + np.arange(len(q))[:, None]] = -np.inf
    return softmax(logits)


def snapkv(layers: Sequence[Layer], budget: int) -> list[set[int]]:
    """Keep the last 32 tokens, and the tokens with the largest pooled attention of the last 32 queries."""
    result = []
    for q, k, _ in layers:
        group, before = len(q) // len(k), k.shape[1] - WINDOW
        for at, keys in enumerate(k):
            scores = np.zeros(before)
            for head in range(group * at, group * (at + 1)):
                sums = _attention(q[head, -WINDOW:], keys, before).sum(0)[:before]
                scores += [sums[max(0, j - 3) : j + 4].max() for j in range(before)]
            result.append({*_best(scores, budget - WINDOW), *range(before, before + WINDOW)})
    return result


def _between(x: Floats) -> Floats:
    span = x.max() - x.min()
    return np.zeros_like(x) if span <= 2**-16 else (x - x.min()) / span


def _anomalies(keys: Floats) -> Floats:
    """Return the three anomalies (3, n) of one head: of all keys, of a block, and of the last 64 keys."""
    unit, n = keys / np.sqrt((keys * keys).sum(1))[:, None], len(keys)
    block, result = min(256, max(128, n // 32)), []
    blocks = [unit[at : at + block] for at in range(0, n, block)]
    memories = (
        np.repeat(unit.mean(0)[None], n, axis=0),
        np.concatenate([np.repeat(some.mean(0)[None], len(some), axis=0) for some in blocks]),
        np.stack([unit[max(0, i - 63) : i + 1].mean(0) for i in range(n)]),
    )
    for memory in memories:
        length = np.sqrt((memory * memory).sum(1))
        cosine = np.where(length > 2**-16, (unit * memory).sum(1) / np.maximum(length, 2**-16), 0)
        result.append(_between(-cosine))
    return np.stack(result)


def _nested_scores(keys: Floats) -> Floats:
    anomalies, tenth = _anomalies(keys.astype(float)), max(1, len(keys) // 10)
    ordered = np.sort(anomalies, axis=1)
    weights = np.array([0.4, 0.4, 0.2]) * np.exp(3 * (ordered[:, -tenth:].mean(1) - ordered[:, :tenth].mean(1)))
    surprise = _between(anomalies.std(0))
    gate = 1 / (1 + np.exp(-10 * (np.maximum(0, surprise - surprise.mean()) - 0.6)))
    scores: Floats = (1 - gate) * (weights / weights.sum() @ anomalies) + gate * anomalies.max(0)
    scores[:SINK] = np.inf
    return scores


def nestedkv(layers: Sequence[Layer], budget: int) -> list[set[int]]:
    """Keep a fifth of the budget in each KV head, and the best other tokens of the layer."""
    result = []
    for layer in layers:
        scores = [_nested_scores(keys) for keys in layer.k]
        kept = [set(_best(one, budget // 5)) for one in scores]
        rest = sorted((-one[i], at, i) for at, one in enumerate(scores) for i in range(len(one)) if i not in kept[at])
        for _, at, i in rest[: len(kept) * budget - sum(map(len, kept))]:
            kept[at].add(i)
        result += kept
    return result


def kvzip(
    model: Llama, ids: Sequence[int], layers: Sequence[Layer], budget: int, template: Sequence[Sequence[int]],
) -> list[set[int]]:
    """Keep the tokens that the model attends to most while it repeats the prompt of at most 2 004 tokens."""
    n, scores = len(ids), list[Floats]()
    if n - SINK > 2000:
        raise ValueError("the prompt must have at most 2 004 tokens")
    repeat = model.read([*template[0], *template[2], *ids[SINK:]], model.layers, layers)
    for layer, again in zip(layers, repeat, strict=True):
        group = len(layer.q) // len(layer.k)
        for at, keys in enumerate(np.concatenate([layer.k, again.k], axis=1)):
            heads = again.q[group * at : group * (at + 1)]
            scores.append(np.max([_attention(q, keys, n).max(0)[:n] for q in heads], axis=0))
    pool = sorted((-one[i], at, i) for at, one in enumerate(scores) for i in range(SINK, n))
    kept = [set(range(SINK)) for _ in scores]
    for _, at, i in pool[: len(scores) * (budget - SINK)]:
        kept[at].add(i)
    return kept
