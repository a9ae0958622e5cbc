"""Functions that run the reference on the vectors of each item, called by name or through an adapter."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pkgutil import resolve_name
from typing import Any

import numpy as np

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
from conformance.vectors.files import Json, nestedkv_parameters
from conformance.vectors.subject import STAGES
from lab.policy_vectors import POLICY_ITEMS, Result, kept
from lab.vector_writer.brute_force import Operation
from lab.vector_writer.expected import OPERATIONS
from reference import directions, diversity, policies, statistics
from reference import nestedkv as nk
from reference.backend import BACKEND
from reference.calibration import Calibration, Identity
from reference.crystalcache import activation, coverage, graph, impact, live, prefill, tail, trunks
from reference.crystalcache.crystallization import crystallization
from reference.injection import diagnostics, fusion, quantisers, wrappers
from reference.policies.diversity import TowardMean
from reference.statistics import Interval
from reference.triattention import distance_score, joined, z_scores
from spec.budget import parse_budget
from spec.parameters import CrystalCacheParameters
from spec.policy import Scores
from spec.records import Dissolution


def head(rows: Json) -> Any:
    """Return the array of one head, with three axes."""
    return floats([rows])


def scales(i: Json) -> Any:
    """Return the three rows as an array (3, 1, n)."""
    return floats(i["a"])[:, None]


def episodic(i: Json) -> Result:
    p = nestedkv_parameters(i)
    b = nk.block_size(len(i["unit"]), p)
    return {"b": [nk.block_size(N, p) for N in i["N"]], "mu": nk.episodic_memory(head(i["unit"]), b)[0]}


def anomaly(i: Json) -> Result:
    return {"a": nk.anomalies(head(i["unit"]), head(i["mu"]))[0]}


def ablations(i: Json) -> Result:
    p = nestedkv_parameters(i)
    without = {
        "continuum": policies.nestedkv_without_continuum(p), "adaptive": policies.nestedkv_without_adaptive(p),
        "both": policies.nestedkv_without_both(),
    }
    return {name: kept(i, policy)["kept"] for name, policy in without.items()}


def unit_cosines(i: Json) -> Result:
    V = diversity.unit_rows(floats(i["u"]))
    return {"V": V, "cosines": diversity.cosines(V)}


def variant_b(i: Json) -> Result:
    V, n = floats(i["V"]), len(i["s"])
    scores = Scores(floats([i["s"]]), np.arange(n + 1), signatures=V[None])
    result = TowardMean(i["lam"])(scores, np.array([i["B"]]), np.zeros(n, dtype=np.bool_))
    return {"prior": diversity.toward_mean(V), "kept": result.positions}


def rope(i: Json) -> Result:
    """Return the fingerprint of the calibration, after the calibration has passed its check."""
    taken, here = (
        Identity(i[of + "model"], floats(i[of + "inv_freq"]), i[of + "factor"]) for of in ("", "served_")
    )
    half = len(taken.inv_freq)
    Calibration(taken, (0,), np.zeros((1, 1, 2 * half)), np.zeros((1, 1, half))).check(here)
    return {"rope": taken.rope}


def score(i: Json) -> Result:
    return {"score": distance_score(
        floats(i["k"]), i["t"], floats(i["mean"]), floats(i["magnitude"]), floats(i["inv_freq"]), i["factor"],
    )}


def ranking(i: Json) -> Result:
    open_ = ~np.array(i["pinned"], dtype=np.bool_)
    best = np.stack([[z_scores(floats(group), open_).max(axis=0) for group in layer] for layer in i["X"]])
    return {"rows": joined(best, i["mode"])}


def triattention(i: Json) -> Result:
    identity = Identity("vector", floats(i["inv_freq"]))
    layers = tuple(range(len(i["k"])))
    result = Calibration(identity, layers, floats(i["mean"]), floats(i["magnitude"]))
    return kept(i, policies.triattention(result, identity, i["mode"], i["pin_prompt"]))


def vocabulary(words: Mapping[str, Sequence[int]]) -> wrappers.Vocabulary:
    """Return the vocabulary of a tokenizer that contains only whole texts. Id 0 is the unknown token."""
    texts = {tuple(ids): text for text, ids in words.items() if 0 not in ids}
    return wrappers.Vocabulary(lambda text: words[text], lambda ids: texts.get(tuple(ids), "<unk>"))


def words(i: Json) -> wrappers.Vocabulary:
    return vocabulary(dict(zip(i["texts"], i["ids"], strict=True)))


def wrapped(i: Json) -> Result:
    result = wrappers.wrap(wrappers.FORMS[i["form"]], i["chunk"], words(i))
    return {**vars(result), "ids": list(result.ids), "markers": list(result.markers)}


def region(i: Json) -> Result:
    result = quantisers.quantised_region(quantisers.ARMS[i["arm"]], i["layers"], i["tokens"])
    return {name: [run.start, run.stop] for name, run in zip(("layers", "tokens"), result, strict=True)}


def fused(i: Json) -> Result:
    order = fusion.fused([[str(name) for name in ranking] for ranking in i["rankings"]], i["k"])
    return {"order": [int(name) for name, _ in order], "scores": [score for _, score in order]}


def cosines(i: Json) -> tuple[Any, Any]:
    at = (integers(i["positions"][0]), integers(i["positions"][1]))
    theta = floats(i["inverse_frequencies"])
    return diagnostics.key_cosine(floats(i["archived"]), floats(i["fresh"]), at, theta, i["style"])


def resampled(result: Interval) -> Result:
    return {"interval": [result.low, result.high], "positive": result.positive}


def interface(i: Json, p: CrystalCacheParameters) -> Result:
    sides = trunks.interface(tuple(i["current"]), tuple(i["sentence"]))
    return named(["last5", "first5"], [[side.start, side.stop] for side in sides])


def interface_edges(i: Json, p: CrystalCacheParameters) -> Result:
    P = trunks.interface(tuple(i["current"]), tuple(i["sentence"]))
    return {"weights": trunks.interface_weights({(a, b): w for a, b, w in i["edges"]}, P)}


def covered(i: Json, p: CrystalCacheParameters) -> Result:
    offsets, ratio, D = integers(i["offsets"]), floats(i["ratio"]), floats(i["D"])
    reserve = coverage.coverage_reserve(np.diff(offsets), flags(i["protected"]), i["B"], p.coverage)
    result = coverage.backfill(Dissolution(integers(i["kept"]), ratio, ratio * D), offsets, D, reserve)
    return {"reserve": reserve, **vars(result)}


def merge_threshold(i: Json, p: CrystalCacheParameters) -> Result:
    by_pair = {(a, b): w for a, b, w in i["edges"]}
    return {"tau": trunks.median_strength(integers(i["sentences"]), by_pair, p.tau_merge)}


RARITY = {"reciprocal": impact.reciprocal_rarity, "exponential": impact.exponential_rarity}
IMPACT = {"mixture": impact.impact, "salience": impact.impact_without_rarity, "uniform": impact.uniform_impact}


def trunk_weights(i: Json, p: CrystalCacheParameters) -> Result:
    a, b, number, total = zip(*i["pairs"], strict=True)
    pairs = graph.TrunkPairs(integers(a), integers(b), integers(number), floats(total))
    return named(["weights", "kept"], graph.trunk_weights(pairs, integers(i["sizes"]), p.tau_edge))


def crystallized(i: Json, p: CrystalCacheParameters) -> Result:
    D = crystallization(floats(i["degree"]), p.s, p.epsilon)
    return {"D": D if p.graph == "degree" else np.zeros_like(D)}


def start(i: Json, p: CrystalCacheParameters) -> Result:
    q, k, ids = floats(i["q"]), floats(i["k"]), integers(i["token_ids"])
    result = prefill(q, k, ids, frozenset(i["sentence_ends"]), i["budget"], p, scaling=i["scaling"])
    budget = parse_budget(i["budget"])
    return fields_of(live.start_state(result, ids, activation.inverse_key_norms(k), budget, p))


def chunk_trunks(i: Json, p: CrystalCacheParameters) -> Result:
    norms = floats(i["chunk_inverse_norms"])
    return fields_of(call(tail.join_chunk, i, p, inverse_norms=norms, backend=BACKEND))


def by_name(one: Operation, i: Json, p: CrystalCacheParameters) -> Result:
    """Call the reference's function with the inputs of the vector as keyword arguments."""
    return results(call(resolve_name(f"reference.{one.reference}"), i, p, backend=BACKEND), one.gives)


PLAIN_ITEMS: Mapping[str, Callable[[Any], Result]] = {
    **POLICY_ITEMS,
    "NK-UNIT-KEYS": lambda i: {"unit": directions.unit_keys(head(i["k"]))[0]},
    "NK-STABLE": lambda i: {"mu": nk.stable_memory(head(i["unit"]))[0, 0]},
    "NK-EPISODIC": episodic,
    "NK-CURRENT": lambda i: {"mu": nk.current_memory(head(i["unit"]), i["W"])[0]},
    "NK-ANOMALY": anomaly,
    "NK-MIN-MAX": lambda i: {"a": nk.min_max(floats([i["a"]]))[0]},
    "NK-GAP": lambda i: {"delta": nk.gap(scales(i), nestedkv_parameters(i).p)[:, 0]},
    "NK-BLEND": lambda i: {"blend": nk.blend(scales(i), floats(i["delta"])[:, None], nestedkv_parameters(i))[0]},
    "NK-SURPRISE": lambda i: {"s": nk.rectified_surprise(scales(i))[0]},
    "NK-ROUTE": lambda i: {
        "score": nk.routed_score(scales(i), floats([i["blend"]]), floats([i["s"]]), nestedkv_parameters(i))[0]
    },
    "NK-NESTEDKV": lambda i: kept(i, policies.nestedkv(nestedkv_parameters(i))),
    "NK-ABLATIONS": ablations,
    "DV-COSINE": unit_cosines,
    "DV-POLICY": lambda i: kept(i, policies.diverse(policies.knorm(), i["lam"], i["mode"])),
    "DV-VARIANT-B": variant_b,
    "TA-CALIBRATION": rope,
    "TA-SCORE": score,
    "TA-RANKING": ranking,
    "TA-POLICY": triattention,
    "IN-SCALE": lambda i: {"step": quantisers.scale(floats(i["x"]), quantisers.SCHEMES[i["scheme"]], i["bits"])},
    "IN-ARMS": region,
    "IN-MARKER": lambda i: {"id": wrappers.marker_id(wrappers.Marker(i["marker"]), words(i))},
    "IN-WRAP": wrapped,
    "IN-FUSE": fused,
    "IN-BOOTSTRAP": lambda i: resampled(
        statistics.bootstrap(floats(i["differences"]), integers(i["drawn"]), i["confidence"])
    ),
    "IN-CLUSTER-BOOTSTRAP": lambda i: resampled(statistics.cluster_bootstrap(
        floats(i["differences"]), integers(i["clusters"]), integers(i["drawn"]), i["confidence"]
    )),
    "IN-KEY-COSINE": lambda i: named(["raw", "unrotated"], cosines(i)),
}
"""Items without CrystalCache parameters."""

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
    **{name: partial(lambda of, i, p: of(i), of) for name, of in PLAIN_ITEMS.items()},
}
BY_ITEM: dict[str, Item] = {
    **{one.items[0]: partial(STAGES[name], BACKEND) for name, one in OPERATIONS.items() if len(one.items) == 1},
    **ITEMS,
}
"""Function of each item on the reference, including items that are tested only through a stage."""
