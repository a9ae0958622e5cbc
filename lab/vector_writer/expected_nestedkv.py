"""Expected results of NestedKV's operations, from the oracle."""

from collections.abc import Callable, Mapping
from typing import Any

from conformance.methods import policies
from conformance.methods.keydiff import keydiff
from conformance.methods.nestedkv import kept as kept_of_a_layer
from conformance.methods.nestedkv import tokens
from conformance.oracles import nestedkv as oracle
from conformance.vectors.files import Json, nestedkv_parameters


def memories(i: Json, which: int) -> Json:
    p = nestedkv_parameters(i)
    return [list(oracle.memories(i["unit"], at, p)[which]) for at in range(len(i["unit"]))]


def scores(i: Json) -> Json:
    return [oracle.scores(head, nestedkv_parameters(i)) for head in i["k"]]


def kept(i: Json) -> Json:
    p = nestedkv_parameters(i)
    layers = ([oracle.scores(head, p) for head in layer] for layer in i["k"])
    return [group for layer in layers for group in kept_of_a_layer(layer, max(i["B"], p.N_sink), p)]


def ablations(i: Json) -> Json:
    p, B = nestedkv_parameters(i), i["B"]
    without: dict[str, list[list[int]]] = {"continuum": [], "adaptive": [], "both": []}
    for layer in i["k"]:
        distinct = keydiff({"k": layer})
        shares = policies.competition_shares(distinct, B, p.alpha_s)
        without["continuum"] += [policies.top(row, b) for row, b in zip(distinct, shares, strict=True)]
        without["both"] += [policies.top(row, B) for row in distinct]
        rows = [oracle.scores(head, p) for head in layer]
        without["adaptive"] += [
            policies.top([None if at < p.N_sink else x for at, x in enumerate(row)], max(B, p.N_sink)) for row in rows
        ]
    return without


DIRECT = {"NK-SCORE": ("nestedkv.anomaly_score", "score"), "NK-TOKENS": ("policies.eviction_budget", "tokens")}
"""Function of the reference that is called with the inputs as keyword arguments, and the names of its results."""

RESULTS: Mapping[str, Callable[[Any], Json]] = {
    "NK-UNIT-KEYS": lambda i: {"unit": oracle.unit(i["k"])},
    "NK-STABLE": lambda i: {"mu": oracle.mean(i["unit"])},
    "NK-EPISODIC": lambda i: {
        "b": [len(oracle.block_of(0, N, nestedkv_parameters(i))) for N in i["N"]], "mu": memories(i, 1),
    },
    "NK-CURRENT": lambda i: {"mu": memories(i, 2)},
    "NK-ANOMALY": lambda i: {"a": [oracle.anomaly(key, mu) for key, mu in zip(i["unit"], i["mu"], strict=True)]},
    "NK-MIN-MAX": lambda i: {"a": oracle.min_max(i["a"])},
    "NK-GAP": lambda i: {"delta": oracle.deltas(i["a"], nestedkv_parameters(i))},
    "NK-BLEND": lambda i: {"blend": oracle.blended(i["a"], i["delta"], nestedkv_parameters(i))},
    "NK-SURPRISE": lambda i: {"s": oracle.rectified(oracle.surprise(i["a"]))},
    "NK-ROUTE": lambda i: {"score": oracle.routed(i["a"], i["blend"], i["s"], nestedkv_parameters(i))},
    "NK-SCORE": lambda i: {"score": scores(i)},
    "NK-NESTEDKV": lambda i: {"kept": kept(i)},
    "NK-TOKENS": lambda i: {"tokens": tokens(i["r"], i["N"])},
    "NK-ABLATIONS": ablations,
}
