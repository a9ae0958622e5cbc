"""The published policies by brute force: plain lists, from the papers' text; nothing is shared with the reference.

A layer is a dict of q (H lists of rows), k and v (H_kv lists of rows), scaling; a score is a list per kept set, None
where a token is protected. Kept sets are sorted lists.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

__all__ = [
    "accumulated",
    "adaptive_shares",
    "chunk_selection",
    "chunk_totals",
    "competition_shares",
    "epicache",
    "pool",
    "pyramid_shares",
    "top",
    "weights",
    "window",
]

Row = Sequence[float]
Layer = dict[str, Any]
Score = list[float | None]


def dot(a: Row, b: Row) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def normalise(logits: Row) -> list[float]:
    top_logit = max(logits)
    powers = [math.exp(x - top_logit) for x in logits]
    total = math.fsum(powers)
    return [p / total for p in powers]


def capped(logit: float, layer: Layer) -> float:
    cap = layer.get("softcap")
    return logit if cap is None else cap * math.tanh(logit / cap)


def weights(layer: Layer, head: int, query: Row, visible: int) -> list[float]:
    """Softmax of one query over the first `visible` keys of its group's KV head; zero on the rest."""
    keys = layer["k"][head // (len(layer["q"]) // len(layer["k"]))]
    logits = [capped(layer["scaling"] * dot(query, key), layer) for key in keys[:visible]]
    return normalise(logits) + [0.0] * (len(keys) - visible)


def last_rows(layer: Layer, W: int) -> list[list[list[float]]]:
    """Per query head the weights of the last W queries on all keys."""
    n = len(layer["k"][0])
    W = min(W, n)
    return [
        [weights(layer, h, q, n - W + at + 1) for at, q in enumerate(rows[-W:])] for h, rows in enumerate(layer["q"])
    ]


def groups(layer: Layer) -> list[list[int]]:
    G = len(layer["q"]) // len(layer["k"])
    return [list(range(g * G, (g + 1) * G)) for g in range(len(layer["k"]))]


def window(layer: Layer, W: int) -> int:
    """Tokens before the observation window."""
    return max(0, len(layer["k"][0]) - W)


def pool(row: Row, kernel: int, kind: str) -> list[float]:
    half, out = kernel // 2, []
    for i in range(len(row)):
        near = [row[j] for j in range(i - half, i + half + 1) if 0 <= j < len(row)]
        out.append(max(near) if kind == "max" else math.fsum(near) / kernel)
    return out


def padded(row: Row, n: int) -> Score:
    return [*row, *[None] * (n - len(row))]


def accumulated(layer: Layer) -> list[Score]:
    """Attention that each key got from all queries of its group."""
    n = len(layer["k"][0])
    found: list[Score] = []
    for group in groups(layer):
        rows = [weights(layer, h, q, at + 1) for h in group for at, q in enumerate(layer["q"][h])]
        found.append([math.fsum(row[i] for row in rows) for i in range(n)])
    return found


def epicache(layer: Layer) -> list[Score]:
    n = len(layer["k"][0])
    return [
        [max(column) for column in zip(*(weights(layer, h, q, n) for h in group for q in layer["q"][h]), strict=True)]
        for group in groups(layer)
    ]


def top(score: Sequence[float | None], B: int) -> list[int]:
    """Protected tokens, then the highest scores; lower position first."""
    pinned = [i for i, s in enumerate(score) if s is None]
    others = sorted((i for i, s in enumerate(score) if s is not None), key=lambda i: (-score[i], i))  # type: ignore[operator]
    return sorted(pinned + others[: max(0, B - len(pinned))])


def chunk_totals(members: Sequence[float | None], c: int) -> list[float]:
    """Sums of runs of c tokens before the window."""
    scored = [x for x in members if x is not None]
    return [math.fsum(scored[a : a + c]) for a in range(0, len(scored), c)]


def chunk_selection(members: Sequence[float | None], c: int, B: int) -> list[int]:
    """The window, whole chunks by their sums, and the best tokens of the chunk that does not fit."""
    totals = chunk_totals(members, c)
    kept = [i for i, x in enumerate(members) if x is None]
    past = len(members) - len(kept)
    for chunk in sorted(range(len(totals)), key=lambda u: (-totals[u], u)):
        inside = sorted(range(chunk * c, min((chunk + 1) * c, past)), key=lambda i: (-members[i], i))  # type: ignore[operator]
        kept += inside[: max(0, B - len(kept))]
    return sorted(kept)


def whole(targets: Sequence[Fraction]) -> list[int]:
    """Hand out what the floors leave, one by one, to the largest remainder that has not had one."""
    shares = [int(t // 1) for t in targets]
    left = {g: t % 1 for g, t in enumerate(targets)}
    while sum(shares) < sum(targets):
        g = max(left, key=lambda g: (left[g], -g))
        shares[g] += 1
        del left[g]
    return shares


def pyramid_shares(B: Fraction, W: int, L: int, n: int, beta: int) -> list[int]:
    """Tokens of each layer, the window among them, at a mean of B."""
    past = Fraction(n - W)
    base = min(B - W, past)
    if L == 1 or base == past:
        return whole([W + base] * L)
    first, last = 2 * base - base / beta, base / beta
    if first >= past:
        first, last = past, 2 * base - past
    return whole([W + (first * (L - 1 - layer) + last * layer) / (L - 1) for layer in range(L)])


def won(scores: Sequence[Sequence[float | None]], k: int, skip: Sequence[set[int]] | None = None) -> list[int]:
    """How many of the k best scores of a layer each head has, those to skip aside."""
    pool_ = [
        (-s, h, i) for h, row in enumerate(scores) for i, s in enumerate(row)
        if s is not None and not (skip and i in skip[h])
    ]
    best = sorted(pool_)[: max(0, k)]
    return [sum(entry[1] == h for entry in best) for h in range(len(scores))]


def adaptive_shares(scores: Sequence[Sequence[float | None]], B: int, safeguard: Fraction) -> list[int]:
    """Ada-KV's blend of wins and even share, whole by largest remainder."""
    H, n = len(scores), len(scores[0])
    pinned = sum(s is None for s in scores[0])
    base = min(B, n) - pinned
    wins = won(scores, H * base)
    return [pinned + share for share in whole([w * (1 - safeguard) + base * safeguard for w in wins])]


def competition_shares(scores: Sequence[Sequence[float | None]], B: int, safeguard: Fraction) -> list[int]:
    """Each head's best, then the layer's best."""
    H, n = len(scores), len(scores[0])
    pinned = sum(s is None for s in scores[0])
    quota = max(int(safeguard * B // 1), pinned)
    first = [{i for i in top(row, min(quota, n)) if row[i] is not None} for row in scores]
    held = [pinned + len(f) for f in first]
    more = won(scores, H * min(B, n) - sum(held), first)
    return [a + b for a, b in zip(held, more, strict=True)]
