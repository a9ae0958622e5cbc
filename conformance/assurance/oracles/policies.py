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
    "adakv",
    "adaptive_shares",
    "caote",
    "chunk_selection",
    "chunk_totals",
    "competition_shares",
    "defensive",
    "epicache",
    "expected_attention",
    "keydiff",
    "knorm",
    "lagkv",
    "lagkv_information",
    "pool",
    "pyramid_shares",
    "rkv",
    "snapkv",
    "top",
    "tova",
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


def snapkv(layer: Layer, W: int, kernel: int) -> list[Score]:
    """Sum over the window, pool per query head, mean over the group."""
    n, past, rows, found = len(layer["k"][0]), window(layer, W), last_rows(layer, W), []
    for group in groups(layer):
        pooled = [pool([math.fsum(q[i] for q in rows[h]) for i in range(past)], kernel, "max") for h in group]
        found.append(padded([math.fsum(p[i] for p in pooled) / len(group) for i in range(past)], n))
    return found


def adakv(layer: Layer, W: int, kernel: int) -> list[Score]:
    """Mean over the window and the group, then pool."""
    n, past, rows, found = len(layer["k"][0]), window(layer, W), last_rows(layer, W), []
    for group in groups(layer):
        number = len(group) * len(rows[0])
        mean = [math.fsum(q[i] for h in group for q in rows[h]) / number for i in range(past)]
        found.append(padded(pool(mean, kernel, "max"), n))
    return found


def accumulated(layer: Layer) -> list[Score]:
    """Attention that each key got from all queries of its group."""
    n = len(layer["k"][0])
    found: list[Score] = []
    for group in groups(layer):
        rows = [weights(layer, h, q, at + 1) for h in group for at, q in enumerate(layer["q"][h])]
        found.append([math.fsum(row[i] for row in rows) for i in range(n)])
    return found


def tova(layer: Layer) -> list[Score]:
    rows, n = last_rows(layer, 1), len(layer["k"][0])
    return [[math.fsum(head[0][i] for head in rows) / len(rows) for i in range(n)]]


def knorm(layer: Layer) -> list[Score]:
    return [[-math.sqrt(dot(key, key)) for key in head] for head in layer["k"]]


def keydiff(layer: Layer) -> list[Score]:
    found: list[Score] = []
    for head in layer["k"]:
        unit = [[x / math.sqrt(dot(key, key)) for x in key] for key in head]
        anchor = [math.fsum(column) / len(unit) for column in zip(*unit, strict=True)]
        length = math.sqrt(dot(anchor, anchor))
        found.append([-(dot(key, anchor) / length if length else 0.0) for key in unit])
    return found


def lagkv_information(rows: Sequence[Row], reference: Sequence[Row]) -> list[float]:
    """Of one partition under the next: min-max by its channels, deviation over channels, softmax over tokens."""
    low, high = ([f(column) for column in zip(*reference, strict=True)] for f in (min, max))
    spreads = []
    for row in rows:
        scaled = [0.0 if a == b else (x - a) / (b - a) for x, a, b in zip(row, low, high, strict=True)]
        mean = math.fsum(scaled) / len(scaled)
        spreads.append(math.sqrt(math.fsum((x - mean) ** 2 for x in scaled) / (len(scaled) - 1)))
    return normalise(spreads)


def lagkv(layer: Layer, N_sink: int, lag: int) -> list[Score]:
    """A token's place inside its partition, best first; the end of the prompt lies above, the newest highest."""
    n, found = len(layer["k"][0]), []
    starts = list(range(N_sink, n - 2 * lag + 1, lag))
    for keys, values in zip(layer["k"], layer["v"], strict=True):
        score: Score = [None if at < N_sink else 1.0 + at for at in range(n)]
        for start in starts:
            here, after = slice(start, start + lag), slice(start + lag, start + 2 * lag)
            by_key, by_value = (lagkv_information(x[here], x[after]) for x in (keys, values))
            worth = [a + b for a, b in zip(by_key, by_value, strict=True)]
            for place, at in enumerate(sorted(range(lag), key=lambda i: (-worth[i], i))):
                score[start + at] = -float(place)
        found.append(score)
    return found


def rkv(layer: Layer, W: int, kernel: int, lam: float) -> list[Score]:
    """Importance and redundancy of the keys before the last W."""
    n, past, found = len(layer["k"][0]), window(layer, W), []
    if past == 0:
        return [[None] * n for _ in layer["k"]]
    for g, group in enumerate(groups(layer)):
        keys, importance = layer["k"][g], [0.0] * past
        W_now = n - past
        for at in range(-W_now, 0):
            logits = [
                max(capped(layer["scaling"] * dot(layer["q"][h][at], keys[i]), layer) for h in group)
                for i in range(past)
            ]
            importance = [a + b / W_now for a, b in zip(importance, normalise(logits), strict=True)]
        redundancy = rkv_redundancy(keys)
        pooled = pool(importance, kernel, "max")
        found.append(padded([lam * pooled[i] - (1 - lam) * redundancy[i] for i in range(past)], n))
    return found


def rkv_redundancy(keys: Sequence[Row]) -> list[float]:
    n = len(keys)
    unit = [[x / (math.sqrt(dot(key, key)) + 1e-8) for x in key] for key in keys]
    C = [[0.0 if i == j else dot(unit[i], unit[j]) for j in range(n)] for i in range(n)]
    for i in range(n):
        above = [j for j in range(n) if C[i][j] > 0.5]
        C[i][above[-1] if above else 0] = 0.0
    return normalise([math.fsum(C[i][j] for i in range(n)) / n for j in range(n)])


def caote_error(alpha: Row, values: Sequence[Row]) -> list[float]:
    """The change of the output when one token goes and the others are renormalised, done literally."""
    errors = []
    whole = [math.fsum(a * v[c] for a, v in zip(alpha, values, strict=True)) for c in range(len(values[0]))]
    for j in range(len(alpha)):
        others = [i for i in range(len(alpha)) if i != j]
        rest = math.fsum(alpha[i] for i in others)
        if rest == 0:
            errors.append(math.inf)
            continue
        without = [math.fsum(alpha[i] / rest * values[i][c] for i in others) for c in range(len(whole))]
        errors.append(math.dist(whole, without))
    return errors


def caote(layer: Layer) -> list[Score]:
    rows, n = last_rows(layer, 1), len(layer["k"][0])
    return [
        list(caote_error([math.fsum(rows[h][0][i] for h in group) / len(group) for i in range(n)], layer["v"][g]))
        for g, group in enumerate(groups(layer))
    ]


def epicache(layer: Layer) -> list[Score]:
    n = len(layer["k"][0])
    return [
        [max(column) for column in zip(*(weights(layer, h, q, n) for h in group for q in layer["q"][h]), strict=True)]
        for group in groups(layer)
    ]


def rotate(x: Row, position: float, inv_freq: Row, factor: float) -> list[float]:
    half = len(inv_freq)
    out = [0.0] * (2 * half)
    for f, omega in enumerate(inv_freq):
        c, s = factor * math.cos(position * omega), factor * math.sin(position * omega)
        out[f] = x[f] * c - x[f + half] * s
        out[f + half] = x[f + half] * c + x[f] * s
    return out


def expected_attention(layer: Layer, inv_freq: Row, factor: float, N_sink: int, N_future: int) -> list[Score]:
    """E exp(z) of a Gaussian query under the mean rotation of the next N_future positions."""
    n, d = len(layer["k"][0]), len(layer["k"][0][0])
    if n <= N_sink:
        return [[None] * n for _ in layer["k"]]
    found: list[Score] = []
    ahead = range(n, n + N_future)
    basis = [[float(a == b) for b in range(d)] for a in range(d)]
    columns = [
        [math.fsum(x) / N_future for x in zip(*(rotate(e, p, inv_freq, factor) for p in ahead), strict=True)]
        for e in basis
    ]
    for g, group in enumerate(groups(layer)):
        keys = layer["k"][g][N_sink:]
        total = [0.0] * len(keys)
        for h in group:
            # Rotation back by the same angle, and both factors taken off.
            pre = [
                [x / factor**2 for x in rotate(q, -at, inv_freq, factor)] for at, q in enumerate(layer["q"][h])
            ][N_sink:]
            turned = [
                [math.fsum(q[a] * columns[a][b] for a in range(d)) for b in range(d)] for q in pre
            ]
            mean = [math.fsum(x) / len(turned) for x in zip(*turned, strict=True)]
            z = []
            for key in keys:
                projections = [dot([a - b for a, b in zip(q, mean, strict=True)], key) for q in turned]
                variance = math.fsum(x * x for x in projections) / len(projections)
                z.append(layer["scaling"] * dot(mean, key) + layer["scaling"] ** 2 * variance / 2)
            total = [a + b / len(group) for a, b in zip(total, normalise(z), strict=True)]
        norms = [math.sqrt(dot(v, v)) for v in layer["v"][g][N_sink:]]
        found.append([*[None] * N_sink, *[a * b for a, b in zip(total, norms, strict=True)]])
    return found


def defensive(layer: Layer, W_o: Sequence[Sequence[Row]], W: int, kernel: int, B: int) -> list[Score]:
    """Worst case, prior, output share, and the first stage at the layer's largest score."""
    n, past, rows = len(layer["k"][0]), window(layer, W), last_rows(layer, W)
    if past == 0:
        return [[None] * n for _ in layer["k"]]
    tail = [math.fsum(q[max(0, past - W) : past]) for head in rows for q in head]
    bound = 0.9 - math.fsum(tail) / len(tail)
    scores, firsts, sizes = [], [], []
    for g, group in enumerate(groups(layer)):
        worst = [0.0] * past
        for row in (q[:past] for h in group for q in rows[h]):
            pooled = pool(row, kernel, "average")
            share = math.fsum(row) / math.fsum(pooled)
            worst = [max(a, b * share) for a, b in zip(worst, pooled, strict=True)]
        floor = math.fsum(worst) / past
        scores.append([max(x, floor) for x in worst])
        mean = [math.fsum(q[i] for h in group for q in rows[h]) for i in range(past)]
        whole, covered, chosen = math.fsum(mean), 0.0, []
        for i in sorted(range(past), key=lambda i: (-mean[i], i)):
            covered += mean[i] / whole
            if covered >= bound:
                break
            chosen.append(i)
        firsts.append(chosen[: max(0, B - W)])
        sizes.append([
            math.fsum(
                math.fsum(abs(dot(layer["v"][g][i], [r[c] for r in W_o[h]])) for c in range(len(W_o[h][0])))
                for h in group
            ) / len(group) for i in range(past)
        ])
    for g, row in enumerate(scores):
        scores[g] = [x * (sizes[g][i] / math.fsum(size[i] for size in sizes)) for i, x in enumerate(row)]
    largest = max(max(row) for row in scores)
    for row, first in zip(scores, firsts, strict=True):
        for i in first:
            row[i] = largest
    return [padded(row, n) for row in scores]


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
