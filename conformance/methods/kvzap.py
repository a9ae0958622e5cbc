"""KVzap by brute force, one number at a time: one linear map of hidden states, or two with GELU in between."""

import math
from collections.abc import Sequence

from conformance.methods.brute import Brute, Parts
from conformance.methods.policies import Score, top
from conformance.oracles.box import State
from conformance.oracles.boxes import around
from conformance.strategies.policy_inputs import Inputs, Kept, hidden_states, networks_of

Row = Sequence[float]
BOUND = 2.0**13
"""Bound of PO-KVZAP: 2^15 units roundoff of the row's largest score, in units of `boxes`."""


def mapped(W: Sequence[Row], b: Row, x: Row) -> list[float]:
    """Return W x + b."""
    return [math.fsum([*(w * y for w, y in zip(row, x, strict=True)), bias]) for row, bias in zip(W, b, strict=True)]


def bent(x: float, activation: str) -> float:
    """Return GELU of x, by the complement of the error function, or by the approximation with tanh."""
    if activation == "tanh":
        return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * math.erfc(-x / math.sqrt(2))


def rows(inputs: Inputs, B: int, activation: str = "erf") -> list[Score]:
    networks, result = networks_of(inputs), list[Score]()
    for at, view in enumerate(inputs.layers):
        W_2, b_2 = networks.W_2[at].tolist(), networks.b_2[at].tolist()
        scores = []
        for x in hidden_states(view).tolist():
            if networks.W_1 is not None and networks.b_1 is not None:
                inner = mapped(networks.W_1[at].tolist(), networks.b_1[at].tolist(), x)
                x = [bent(y, activation) for y in inner]
            scores.append(mapped(W_2, b_2, x))
        for row in zip(*scores, strict=True):
            result.append(around(row, BOUND) if State.unit else list(row))
    return result


def kept(inputs: Inputs, B: int, activation: str = "erf") -> Kept:
    return [top(row, B) for row in rows(inputs, B, activation)]


BRUTES = [
    Brute("PO-KVZAP", "kvzap", kept, slips={"activation": ("erf", "tanh")}, parts=Parts("", rows=rows)),
]
