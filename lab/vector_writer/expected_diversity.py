"""Expected results of the operations in diversity.md and triattention.md, from the oracles."""

import hashlib
import struct
from collections.abc import Callable, Mapping
from typing import Any

from conformance.methods import policies as oracle
from conformance.methods import signatures as signed
from conformance.methods import triattention as tri
from conformance.methods.knorm import knorm
from conformance.oracles import diversity as alpha
from conformance.vectors.files import Json

OFFSETS = [1 << e for e in range(17)]


def cosines(i: Json) -> Json:
    V = [signed.unit(u) for u in i["u"]]
    return {"V": V, "cosines": [[alpha.cosine(a, b) for b in V] for a in V]}


def greedy(i: Json) -> Json:
    retained = [at for at, kept in enumerate(i["retained"]) if kept]
    return {"kept": alpha.alpha(i["s"], i["V"], retained, i["k"], i["lam"])}


def composed(i: Json) -> Json:
    """Return the kept sets of diversity over Knorm, which has a kept set for each layer and head."""
    rows = [row for k in i["k"] for row in knorm({"k": k})]
    V = signed.signatures(i["v"], i["mode"])
    part, n = len(rows) // len(V), len(rows[0])
    return {"kept": [
        alpha.alpha([x or 0.0 for x in row], V[g // part], [], min(i["B"], n), i["lam"])
        if i["lam"] else oracle.top(row, i["B"]) for g, row in enumerate(rows)
    ]}


def variant_b(i: Json) -> Json:
    prior = signed.toward_mean(i["V"])
    return {
        "prior": prior,
        "kept": oracle.top([x + i["lam"] * p for x, p in zip(i["s"], prior, strict=True)], i["B"]),
    }


def statistics(i: Json) -> Json:
    result = [tri.statistics(head) for head in i["q"]]
    return {"mean": [mean for mean, _ in result], "magnitude": [sizes for _, sizes in result]}


def rope(i: Json) -> Json:
    numbers = [*i["inv_freq"], i["factor"]]
    return {"rope": hashlib.sha256(struct.pack(f"<{len(numbers)}d", *numbers)).hexdigest()[:16]}


def score_of(i: Json, k: Any, p: int, head: int) -> float:
    return tri.score(k, p, i["t"], i["mean"][head], i["magnitude"][head], i["inv_freq"], i["factor"], OFFSETS)


def score(i: Json) -> Json:
    return {"score": [
        [score_of(i, k, p, head) for k, p in zip(i["k"], i["positions"], strict=True)] for head in range(len(i["mean"]))
    ]}


def ranking(i: Json) -> Json:
    Z = [[[tri.z_score(row, i["pinned"]) for row in group] for group in layer] for layer in i["X"]]
    return {"rows": [[float("nan") if x is None else x for x in row] for row in tri.joined(Z, i["mode"])]}


def kept(i: Json) -> Json:
    Z, n = [], len(i["k"][0][0])
    for k, mean, magnitude in zip(i["k"], i["mean"], i["magnitude"], strict=True):
        G = len(mean) // len(k)
        layer = {"t": n, "mean": mean, "magnitude": magnitude, "inv_freq": i["inv_freq"], "factor": 1.0}
        Z.append([[
            tri.z_score([score_of(layer, k[g][p], p, g * G + h) for p in range(n)],
                        [p < i["pin_prompt"] for p in range(n)])
            for h in range(G)
        ] for g in range(len(k))])
    return {"kept": [oracle.top(row, i["B"]) for row in tri.joined(Z, i["mode"])]}


DIRECT = {
    "DV-GREEDY": ("diversity.diverse", "kept"), "DV-SCHEDULE": ("policies.scheduled", "budgets"),
    "DV-SIGNATURE": ("diversity.signatures", "signatures"),
    "TA-STATISTICS": ("triattention.band_statistics", "mean magnitude"),
}
"""Function of the reference that is called with the inputs as keyword arguments, and the names of its results."""
RESULTS: Mapping[str, Callable[[Any], Json]] = {
    "DV-COSINE": cosines,
    "DV-SIGNATURE": lambda i: {"signatures": signed.signatures(i["values"], i["mode"])},
    "DV-GREEDY": greedy,
    "DV-POLICY": composed,
    "DV-VARIANT-B": variant_b,
    "DV-SCHEDULE": lambda i: {"budgets": signed.schedule(i["B"], i["rounds"], i["tilt"])},
    "TA-STATISTICS": statistics,
    "TA-CALIBRATION": rope,
    "TA-SCORE": score,
    "TA-RANKING": ranking,
    "TA-POLICY": kept,
}
