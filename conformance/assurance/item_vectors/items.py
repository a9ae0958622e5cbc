"""The same operations on the reference's functions, item by item."""

from collections.abc import Mapping
from functools import partial

import numpy as np

from conformance.assurance.item_vectors import injection
from conformance.assurance.item_vectors.decode import DECODE_ITEMS
from conformance.assurance.item_vectors.diversity import DIVERSITY_ITEMS
from conformance.assurance.item_vectors.nestedkv import NESTEDKV_ITEMS
from conformance.assurance.item_vectors.policies import POLICY_ITEMS
from conformance.vectors.arrays import Item, flags, floats, integers, named
from conformance.vectors.json_values import Json
from conformance.vectors.subject import record
from reference.crystalcache import coattention as s1
from reference.crystalcache import (
    compaction,
    coverage,
    dissolution,
    graph,
    impact,
    protection,
    renewal,
    score,
    sentences,
    tiers,
    trunks,
)
from reference.crystalcache.crystallization import crystallization
from reference.crystalcache.observed_layer import observed_layer
from reference.memory import kv_bytes
from spec.budget import parse_budget
from spec.parameters import CrystalCacheParameters
from spec.records import Dissolution, Edges

__all__ = ["ITEMS"]


def edges(triples: Json) -> Edges:
    first, second, weight = zip(*triples, strict=True) if triples else ((), (), ())
    return Edges(integers(first), integers(second), floats(weight))


def attention(i: Json, p: CrystalCacheParameters) -> Mapping[str, object]:
    positions = integers(i["query_positions"]), integers(i["key_positions"])
    return {"A": s1.attention(floats(i["q"]), floats(i["k"]), *positions, i["scaling"], i["softcap"])}


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


ITEMS: dict[str, Item] = {
    "CC-MEMORY": lambda i, p: {"bytes": kv_bytes(**i)},
    "CC-OBSERVED-LAYER": lambda i, p: {"layer": observed_layer(**i)},
    "CC-BUDGET-FORMS": lambda i, p: {"tokens": parse_budget(i["budget"]).tokens(i["seen"])},
    "CC-BUDGET": lambda i, p: {
        "B": protection.effective_budget(parse_budget(i["budget"]), i["n"], p.N_sink, p.W_recent)
    },
    "CC-ATTENTION": attention,
    "CC-SALIENCE": lambda i, p: {"S": s1.salience(floats(i["own"]), p)},
    "CC-ROW-NORM": lambda i, p: {"rows": s1.row_normalise(floats(i["A"]), p.epsilon)},
    "CC-INTRA": lambda i, p: named(["index", "weight"], s1.intra_neighbours(floats(i["rows"]), p)),
    "CC-CROSS": lambda i, p: named(["index", "weight"], s1.cross_neighbours(floats(i["earlier"]), p)),
    "CC-EDGES": lambda i, p: {"edges": [list(edge) for edge in zip(*record(i).edges(), strict=True)]},
    "CC-SENTENCES": lambda i, p: {"offsets": sentences.sentence_offsets(flags(i["ends"]))},
    "CC-INTERFACE": interface,
    "CC-INTERFACE-EDGES": interface_edges,
    "CC-MERGE": lambda i, p: {"merges": trunks.merges(floats(i["weights"]), i["size"], i["next_size"], p)},
    "CC-SPLIT": lambda i, p: {"sizes": trunks.split_sizes(i["size"], i["T_max"])},
    "CC-COUNT": lambda i, p: {"c": impact.token_counts(integers(i["token_ids"]))},
    "CC-RARITY": lambda i, p: {"U": impact.rarity(integers(i["c"]))},
    "CC-IMPACT": lambda i, p: {"M": IMPACT[p.impact](floats(i["S"]), floats(i["U"]), p)},
    "CC-TRUNK-IMPACT": lambda i, p: {"M_bar": impact.trunk_impact(floats(i["M"]), integers(i["offsets"]))},
    "CC-TRUNK-EDGES": lambda i, p: {
        "pairs": [list(row) for row in zip(*graph.trunk_pairs(edges(i["edges"]), integers(i["offsets"])), strict=True)]
    },
    "CC-TRUNK-WEIGHT": trunk_weights,
    "CC-DEGREE": lambda i, p: {"degree": graph.degree(integers(i["indptr"]), floats(i["weights"]))},
    "CC-CRYSTALLIZATION": crystallized,
    "CC-NORMALISED-IMPACT": lambda i, p: {
        "M_tilde": score.normalised_impact(floats(i["M_bar"]), flags(i["protected"]), p.epsilon)
    },
    "CC-SCORE": lambda i, p: {"score": score.score(floats(i["D"]), floats(i["M_tilde"]), p.alpha)},
    "CC-PROTECTED": lambda i, p: {
        "protected": protection.protected_trunks(integers(i["offsets"]), i["n"], p.N_sink, p.W_recent)
    },
    "CC-CUT": lambda i, p: {"c_0": protection.cut(integers(i["sizes"]), flags(i["protected"]), i["B"])},
    "CC-ALLOCATE": lambda i, p: {"r": dissolution.allocate(integers(i["sizes"]), i["c_0"], p.N_min)},
    "CC-KEEP-COUNT": lambda i, p: {"k": dissolution.keep_count(i["r"], i["size"], p.N_min)},
    "CC-DISSOLVE-D": lambda i, p: {"D": dissolution.dissolved_D(floats(i["D"]), floats(i["r"]))},
    "CC-COMPACT": lambda i, p: named(
        ["K", "V"], compaction.compact(floats(i["K"]), floats(i["V"]), integers(i["R"]))
    ),
    "CC-MEAN-SALIENCE": lambda i, p: {"S": s1.mean_salience(floats(i["own"]), p)},
    "CC-UNIT-IMPACT": lambda i, p: {"M": impact.unit_impact(floats(i["S"]), floats(i["U"]), p)},
    "CC-UNIT-TRUNK-IMPACT": lambda i, p: {"M_bar": impact.unit_trunk_impact(floats(i["M_bar"]), p.epsilon)},
    "CC-TIER-COUNT": lambda i, p: {"kept": tiers.tier_counts(integers(i["sizes"]), i["t"], p.N_min)},
    "CC-TIERS": lambda i, p: {"r": tiers.tier_allocate(integers(i["sizes"]), i["c_0"], p.N_min)},
    "CC-RENEWAL": lambda i, p: {"D": renewal.renewed_D(floats(i["D"]), flags(i["active"]), i["renewal"])},
    "CC-RARITY-FORMS": lambda i, p: {"U": RARITY[p.rarity](integers(i["c"]))},
    "CC-ADAPTIVE-MERGE": merge_threshold,
    "CC-COVERAGE": covered,
    **DECODE_ITEMS,
    **{
        name: partial(lambda of, i, p: of(i), of)
        for name, of in {**POLICY_ITEMS, **NESTEDKV_ITEMS, **DIVERSITY_ITEMS, **injection.ITEMS}.items()
    },
}
