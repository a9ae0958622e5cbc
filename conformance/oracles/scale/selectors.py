"""Selectors, scores of policies, and NestedKV's score, at full size."""

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from conformance.oracles.scale.decode import Rows, Weights, rows_of
from spec.arrays import BoolVector, Cube, IntVector, Matrix, Vector
from spec.parameters import NestedKVParameters

SMALL = 2.0**-16


def attended(q: Any, k: Any, scaling: float, softcap: float | None, sinks: Any = None) -> Cube:
    """Return the weights of PO-OBSERVED-ATTENTION, (H, queries, n).

    They are the softmax of the last queries over the keys up to each query.
    """
    n, group = q.shape[1], len(q) // len(k)
    ahead = np.triu(np.ones((k.shape[1], k.shape[1]), dtype=np.bool_), 1)[k.shape[1] - n :]
    result = np.empty((len(q), n, k.shape[1]))
    for h in range(len(q)):
        x = q[h].astype(np.float64) @ k[h // group].astype(np.float64).T * scaling
        x = x if softcap is None else softcap * np.tanh(x / softcap)
        top = x.max(axis=1, keepdims=True, where=~ahead, initial=-np.inf)
        power = np.where(ahead, 0.0, np.exp(x - top))
        beside = 0.0 if sinks is None else np.exp(float(sinks[h]) - top)
        result[h] = power / (power.sum(axis=1, keepdims=True) + beside)
    return result


def expected(
    q: Any, k: Any, v: Any, at: IntVector, ahead: IntVector, inv_freq: Vector, factor: float, scaling: float,
    sinks: Any = None,
) -> tuple[Matrix, float]:
    """Return the score of PO-EXPECTED-ATTENTION of the tokens after the sinks, and the largest mass of a logit's terms.

    Pairs of channels are complex numbers. The spread along a key is the spread of the queries' projections on the key.
    """
    half, group = len(inv_freq), len(q) // len(k)
    mean_turn = np.exp(1j * np.multiply.outer(ahead, inv_freq)).mean(axis=0) * factor
    actual, mass = np.zeros(k.shape[:2]), 0.0
    for h in range(len(q)):
        x, key = q[h].astype(np.float64), k[h // group].astype(np.float64)
        pairs = (x[:, :half] + 1j * x[:, half:]) * np.exp(-1j * np.multiply.outer(at, inv_freq)) / factor * mean_turn
        turned = np.concatenate([pairs.real, pairs.imag], axis=1)
        onto = scaling * turned @ key.T
        z = onto.mean(axis=0) + onto.var(axis=0) / 2
        power = np.exp(z - z.max())
        beside = 0.0 if sinks is None else np.exp(float(sinks[h]) - z.max())
        actual[h // group] += power / (power.sum() + beside) / group
        size = scaling * np.sqrt((x * x).sum(axis=1)).max() * np.sqrt((key * key).sum(axis=1)).max()
        mass = max(mass, size + size**2)
    return actual * np.sqrt((v.astype(np.float64) ** 2).sum(axis=2)), mass


def cosines_with(V: Matrix, j: int) -> Vector:
    """Return DV-COSINE of every signature with one signature.

    Products are added from the first channel to the last, and none is fused.
    """
    result = np.zeros(len(V))
    for c in range(V.shape[1]):
        result = result + V[:, c] * V[j, c]
    return result


def diverse(s: Vector, V: Matrix, retained: BoolVector, k: int, lam: float) -> IntVector:
    """Return the tokens of DV-GREEDY. The greatest cosine of every candidate is updated as S grows."""
    score = np.where(np.isnan(s), -np.inf, s)
    inside = retained.copy()
    nearest = np.zeros(len(s))
    for j in np.flatnonzero(retained).tolist():
        nearest = np.maximum(nearest, cosines_with(V, j))
    while inside.sum() < k:
        gain = np.where(inside, -np.inf, score - lam * nearest)
        free = np.flatnonzero(~inside)
        best = int(free[np.argmax(gain[free])])
        inside[best] = True
        nearest = np.maximum(nearest, cosines_with(V, best))
    return np.flatnonzero(inside)


class Traced(NamedTuple):
    """Score a* of one head, with the values that determine its error."""

    score: Vector
    raw: list[Vector]
    shortest: list[float]
    deviation: Vector


def nestedkv(keys: Any, p: NestedKVParameters) -> Traced:
    """Return the result of NK-UNIT-KEYS to NK-ROUTE for the keys (n, d) of one head."""
    k = keys.astype(np.float64)
    N = len(k)
    unit = k / np.sqrt((k * k).sum(axis=1))[:, None]
    b = min(max(N // p.blocks, p.b_min), p.b_max)
    blocks = [unit[at : at + b].mean(axis=0) for at in range(0, N, b)]
    window = np.stack([unit[max(0, i - p.W + 1) : i + 1].sum(axis=0) / min(i + 1, p.W) for i in range(N)])
    memories = [np.broadcast_to(unit.mean(axis=0), unit.shape), np.stack(blocks)[np.arange(N) // b], window]
    lengths = [np.sqrt((m * m).sum(axis=1)) for m in memories]
    raw = [
        np.where(length > SMALL, -(unit * m).sum(axis=1) / np.where(length > SMALL, length, 1.0), 0.0)
        for m, length in zip(memories, lengths, strict=True)
    ]
    a = np.stack([_spread(x) for x in raw])
    number = max(1, int(p.p * N // 1))
    order = np.sort(a, axis=1)
    gap = order[:, N - number :].mean(axis=1) - order[:, :number].mean(axis=1)
    share = np.array(p.w0) * np.exp(p.beta * gap)
    blend = (share / share.sum()) @ a
    deviation = np.sqrt(((a - a.mean(axis=0)) ** 2).mean(axis=0))
    u = _spread(deviation)
    surprise = np.maximum(0, u - u.mean())
    alpha = 1 / (1 + np.exp(-p.kappa * (surprise - p.tau)))
    return Traced((1 - alpha) * blend + alpha * a.max(axis=0), raw, [float(x.min()) for x in lengths], deviation)


def _spread(x: Vector) -> Vector:
    low, high = x.min(), x.max()
    return (x - low) / (high - low) if high - low > SMALL else np.zeros(len(x))


def whole_units(s: Vector, sizes: IntVector, shut: BoolVector, B: int) -> list[int]:
    """Return the tokens of one set by PO-TOP-UNITS: the protected units, then the best units until one does not fit."""
    kept, tokens = set(np.flatnonzero(shut).tolist()), int(sizes[shut].sum())
    for u in sorted(np.flatnonzero(~shut).tolist(), key=lambda u: (-s[u], u)):
        tokens += int(sizes[u])
        if tokens > B:
            break
        kept.add(u)
    first = np.cumsum(sizes) - sizes
    return [i for u in sorted(kept) for i in range(int(first[u]), int(first[u] + sizes[u]))]


def left(offsets: IntVector, W: Weights, stays: BoolVector) -> tuple[list[int], list[int], Rows]:
    """Return the live trunks of CC-LIVE, the offsets of their kept tokens, and their rows of W, renumbered."""
    sizes = [int(stays[a:b].sum()) for a, b in pairwise(offsets.tolist())]
    alive = [g for g, size in enumerate(sizes) if size]
    number = {g: at for at, g in enumerate(alive)}
    rows = rows_of(W)
    return (
        alive, np.cumsum([0, *(sizes[g] for g in alive)]).tolist(),
        [[(number[h], w) for h, w in rows[g] if h in number] for g in alive],
    )
