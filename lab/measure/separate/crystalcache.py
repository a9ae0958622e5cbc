"""CrystalCache's prefill from queries, keys and token ids, with the constants of the paper."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import ceil, log, sqrt

import numpy as np

from lab.measure.separate.llama import Layer
from lab.measure.separate.weights import Floats

__all__ = ["FORMS", "Crystal"]

Edge = tuple[int, int, float]
CHUNK, LONGEST, SINK, RECENT, LEAST = 1024, 32, 4, 128, 3


def softmax(x: Floats) -> Floats:
    powers = np.exp(x - x.max(-1, keepdims=True))
    result: Floats = powers / powers.sum(-1, keepdims=True)
    return result


def salience_and_edges(layer: Layer) -> tuple[Floats, list[Edge]]:
    """Return the salience of each token, and the edges inside a chunk before those from earlier chunks."""
    q, k = layer.q.astype(float), layer.k.astype(float)
    n, group = q.shape[1], len(q) // len(k)
    salience, inside, across = np.empty(n), list[Edge](), list[Edge]()
    for start in range(0, n, CHUNK):
        stop = min(n, start + CHUNK)
        logits = np.stack([q[h, start:stop] @ k[h // group, :stop].T for h in range(len(q))]) / sqrt(q.shape[2])
        logits[:, np.arange(stop)[None] > np.arange(start, stop)[:, None]] = -np.inf
        weights = softmax(logits)
        salience[start:stop] = np.clip(np.sort(weights[:, :, start:].sum(1), axis=0)[-3:].sum(0), 0.1, 20)
        rows = weights[:, :, start:].mean(0)
        rows /= np.sqrt((rows * rows).sum(1))[:, None] + 1e-8
        cosines = rows @ rows.T
        np.fill_diagonal(cosines, -1)
        inside += [(start + i, start + j, w) for i, j, w in _largest(cosines, 8, 0.3)]
        if start:
            across += [(j, start + i, w) for i, j, w in _largest(weights[:, :, :start].mean(0), 4, 0.02)]
    return salience, inside + across


def _largest(rows: Floats, count: int, above: float) -> Iterator[Edge]:
    """Yield row, column and value of the largest values of each row that exceed a bound, compared in float32."""
    for i, row in enumerate(rows):
        single = row.astype(np.float32)
        for j in np.argsort(-single, kind="stable")[:count]:
            if single[j] > np.float32(above):
                yield i, int(j), float(row[j])


def trunks_of(ids: Sequence[int], ends: frozenset[int], edges: Sequence[Edge]) -> list[range]:
    """Return the trunks: sentences, merged if enough edges lead on, and cut if they are too long."""
    stops = [at + 1 for at, token in enumerate(ids) if token in ends or at + 1 == len(ids)]
    running, spans = range(stops[0]), list[range]()
    forward = sorted(edge for edge in edges if edge[0] < edge[1])
    for start, stop in pairwise(stops):
        last, first = running[-5:], range(start, min(start + 5, stop))
        weights = [w for i, j, w in forward if i in last and j in first]
        total = 0.0
        for weight in weights:
            total += weight
        if weights and total - 0.3 * len(weights) > 0 and stop - running.start <= LONGEST:
            running = range(running.start, stop)
        else:
            spans.append(running)
            running = range(start, stop)
    return [piece for span in (*spans, running) for piece in _pieces(span)]


def _pieces(span: range) -> Iterator[range]:
    count = ceil(len(span) / LONGEST)
    longer, size = len(span) % count, len(span) // count
    start = span.start
    for at in range(count):
        stop = start + size + (at < longer)
        yield range(start, stop)
        start = stop


class Crystal:
    """Stages of a prompt in one layer.

    Attributes:
        salience: salience of each token (Eq. 11).
        rarity: rarity of each token (Eq. 21).
        trunks: trunks in the order of the prompt.
    """

    def __init__(self, layer: Layer, ids: Sequence[int], ends: frozenset[int]) -> None:
        self.ids = ids
        self.salience, self._edges = salience_and_edges(layer)
        self.trunks = trunks_of(ids, ends, self._edges)
        times = Counter(ids)
        self.rarity = np.array([1 / (1 + log(1 + times[token])) for token in ids])
        self._free = [at for at, g in enumerate(self.trunks) if g.start >= SINK and g.stop <= len(ids) - RECENT]

    def association(self) -> Floats:
        """Return D of each trunk (Eq. 24 to 27)."""
        trunk_of, pairs = [at for at, g in enumerate(self.trunks) for _ in g], dict[tuple[int, int], list[float]]()
        for i, j, weight in self._edges:
            a, b = sorted((trunk_of[i], trunk_of[j]))
            if a != b:
                pairs.setdefault((a, b), []).append(weight)
        degree = np.zeros(len(self.trunks))
        for (a, b), weights in pairs.items():
            density = len(weights) / (len(self.trunks[a]) * len(self.trunks[b]))
            if (link := sum(weights) / len(weights) * sqrt(density)) > 0.05:
                degree[a] += link
                degree[b] += link
        spread = degree.std()
        result: Floats = 1 / (1 + np.exp(-5 * (degree - degree.mean()) / (1 if spread < 1e-8 else spread)))
        return result

    def mixture(self, salience: Floats) -> Floats:
        """Return the impact of tokens (Eq. 22)."""
        return np.clip(20 * (0.5 * salience / 20 + 0.5 * self.rarity), 0.1, 20)

    def trunk_impact(self, impact: Floats) -> Floats:
        """Return the mean of the three largest impacts of each trunk (Eq. 23)."""
        largest = [sorted(impact[g.start : g.stop], reverse=True)[:3] for g in self.trunks]
        return np.array([sum(some) / len(some) for some in largest])

    def normalised(self, impact: Floats) -> Floats:
        """Return the impact of trunks between 0 and 1 (Eq. 28). Values of protected trunks are not used."""
        logs = np.log(1 + self.trunk_impact(impact))
        low, high = logs[self._free].min(), logs[self._free].max()
        result: Floats = (logs - low) / (high - low + 1e-8)
        return result

    def local(self) -> Floats:
        """Return the salience divided by the mean salience of 64 neighbours."""
        S = self.salience
        around = [[*range(max(0, i - 32), i), *range(i + 1, min(len(S), i + 33))] for i in range(len(S))]
        return np.array([S[i] / S[some].mean() for i, some in enumerate(around)])

    def draws(self) -> np.random.Generator:
        """Return the random numbers of a prompt. The study states the seed."""
        odd = np.arange(1, 2 * len(self.ids), 2, dtype="<u4")
        return np.random.default_rng(int(np.bitwise_xor.reduce(np.array(self.ids, dtype="<u4") * odd)))

    def kept(self, scores: Floats, impact: Floats, budget: int) -> set[int]:
        """Return the positions that are kept (Eq. 30 to 33). Trunks with the lowest scores are evicted first."""
        n, evicted = len(self.ids), set[int]()
        too_many = max(0, n - max(SINK + RECENT, budget))
        for at in sorted(self._free, key=lambda g: (scores[g], g)):
            if too_many <= 0:
                break
            trunk, left = self.trunks[at], len(self.trunks[at]) - too_many
            order = sorted(trunk, key=lambda i: (-impact[i], i))
            evicted.update(order[left:] if left >= LEAST else order)
            too_many -= len(trunk) if left < LEAST else too_many
        return set(range(n)) - evicted


def _shuffled(crystal: Crystal) -> Floats:
    draws, local = crystal.draws(), crystal.local()
    runs = [draws.permutation(local[at : at + 64]) for at in range(0, len(local), 64)]
    return crystal.mixture(np.clip(np.concatenate(runs), 0.1, 20))


def _associated(crystal: Crystal, impact: Floats) -> tuple[Floats, Floats]:
    return np.maximum(crystal.association(), crystal.normalised(impact)), impact


def _by_impact(crystal: Crystal, impact: Floats) -> tuple[Floats, Floats]:
    return crystal.trunk_impact(impact), impact


def _random(crystal: Crystal) -> tuple[Floats, Floats]:
    draws = crystal.draws()
    return draws.random(len(crystal.trunks)), draws.random(len(crystal.ids))


FORMS: dict[str, Callable[[Crystal], tuple[Floats, Floats]]] = {
    "crystalcache": lambda one: _associated(one, one.mixture(one.salience)),
    'crystalcache(impact="uniform")': lambda one: _associated(one, np.ones(len(one.ids))),
    'crystalcache(graph="zero")': lambda one: (one.normalised(m := one.mixture(one.salience)), m),
    "random-trunks": _random,
    "local-trunks": lambda one: _by_impact(one, one.mixture(np.clip(one.local(), 0.1, 20))),
    "local-salience-trunks": lambda one: _by_impact(one, one.local()),
    "local-geometric-trunks": lambda one: _by_impact(one, np.sqrt(one.local() * one.rarity)),
    "rarity-trunks": lambda one: _by_impact(one, one.rarity + 1e-9 * one.draws().random(len(one.ids))),
    "shuffled-trunks": lambda one: _by_impact(one, _shuffled(one)),
}
"""Scores of trunks and impacts of tokens, by the name of a policy or control."""
