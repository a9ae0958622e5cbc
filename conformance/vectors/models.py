"""A decode state as JSON (flat, one name per field), and as the oracle's model; plain Python."""

from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

from conformance.oracles.decode import Model, Pair, Trunk
from conformance.oracles.s6 import tokens
from conformance.vectors.files import Json

WEIGHTS = ("indptr", "indices", "weights")
STATE = (
    "seen", "step", "positions", "offsets", "impact", "inverse_norms", "trunk_impact", "D", *WEIGHTS, "ids", "counts",
    "mu", "sigma", "tail_ids", "tail_inverse_norms",
)


def pairs_of(i: Json, names: Sequence[int]) -> dict[Pair, float]:
    """W by unordered pair of names, from the rows of its CSR form."""
    return {
        frozenset({names[g], names[i["indices"][e]]}): i["weights"][e]
        for g, (start, stop) in enumerate(pairwise(i["indptr"])) for e in range(start, stop)
    }


def csr_of(W: Mapping[Pair, float], names: Sequence[int]) -> dict[str, Any]:
    """The CSR form of W, columns ascending."""
    rows = [[(b, W[frozenset({g, h})]) for b, h in enumerate(names) if frozenset({g, h}) in W] for g in names]
    entries = [entry for row in rows for entry in row]
    return {
        "indptr": [sum(len(row) for row in rows[:g]) for g in range(len(rows) + 1)],
        "indices": [b for b, _ in entries], "weights": [w for _, w in entries],
    }


def budget_of(budget: Json, most: int) -> Fraction | int:
    """A written budget as the oracles take it, exact for up to `most` tokens seen."""
    whole = tokens(budget, 10**6) if isinstance(budget, float) or not str(budget).isdecimal() else None
    return int(budget) if whole is None else Fraction(whole, 10**6)


def model_of(i: Json) -> Model:
    """The oracle's model of a state; a trunk is named after its first live position."""
    members = [i["positions"][start:stop] for start, stop in pairwise(i["offsets"])]
    trunks = [Trunk(g[0], g, i["trunk_impact"][at], i["D"][at]) for at, g in enumerate(members)]
    return Model(
        budget_of(i["budget"], i["seen"]), i["seen"], i["step"], trunks,
        dict(zip(i["positions"], i["impact"], strict=True)),
        dict(zip(i["positions"], i["inverse_norms"], strict=True)),
        pairs_of(i, [g.name for g in trunks]), Counter(dict(zip(i["ids"], i["counts"], strict=True))), i["mu"],
        i["sigma"], list(zip(i["tail_ids"], i["tail_inverse_norms"], strict=True)),
    )


def results_of(now: Model) -> dict[str, Any]:
    """The fields of a state, as `STATE` names them."""
    order = [i for g in now.trunks for i in g.members]
    ids = sorted(token for token, number in now.counts.items() if number)
    return {
        "seen": now.seen, "step": now.step, "positions": order,
        "offsets": [sum(len(g.members) for g in now.trunks[:at]) for at in range(len(now.trunks) + 1)],
        "impact": [now.M[i] for i in order], "inverse_norms": [now.norm[i] for i in order],
        "trunk_impact": [g.M_bar for g in now.trunks], "D": [g.D for g in now.trunks],
        **csr_of(now.W, [g.name for g in now.trunks]), "ids": ids, "counts": [now.counts[token] for token in ids],
        "mu": now.mu, "sigma": now.sigma, "tail_ids": [token for token, _ in now.tail],
        "tail_inverse_norms": [norm for _, norm in now.tail],
    }


CHAIN: Json = {"indptr": [0, 1, 3, 4], "indices": [1, 0, 2, 1], "weights": [0.5, 0.5, 0.25, 0.25]}
# Three tokens in the tail, and what a state that holds them has seen.
WAITING = {"tail_ids": [3, 2, 5], "tail_inverse_norms": [0.5, float("inf"), 1.0], "seen": 14, "step": 3}


def state(**changes: Json) -> dict[str, Any]:
    """Three trunks of which 8 of 11 tokens live, in a chain of edges; nothing in the tail."""
    return {
        "budget": 8, "seen": 11, "step": 0, "positions": [0, 1, 2, 5, 6, 7, 9, 10], "offsets": [0, 3, 6, 8],
        "impact": [4.0, 1.0, 2.0, 3.0, 3.0, 1.0, 0.5, 8.0],
        "inverse_norms": [1.0, 0.25, 0.125, 1.0, 0.5, 0.125, 0.25, 0.25], "trunk_impact": [2.0, 3.0, 4.0],
        "D": [0.5, 0.25, 0.75], **CHAIN, "ids": [2, 3, 7], "counts": [2, 8, 1], "mu": 0.5, "sigma": 0.25,
        "tail_ids": [], "tail_inverse_norms": [], **changes,
    }
