"""Attention inputs with the sizes of real models, from a seed.

In `addressed` inputs every query head points at one key. Attention, salience and head means are then exact in every
floating type, including ties. Cosines inside a chunk are 0 or 1. In `laddered` inputs weights fall in steps wider than
the certified error of float32, so rounding decides few choices.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from conformance.strategies.numbers import Numbers
from conformance.strategies.prompts import AttentionInputs, Prompt, frozen
from spec.arrays import IntMatrix, IntVector
from spec.parameters import PAPER, CrystalCacheParameters

SURE = 1024.0  # Margin of a logit: exp(-SURE) is 0 in every floating type.
VOCABULARY = 151_936  # Vocabulary of Qwen2.5: more than 2^16 ids
ENDS = frozenset({13, 30, 65_536 + 13, 131_072 + 30})  # Modulo 2^16, two ids equal the other two.
SOURCES = 6  # more than PAPER's k_cross
# `laddered` has RANKS keys in a group, GROUPS groups in a block, and MEMBERS tokens that point at a group. A token can
# point at FAR groups of earlier chunks. INSIDE is the share of queries that point at their own chunk.
RANKS, GROUPS, MEMBERS, FAR, INSIDE = 6, 4, 14, 3, 0.4
STEEP = 3.0  # a step between two keys of a group is at most e^STEEP
# Shares of a token's heads that point at the first, second, ... source of the token.
SHARES = ((0.35, 0.25, 0.15, 0.1, 0.1, 0.05), (0.3, 0.3, 0.2, 0.1, 0.1, 0.0))


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer and a prompt.

    H query heads use H_kv KV heads of d channels. The prompt has n tokens after `before` live keys.
    """

    name: str
    H: int
    H_kv: int
    d: int
    n: int
    parameters: CrystalCacheParameters = PAPER
    before: int = 0
    start: int = 0
    softcap: float | None = None
    sinks: bool = False
    seed: int = 1

    def __str__(self) -> str:
        return self.name


def addressed(shape: Shape) -> AttentionInputs:
    """Return inputs in which each head of each query points at one key.

    The keys are far keys, the first key, and keys of the same chunk in every row.
    """
    numbers, live = Numbers(shape.seed), shape.before + shape.n
    target = _targets(shape, numbers)
    bits = max(1, (live - 1).bit_length())
    wide = shape.d // (2 * bits)
    scaling = shape.d**-0.5
    cold = 2.0 ** math.ceil(math.log2(SURE / (wide * scaling)))
    # A key is the bits of its address and their complements. A query for a key is -`cold` times the complement of the
    # key. The product of both is 0, so this logit is not rounded. A key with one other bit has a far lower logit.
    k = np.zeros((shape.H_kv, live, shape.d), dtype=np.float32)
    for g in range(shape.H_kv):
        # Each KV head numbers the keys differently: a query that reads the wrong KV head points at a different key.
        digits = numbers.permutation(live)[:, None] >> np.arange(bits) & 1
        k[g, :, : 2 * bits * wide] = np.repeat(np.concatenate([digits, 1 - digits], axis=1), wide, axis=1)
    swapped = np.concatenate([k[:, :, bits * wide : 2 * bits * wide], k[:, :, : bits * wide]], axis=2)
    q = np.zeros((shape.H, shape.n, shape.d), dtype=np.float32)
    for h in range(shape.H):
        q[h, :, : 2 * bits * wide] = -cold * swapped[h // (shape.H // shape.H_kv)][target[h]]
    return AttentionInputs(frozen(q), frozen(k), _positions(shape), shape.parameters, scaling, None)


def _positions(shape: Shape) -> IntVector:
    positions = np.arange(shape.start, shape.start + shape.before + shape.n, dtype=np.int64)
    if shape.before:  # An older cache has gaps.
        positions[: shape.before] -= np.arange(shape.before, 0, -1)
        positions -= min(0, int(positions[0]))
    positions.flags.writeable = False
    return positions


def _targets(shape: Shape, numbers: Numbers) -> IntMatrix:
    """Return the key that each head of each query points at (H, n), as an index into the live keys."""
    p, H, n, before = shape.parameters, shape.H, shape.n, shape.before
    sources = max(SOURCES, p.k_cross + 2)
    chunk_heads = max(1, 3 * H // 8)
    order = np.argsort(numbers.words(n * H).reshape(n, H), axis=1, kind="stable")
    in_chunk = _cluster_heads(n, p.C, numbers) + before
    first = before + np.arange(n) // p.C * p.C
    target = np.repeat(in_chunk[:, None], H, axis=1)
    places = numbers.below(np.repeat(np.maximum(first, 1), sources)).reshape(n, sources)
    places[numbers.integers(0, 4, n) == 0, 0] = 0
    kinds = numbers.integers(0, len(SHARES) + 1, n)
    edges = [np.cumsum([*share, *[0.0] * (sources - SOURCES)]) for share in SHARES]
    edges.append(np.arange(1, sources + 1) / sources)
    elsewhere = H - chunk_heads
    for s in range(elsewhere):
        at = (s + 0.5) / elsewhere
        rank = np.array([min(int(np.searchsorted(edge, at)), sources - 1) for edge in edges])[kinds]
        chosen = places[np.arange(n), rank]
        head = order[:, chunk_heads + s]
        target[np.arange(n), head] = np.where(first > 0, chosen, in_chunk)
    return target.T


def _cluster_heads(n: int, C: int, numbers: Numbers) -> IntVector:
    """Return the first member of each token's cluster: a run of neighbours, or tokens from anywhere in the chunk.

    A cluster has 1 to about a hundred members. All members of a cluster tie, except the members that fill a list before
    its last place.
    """
    result = np.arange(n)
    for c in range(0, n, C):
        stop = min(c + C, n)
        kinds = max(1, (stop - c) // 24)
        leader: dict[int, int] = {}
        at, runs = c, False
        while at < stop:
            length = int(numbers.integers(5, 48, 1)[0])
            block = range(at, min(at + length, stop))
            if runs:
                result[block] = at
            else:
                names = (kinds * numbers.fractions(len(block)) ** 2).astype(np.int64).tolist()
                result[block] = [leader.setdefault(name, i) for name, i in zip(names, block, strict=True)]
            at, runs = block.stop, not runs
    return result


def text_of(inputs: AttentionInputs, budget: str, seed: int) -> Prompt:
    """Return a prompt with ids of a large vocabulary: most ids are rare, and one is very common.

    Sentences have 1 to 40 tokens.
    """
    n, numbers = inputs.q.shape[1], Numbers(seed)
    ids = (VOCABULARY * numbers.fractions(n) ** 4).astype(np.int64)
    ends = sorted(ENDS)
    ids[np.isin(ids, ends)] += 1
    at = np.cumsum(1 + (40 * numbers.fractions(n) ** 2).astype(np.int64))
    at = at[at < n]
    ids[at] = np.array(ends)[numbers.integers(0, len(ends), len(at))]
    return Prompt(inputs, frozen(ids), ENDS, budget)


def laddered(shape: Shape) -> AttentionInputs:
    """Return inputs in which each head attends to the RANKS keys of one group.

    The keys of a group share one address, and their weights fall in steps of up to e^STEEP. Keys of different groups
    have weight 0, as in `addressed`, so each sum has only few rounded terms. Groups are in separate blocks. A token
    points at one group of its chunk, often a recent one, and at some groups of earlier chunks.
    """
    numbers, n = Numbers(shape.seed), shape.n
    block = RANKS * GROUPS
    groups = -(-n // block) * GROUPS
    within = np.argsort(numbers.words(-(-n // block) * block).reshape(-1, block), axis=1)
    group_of = (np.arange(len(within))[:, None] * GROUPS + within % GROUPS).ravel()[:n]
    rank_of = (within // GROUPS).ravel()[:n]
    near, far = _groups_looked_for(shape, numbers)
    k, q = _addresses(shape, numbers, groups)
    ranks = slice(shape.d - RANKS, shape.d)
    keys = k[:, group_of]
    keys[:, np.arange(n), shape.d - RANKS + rank_of] = 1.0
    steps = -STEEP * numbers.fractions(n * RANKS).reshape(n, RANKS)
    queries = np.zeros((shape.H, n, shape.d), dtype=np.float32)
    for h in range(shape.H):
        tilt = (numbers.fractions(RANKS) - 0.5) * 2
        elsewhere = far[:, h % FAR]
        inside = (numbers.fractions(n) < INSIDE) & (near >= 0) | (elsewhere < 0)
        asks = np.where(inside, near, elsewhere)
        queries[h, :, : shape.d - RANKS] = q[h // (shape.H // shape.H_kv)][asks][:, : shape.d - RANKS]
        queries[h, :, ranks] = (steps + tilt) / shape.d**-0.5
    return AttentionInputs(
        frozen(queries), frozen(keys), _positions(shape), shape.parameters, shape.d**-0.5, shape.softcap,
        frozen(np.linspace(-3.0, 3.0, shape.H).astype(np.float32)) if shape.sinks else None,
    )


def _addresses(shape: Shape, numbers: Numbers, groups: int) -> tuple[Any, Any]:
    """Return the key channels of the address of each KV head and group, and the query channels that point at it."""
    bits = max(1, (groups - 1).bit_length())
    wide = (shape.d - RANKS) // (2 * bits)
    cold = 2.0 ** math.ceil(math.log2(SURE / (wide * shape.d**-0.5)))
    k = np.zeros((shape.H_kv, groups, shape.d), dtype=np.float32)
    q = np.zeros_like(k)
    for g in range(shape.H_kv):
        digits = numbers.permutation(groups)[:, None] >> np.arange(bits) & 1
        k[g, :, : 2 * bits * wide] = np.repeat(np.concatenate([digits, 1 - digits], axis=1), wide, axis=1)
        q[g, :, : 2 * bits * wide] = -cold * np.repeat(np.concatenate([1 - digits, digits], axis=1), wide, axis=1)
    return k, q


def _groups_looked_for(shape: Shape, numbers: Numbers) -> tuple[IntVector, IntMatrix]:
    """Return the group of each token's chunk, and the groups of earlier chunks that the token points at, or -1."""
    n, C, block = shape.n, shape.parameters.C, RANKS * GROUPS
    near, far = np.full(n, -1), np.full((n, FAR), -1)
    recent, u = numbers.integers(0, 2, n), numbers.fractions(n)
    members: dict[int, int] = {}
    for i in range(n):
        first, done = -(-(i // C * C) // block), (i + 1) // block  # Range of complete blocks inside the chunk.
        open_ = [g for g in range(first * GROUPS, done * GROUPS) if members.get(g, 0) < MEMBERS]
        if recent[i]:
            open_ = open_[-GROUPS:]
        if open_:
            near[i] = open_[int(u[i] * len(open_))]
            members[int(near[i])] = members.get(int(near[i]), 0) + 1
        elif i < C:
            near[i] = i // block * GROUPS if i % block else 0
    earlier = np.arange(n) // C * C // block * GROUPS
    for s in range(FAR):
        far[:, s] = np.where(earlier > 0, numbers.below(np.maximum(earlier, 1)), -1)
    return near, far
