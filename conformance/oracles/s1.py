"""S1 by brute force: attention, salience and co-attention edges (Section 3.2, Algorithm 2, lines 1-21)."""

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from spec.parameters import CrystalCacheParameters

Rows: TypeAlias = list[list[float]]
Block: TypeAlias = list[Rows]
Edge: TypeAlias = tuple[int, int, float]


@dataclass(frozen=True)
class Segment:
    """Result of S1 for each token: salience, and neighbours with weights, best first."""

    start: int
    salience: list[float]
    intra: list[list[tuple[int, float]]]
    cross: list[list[tuple[int, float]]]


def float32(x: float) -> float:
    """Return x rounded to the nearest float32."""
    rounded: float = struct.unpack("f", struct.pack("f", x))[0]
    return rounded


def attention(
    q: Block, k: Block, query_positions: Sequence[int], key_positions: Sequence[int], scaling: float,
    softcap: float | None, sinks: Sequence[float] | None = None,
) -> Block:
    """Return the weights of Eq. 3 without V.

    Query head h reads KV head h // (H / H_kv). A key later than the query has weight 0. The sink of a head takes its
    share first, and the keys share the rest.
    """
    group = len(q) // len(k)
    return [
        [
            _softmax([
                _logit(row, key, scaling, softcap) if key_at <= at else -math.inf
                for key, key_at in zip(k[h // group], key_positions, strict=True)
            ], [] if sinks is None else [float(sinks[h])])
            for row, at in zip(head, query_positions, strict=True)
        ]
        for h, head in enumerate(q)
    ]


def log_sum_exp(
    q: Block, k: Block, query_positions: Sequence[int], key_positions: Sequence[int], scaling: float,
    softcap: float | None,
) -> Rows:
    """Return the natural logarithm of the denominator of Eq. 3 without sinks, by head and query."""
    group = len(q) // len(k)
    result: Rows = []
    for h, head in enumerate(q):
        keys = list(zip(k[h // group], key_positions, strict=True))
        result.append([])
        for row, at in zip(head, query_positions, strict=True):
            logits = [_logit(row, key, scaling, softcap) for key, key_at in keys if key_at <= at]
            top = max(logits)
            result[h].append(top + math.log(math.fsum(math.exp(x - top) for x in logits)))
    return result


def _logit(query: list[float], key: list[float], scaling: float, softcap: float | None) -> float:
    x = scaling * math.fsum(a * b for a, b in zip(query, key, strict=True))
    return x if softcap is None else softcap * math.tanh(x / softcap)


def _softmax(logits: list[float], sink: list[float]) -> list[float]:
    top = max(logits)
    powers = [math.exp(x - top) for x in logits]
    total = math.fsum(powers)
    left = [1 / (1 + math.exp(min(700.0, s - top)) / total) for s in sink]
    return [power / total * math.prod(left) for power in powers]


def salience(own: Block, p: CrystalCacheParameters) -> list[float]:
    """Return the salience of each token (Eq. 11).

    Each head has a column sum over the chunk's queries. The salience is the sum of each token's best heads. In the
    essay it is their mean.
    """
    S = []
    for i in range(len(own[0])):
        h = [math.fsum(row[i] for row in head) for head in own]
        top = sorted(h, reverse=True)[: p.k_heads]
        share = len(top) if p.heads == "mean" and top else 1
        S.append(min(max(math.fsum(top) / share, p.M_min), p.M_max))
    return S


def head_mean(A: Block) -> Rows:
    """Return the attention block averaged over its heads."""
    H = len(A)
    return [
        [math.fsum(head[row][column] for head in A) / H for column in range(len(A[0][row]))]
        for row in range(len(A[0]))
    ]


def row_normalise(A: Rows, epsilon: float) -> Rows:
    """Return each row divided by the sum of its length and epsilon (Eq. 12)."""
    return [[a / (math.sqrt(math.fsum(b * b for b in row)) + epsilon) for a in row] for row in A]


def cosine(rows: Rows, i: int, j: int) -> float:
    """Return the inner product of two normalised rows (Eq. 13)."""
    return math.fsum(a * b for a, b in zip(rows[i], rows[j], strict=True))


def strongest(weights: Mapping[int, float], k: int, tau: float) -> list[tuple[int, float]]:
    """Return the k largest weights as float32 that are above float32(tau). The lower index comes first on a tie."""
    order = sorted(weights, key=lambda j: (-float32(weights[j]), j))[:k]
    return [(j, weights[j]) for j in order if float32(weights[j]) > float32(tau)]


def coattention(
    q: Block, k: Block, positions: Sequence[int], p: CrystalCacheParameters, scaling: float, softcap: float | None,
    sinks: Sequence[float] | None = None,
) -> Segment:
    """Return the result of S1.

    Each chunk in turn has salience, then edges inside the chunk, then edges to all earlier keys.
    """
    n = len(q[0])
    before = len(positions) - n
    S: list[float] = []
    intra, cross = [], []
    for c in range(0, n, p.C):
        stop = min(c + p.C, n)
        first, last = before + c, before + stop
        A = attention(
            [head[c:stop] for head in q], [head[:last] for head in k], positions[first:last], positions[:last],
            scaling, softcap, sinks,
        )
        S += salience([[row[first:] for row in head] for head in A], p)
        mean = head_mean(A)
        rows = row_normalise([row[first:] for row in mean], p.epsilon)
        for i in range(stop - c):
            similar = {positions[first + j]: cosine(rows, i, j) for j in range(stop - c) if j != i}
            intra.append(strongest(similar, p.k_intra, p.tau_intra))
            sources = {positions[j]: mean[i][j] for j in range(first)}
            cross.append(strongest(sources, p.k_cross, p.tau_cross))
    return Segment(positions[before], S, intra, cross)


def edges(segment: Segment) -> list[Edge]:
    """Return the directed edges of Eq. 15: (owner, neighbour) inside a chunk, (source, owner) across chunks."""
    E = [(segment.start + i, j, w) for i, row in enumerate(segment.intra) for j, w in row]
    E += [(i, segment.start + j, w) for j, row in enumerate(segment.cross) for i, w in row]
    return E
