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
    """What S1 says of each token: salience, and neighbours with weights, best first."""

    start: int
    salience: list[float]
    intra: list[list[tuple[int, float]]]
    cross: list[list[tuple[int, float]]]


def float32(x: float) -> float:
    """x rounded to the nearest float32."""
    rounded: float = struct.unpack("f", struct.pack("f", x))[0]
    return rounded


def attention(
    q: Block, k: Block, query_positions: Sequence[int], key_positions: Sequence[int], scaling: float,
    softcap: float | None, sinks: Sequence[float] | None = None,
) -> Block:
    """Eq. 3 without V: query head h reads KV head h // (H / H_kv); a key later than the query has weight 0.

    A head's sink takes its share first: what is left goes to the keys.
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
    """The natural logarithm of the denominator of Eq. 3 without sinks, by head and query."""
    group = len(q) // len(k)
    found: Rows = []
    for h, head in enumerate(q):
        keys = list(zip(k[h // group], key_positions, strict=True))
        found.append([])
        for row, at in zip(head, query_positions, strict=True):
            logits = [_logit(row, key, scaling, softcap) for key, key_at in keys if key_at <= at]
            top = max(logits)
            found[h].append(top + math.log(math.fsum(math.exp(x - top) for x in logits)))
    return found


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
    """Eq. 11: per head the column sum over the chunk's queries; then the sum of each token's own best heads.

    The essay takes their mean.
    """
    S = []
    for i in range(len(own[0])):
        h = [math.fsum(row[i] for row in head) for head in own]
        top = sorted(h, reverse=True)[: p.k_heads]
        share = len(top) if p.heads == "mean" and top else 1
        S.append(min(max(math.fsum(top) / share, p.M_min), p.M_max))
    return S


def head_mean(A: Block) -> Rows:
    """The attention block averaged over its heads."""
    H = len(A)
    return [
        [math.fsum(head[row][column] for head in A) / H for column in range(len(A[0][row]))]
        for row in range(len(A[0]))
    ]


def row_normalise(A: Rows, epsilon: float) -> Rows:
    """Eq. 12: each row over its length plus epsilon."""
    return [[a / (math.sqrt(math.fsum(b * b for b in row)) + epsilon) for a in row] for row in A]


def cosine(rows: Rows, i: int, j: int) -> float:
    """Eq. 13: the inner product of two normalised rows."""
    return math.fsum(a * b for a, b in zip(rows[i], rows[j], strict=True))


def strongest(weights: Mapping[int, float], k: int, tau: float) -> list[tuple[int, float]]:
    """The k largest weights as float32, lower index first on a tie; of these, the ones above float32(tau)."""
    order = sorted(weights, key=lambda j: (-float32(weights[j]), j))[:k]
    return [(j, weights[j]) for j in order if float32(weights[j]) > float32(tau)]


def coattention(
    q: Block, k: Block, positions: Sequence[int], p: CrystalCacheParameters, scaling: float, softcap: float | None,
    sinks: Sequence[float] | None = None,
) -> Segment:
    """Chunk by chunk: salience, then the edges inside the chunk, then those to all earlier keys."""
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
    """Eq. 15, directed: (owner, neighbour) inside a chunk, (source, owner) across chunks."""
    E = [(segment.start + i, j, w) for i, row in enumerate(segment.intra) for j, w in row]
    E += [(i, segment.start + j, w) for j, row in enumerate(segment.cross) for i, w in row]
    return E
