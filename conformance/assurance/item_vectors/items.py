"""The items on the reference: its function of the table of operations, called by name, or an adapter."""

from collections.abc import Mapping
from functools import partial
from pkgutil import resolve_name

import numpy as np

from conformance.assurance.item_vectors.adapters import DIVERSITY_ITEMS, INJECTION_ITEMS, NESTEDKV_ITEMS
from conformance.assurance.item_vectors.policies import POLICY_ITEMS
from conformance.assurance.vector_writer.brute_force import Operation
from conformance.assurance.vector_writer.expected import OPERATIONS
from conformance.vectors.codec import (
    Item,
    call,
    edges_of,
    fields_of,
    flags,
    floats,
    integers,
    named,
    record,
    results,
    state_of,
)
from conformance.vectors.files import Json
from conformance.vectors.subject import STAGES
from reference.backend import BACKEND
from reference.crystalcache import activation, coverage, graph, impact, live, prefill, tail, trunks
from reference.crystalcache.crystallization import crystallization
from spec.budget import parse_budget
from spec.parameters import CrystalCacheParameters
from spec.records import Dissolution


def interface(i: Json, p: CrystalCacheParameters) -> Mapping[str, object]:
    sides = trunks.interface(tuple(i["current"]), tuple(i["sentence"]))
    return named(["last5", "first5"], [[side.start, side.stop] for side in sides])


def interface_edges(i: Json, p: CrystalCacheParameters) -> Mapping[str, object]:
    P = trunks.interface(tuple(i["current"]), tuple(i["sentence"]))
    return {"weights": trunks.interface_weights({(a, b): w for a, b, w in i["edges"]}, P)}


def covered(i: Json, p: CrystalCacheParameters) -> Mapping[str, object]:
    offsets, ratio, D = integers(i["offsets"]), floats(i["ratio"]), floats(i["D"])
    reserve = coverage.coverage_reserve(np.diff(offsets), flags(i["protected"]), i["B"], p.coverage)
    found = coverage.backfill(Dissolution(integers(i["kept"]), ratio, ratio * D), offsets, D, reserve)
    return {"reserve": reserve, **vars(found)}


def merge_threshold(i: Json, p: CrystalCacheParameters) -> Mapping[str, object]:
    by_pair = {(a, b): w for a, b, w in i["edges"]}
    return {"tau": trunks.median_strength(integers(i["sentences"]), by_pair, p.tau_merge)}


RARITY = {"reciprocal": impact.reciprocal_rarity, "exponential": impact.exponential_rarity}
IMPACT = {"mixture": impact.impact, "salience": impact.impact_without_rarity, "uniform": impact.uniform_impact}


def trunk_weights(i: Json, p: CrystalCacheParameters) -> Mapping[str, object]:
    a, b, number, total = zip(*i["pairs"], strict=True)
    pairs = graph.TrunkPairs(integers(a), integers(b), integers(number), floats(total))
    return named(["weights", "kept"], graph.trunk_weights(pairs, integers(i["sizes"]), p.tau_edge))


def crystallized(i: Json, p: CrystalCacheParameters) -> Mapping[str, object]:
    D = crystallization(floats(i["degree"]), p.s, p.epsilon)
    return {"D": D if p.graph == "degree" else np.zeros_like(D)}


def start(i: Json, p: CrystalCacheParameters) -> Mapping[str, object]:
    q, k, ids = floats(i["q"]), floats(i["k"]), integers(i["token_ids"])
    found = prefill(q, k, ids, frozenset(i["sentence_ends"]), i["budget"], p, scaling=i["scaling"])
    budget = parse_budget(i["budget"])
    return fields_of(live.start_state(found, ids, activation.inverse_key_norms(k), budget, p))


def chunk_trunks(i: Json, p: CrystalCacheParameters) -> Mapping[str, object]:
    norms = floats(i["chunk_inverse_norms"])
    return fields_of(call(tail.join_chunk, i, p, inverse_norms=norms, backend=BACKEND))


def by_name(one: Operation, i: Json, p: CrystalCacheParameters) -> Mapping[str, object]:
    """The reference's function on the inputs; the vectors name what it is called with."""
    return results(call(resolve_name(f"reference.{one.reference}"), i, p, backend=BACKEND), one.gives)


ITEMS: dict[str, Item] = {
    **{name: partial(by_name, one) for name, one in OPERATIONS.items() if one.reference},
    "CC-BUDGET-FORMS": lambda i, p: {"tokens": parse_budget(i["budget"]).tokens(i["seen"])},
    "CC-EDGES": lambda i, p: {"edges": [list(edge) for edge in zip(*record(i).edges(), strict=True)]},
    "CC-INTERFACE": interface,
    "CC-INTERFACE-EDGES": interface_edges,
    "CC-IMPACT": lambda i, p: {"M": IMPACT[p.impact](floats(i["S"]), floats(i["U"]), p)},
    "CC-TRUNK-EDGES": lambda i, p: {
        "pairs": [list(row) for row in zip(*graph.trunk_pairs(edges_of(i), integers(i["offsets"])), strict=True)]
    },
    "CC-TRUNK-WEIGHT": trunk_weights,
    "CC-CRYSTALLIZATION": crystallized,
    "CC-RARITY-FORMS": lambda i, p: {"U": RARITY[p.rarity](integers(i["c"]))},
    "CC-ADAPTIVE-MERGE": merge_threshold,
    "CC-COVERAGE": covered,
    "CC-START": start,
    "CC-LIVE": lambda i, p: fields_of(live.keep(state_of(i), integers(i["slots"]), floats(i["D_after"]))),
    "CC-CHUNK-TRUNKS": chunk_trunks,
    **{
        name: partial(lambda of, i, p: of(i), of)
        for name, of in {**POLICY_ITEMS, **NESTEDKV_ITEMS, **DIVERSITY_ITEMS, **INJECTION_ITEMS}.items()
    },
}
BY_ITEM: dict[str, Item] = {
    **{one.items[0]: partial(STAGES[name], BACKEND) for name, one in OPERATIONS.items() if len(one.items) == 1},
    **ITEMS,
}
"""Every item on the reference, those that are a stage's alone too."""
