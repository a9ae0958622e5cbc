"""Fast KVzip by brute force: a gate for each query head, one number at a time."""

import math
from collections.abc import Sequence
from typing import Any

from conformance.methods.brute import SINK, Brute, Parts, W, both_ends
from conformance.methods.kvzap import BOUND, mapped
from conformance.methods.kvzip import global_shares
from conformance.methods.policies import Score, top
from conformance.oracles.box import State
from conformance.oracles.boxes import around
from conformance.strategies.policy_inputs import Inputs, Kept, gates_of, hidden_states

Row = Sequence[float]


def normed(x: Row, weight: Row, norm: str) -> list[float]:
    """Return x divided by the root of its mean square, or by its length, times the weight."""
    size = math.fsum(y * y for y in x) / (len(x) if norm == "mean" else 1)
    return [w * y / math.sqrt(size + 1e-6) for y, w in zip(x, weight, strict=True)]


def logit(q: Row, k: Row) -> float:
    return math.fsum(a * b for a, b in zip(q, k, strict=True)) / math.sqrt(len(q))


def gate(logit: float, others: Row, base: str) -> float:
    """Return 1 / (1 + the sum of exp(other - own)). A base key alone is a known error."""
    others = others if base == "all" else [max(others)]
    try:
        return 1 / (1 + math.fsum(math.exp(other - logit) for other in others))
    except OverflowError:
        return 0.0


def all_rows(inputs: Inputs, B: int, norm: str = "mean", base: str = "all", **constants: Any) -> list[Score]:
    """Return the scores of all tokens, without a protection."""
    gates, result = gates_of(inputs), list[Score]()
    G = gates.W_q.shape[1] // gates.W_k.shape[1]
    for at, view in enumerate(inputs.layers):
        of = {name: x[at].tolist() for name, x in gates.arrays.items()}
        for g, W_k in enumerate(of["W_k"]):
            row = list[float]()
            for x in hidden_states(view).tolist():
                k, shares = normed(mapped(W_k, [0.0] * len(W_k), x), of["norm_k"], norm), list[float]()
                for h in range(g * G, (g + 1) * G):
                    q = normed(mapped(of["W_q"][h], of["b_q"][h], x), of["norm_q"], norm)
                    others = [logit(q, key) for key in of["base"][g]]
                    shares.append(gate(logit(q, k) + of["bias"][h], others, base))
                row.append(math.fsum(shares) / G)
            result.append(around(row, BOUND) if State.unit else list(row))
    return result


def kept(inputs: Inputs, B: int, N_sink: int, N_recent: int, **slips: Any) -> Kept:
    ends = {*range(N_sink), *range(inputs.n - N_recent, inputs.n)}
    rows = [[None if i in ends else x for i, x in enumerate(row)] for row in all_rows(inputs, B, **slips)]
    return [top(row, share) for row, share in zip(rows, global_shares(rows, B), strict=True)]


BRUTES = [
    Brute(
        "PO-FAST-KVZIP", "fast-kvzip", kept, {"N_sink": SINK, "N_recent": W}, SINK + W, both_ends,
        published={"N_sink": 4, "N_recent": 32}, slips={"norm": ("mean", "length"), "base": ("all", "largest")},
        parts=Parts("sink=N_sink/recent=N_recent/layers=global", rows=all_rows, unscored=""),
    ),
]
