"""TriAttention by brute force: one key, one band and one offset at a time. No code is shared with the reference."""

import cmath
import math
from collections.abc import Callable, Sequence

from conformance.methods.brute import Brute, Parts, after_steps
from conformance.methods.policies import Score, top
from conformance.oracles.box import State
from conformance.oracles.boxes import around
from conformance.oracles.choices import Answer
from conformance.strategies.policy_inputs import Inputs, Kept

Row = Sequence[float]
BOUND = 2.0**13
"""Bound of TA-RANKING: 2^15 units roundoff of the row's largest score, in units of `boxes`."""
OFFSETS = tuple(2**e for e in range(17))


def band(x: Row, f: int) -> complex:
    """Return channels f and f + d / 2 as a complex number."""
    return complex(x[f], x[f + len(x) // 2])


def statistics(queries: Sequence[Row]) -> tuple[list[float], list[float]]:
    """Return the mean of the channels, and the mean modulus of the bands."""
    m, d = len(queries), len(queries[0])
    mean = [math.fsum(q[c] for q in queries) / m for c in range(d)]
    return mean, [math.fsum(abs(band(q, f)) for q in queries) / m for f in range(d // 2)]


def score(
    k: Row, position: int, t: int, mean: Row, magnitude: Row, inv_freq: Row, factor: float, offsets: Sequence[int],
) -> float:
    """Return the mean of S_delta over the offsets, as in the equations: amplitudes, phases and distances."""
    per_offset: list[list[float]] = [[] for _ in offsets]
    for f, omega in enumerate(inv_freq):
        k_f = band(k, f) * cmath.exp(complex(0, -omega * position)) / factor
        q_f = band(mean, f)
        phi, size = cmath.phase(q_f * k_f.conjugate()), factor**2 * abs(q_f) * abs(k_f)
        rest = factor**2 * (magnitude[f] - abs(q_f)) * abs(k_f)
        for terms, delta in zip(per_offset, offsets, strict=True):
            terms += [size * math.cos(omega * (t - position + delta) + phi), rest]
    return math.fsum(map(math.fsum, per_offset)) / len(offsets)


def z_score(row: Row, pinned: Sequence[bool]) -> list[float | None]:
    """Return z-scores over the tokens that are not pinned. A deviation below 1e-6 counts as 1e-6."""
    free = [x for x, shut in zip(row, pinned, strict=True) if not shut]
    if not free:
        return [None] * len(row)
    mu = math.fsum(free) / len(free)
    sigma = max(math.sqrt(math.fsum((x - mu) ** 2 for x in free) / len(free)), 1e-6)
    return [None if shut else (x - mu) / sigma for x, shut in zip(row, pinned, strict=True)]


def joined(Z: Sequence[Sequence[Sequence[Sequence[float | None]]]], mode: str) -> list[list[float | None]]:
    """Return one row of scores for each kept set, from Z[layer][KV head][query head of its group][token]."""
    tokens = range(len(Z[0][0][0]))

    def most(rows: Sequence[Sequence[float | None]], i: int) -> float | None:
        return None if rows[0][i] is None else max(x for x in (row[i] for row in rows) if x is not None)

    best = [[[most(group, i) for i in tokens] for group in layer] for layer in Z]
    if mode == "global":
        return [[most([row for layer in best for row in layer], i) for i in tokens]]
    if mode == "layer and head":
        return [row for layer in best for row in layer]
    by_head: list[list[float | None]] = []
    for g in range(len(Z[0])):
        column = [[layer[g][i] for layer in best] for i in tokens]
        by_head.append([None if c[0] is None else math.fsum(x for x in c if x is not None) / len(c) for c in column])
    return [list(by_head[g]) for _ in Z for g in range(len(Z[0]))]


def rows(
    inputs: Inputs, mode: str, live: Callable[[int], Sequence[int]], t: int, pinned: int,
) -> list[Score]:
    """Return one row of scores for each kept set. `live` returns the cached positions of a layer and KV head."""
    H_kv, Z = inputs.H_kv, []
    for at, view in enumerate(inputs.layers):
        q, k, G = view.q.tolist(), view.k.tolist(), len(view.q) // H_kv
        means = [statistics(head) for head in q]
        Z.append([[
            z_score(
                [score(k[g][p], p, t, *means[g * G + h], inputs.inv_freq.tolist(), inputs.factor, OFFSETS)
                 for p in live(at * H_kv + g)],
                [p < pinned for p in live(at * H_kv + g)],
            ) for h in range(G)
        ] for g in range(H_kv)])
    return joined(Z, mode)


def of_prompt(mode: str) -> Callable[..., Kept]:
    def kept(inputs: Inputs, B: int, pin_prompt: int, prompt: str = "inside") -> Kept:
        """Return the kept sets. The pinned prompt counts in B, or is added to B, as in TensorRT-LLM."""
        places = B + (pin_prompt if prompt == "on top" else 0)

        def decide(live: Sequence[Sequence[int]], seen: int) -> list[Answer]:
            result = rows(inputs, mode, lambda g: live[g % len(live)], seen, pin_prompt)
            return [top(around(row, BOUND), places) for row in result]

        sets = 1 if mode == "global" else len(inputs.layers) * inputs.H_kv
        return after_steps(decide, sets, inputs, places, excess=SLACK)

    return kept


def scores(mode: str) -> Callable[..., list[Score]]:
    def of_inputs(inputs: Inputs, B: int, pin_prompt: int) -> list[Score]:
        result = rows(inputs, mode, lambda g: range(inputs.n), inputs.n, pin_prompt)
        return [around(row, BOUND) if State.unit else row for row in result]

    return of_inputs


SLACK = 128
"""A decode step decides if a set has this many tokens more than the budget."""
PUBLISHED = {"mode": "global", "pin_prompt": 0, "slack": SLACK}
BRUTES = [
    Brute("TA-POLICY", name, of_prompt(mode), {"pin_prompt": 0}, published=PUBLISHED, decoded=True,
          readings={"prompt": ("inside", "on top")},
          parts=Parts("sink=pin_prompt/every=1:excess=slack/floor=none", rows=scores(mode)))
    for name, mode in (("triattention", "global"), ("triattention-by-head", "head"),
                       ("triattention-by-layer-and-head", "layer and head"))
]
