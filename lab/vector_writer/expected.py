"""Operations of the vectors, with the expected results from the oracles, and the function of the reference."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial

from conformance.oracles import pipeline, s1, s2, s3, s4, s5, s6
from conformance.vectors.files import Json, Results
from lab.vector_writer import brute_force as plain
from lab.vector_writer import (
    expected_decode,
    expected_diversity,
    expected_injection,
    expected_nestedkv,
    expected_policies,
)
from lab.vector_writer.brute_force import Operation, direct
from spec.parameters import CrystalCacheParameters

NAN = math.nan
NEIGHBOURS = ["index", "weight"]


def neighbours(rows: Sequence[Mapping[int, float]], k: int, tau: float) -> Results:
    """Return the padded arrays of CC-INTRA and CC-CROSS."""
    chosen = [s1.strongest(row, k, tau) for row in rows]
    index, weight = padded(chosen, k)
    return {"index": index, "weight": weight}


def padded(lists: Sequence[Sequence[tuple[int, float]]], k: int) -> tuple[list[list[int]], list[list[float]]]:
    """Return neighbour lists, padded with -1 and 0."""
    index = [[j for j, _ in row] + [-1] * (k - len(row)) for row in lists]
    weight = [[w for _, w in row] + [0.0] * (k - len(row)) for row in lists]
    return index, weight


def intra(i: Json, p: CrystalCacheParameters) -> Results:
    Q = range(len(i["rows"]))
    return neighbours([{b: s1.cosine(i["rows"], a, b) for b in Q if b != a} for a in Q], p.k_intra, p.tau_intra)


def coattention(i: Json, p: CrystalCacheParameters) -> Results:
    result = s1.coattention(i["q"], i["k"], i["positions"], p, i["scaling"], i["softcap"], i.get("sinks"))
    index, weight = padded(result.intra, p.k_intra)
    late, late_weight = padded(result.cross, p.k_cross)
    return {"start": result.start, "salience": result.salience, "intra": index, "intra_weight": weight,
            "cross": late, "cross_weight": late_weight}


def edges(i: Json) -> list[s1.Edge]:
    return plain.edge_list(i["start"], i["intra"], i["intra_weight"], i["cross"], i["cross_weight"])


def offsets_of(trunks: Sequence[s2.Trunk]) -> list[int]:
    return [trunk[0] for trunk in trunks] + [trunks[-1][-1] + 1]


def interface(i: Json, p: CrystalCacheParameters) -> Results:
    left, right = s2.last5(list(range(*i["current"]))), s2.first5(list(range(*i["sentence"])))
    return {"last5": [left[0], left[-1] + 1], "first5": [right[0], right[-1] + 1]}


def trunks(i: Json, p: CrystalCacheParameters) -> Results:
    result = s2.trunks(i["ends"], edges(i), p, i["start"])
    local = [[position - i["start"] for position in g] for g in result]
    return {"offsets": offsets_of(result), "impact": s3.unit_trunk_impact(
        [s3.trunk_impact(i["impact"], g) for g in local], p
    )}


def trunk_weight(i: Json, p: CrystalCacheParameters) -> Results:
    weights, kept = [], []
    for row, (a, b, number, total) in enumerate(i["pairs"]):
        # The oracle takes the terms. Any terms with this total give the same weight.
        W = s4.trunk_weight([total] + [0.0] * (number - 1), i["sizes"][a], i["sizes"][b], p.tau_edge)
        if W:
            weights.append(W)
            kept.append(row)
    return {"weights": weights, "kept": kept}


def graph(i: Json, p: CrystalCacheParameters) -> Results:
    W = s4.weight_matrix(edges(i), plain.trunk_lists(i["offsets"]), p)
    degree = s4.degree(W)
    columns = [[b for b, w in enumerate(row) if w] for row in W]
    return {
        "indptr": [sum(len(row) for row in columns[:g]) for g in range(len(W) + 1)],
        "indices": [b for row in columns for b in row],
        "weights": [W[a][b] for a, row in enumerate(columns) for b in row],
        "degree": degree, "D": s4.crystallization(degree, p),
    }


def alive(i: Json) -> list[int]:
    return [g for g, shut in enumerate(i["protected"]) if not shut]


def spread(result: Mapping[int, float], m: int) -> list[float]:
    """Return a list of m values, with NaN for missing values."""
    return [result.get(g, NAN) for g in range(m)]


def dissolve(i: Json, p: CrystalCacheParameters) -> Results:
    first = i["offsets"][0]
    lists = [[position - first for position in g] for g in plain.trunk_lists(i["offsets"])]
    scores = {g: i["score"][g] for g in alive(i)}
    result = s6.evict(lists, scores, i["impact"], i["D"], i["protected"], i["B"], p)
    return {"kept": [first + at for at in result.kept], "ratio": [float(r) for r in result.ratio], "D": result.D}


def share(i: Json) -> Fraction | int:
    """Return a budget for s6.effective_budget: the exact share of n that the text states, or a number of tokens."""
    return s6.tokens(i["budget"], i["n"])


def prefill(i: Json, p: CrystalCacheParameters) -> Results:
    n = len(i["token_ids"])
    B = s6.tokens(i["budget"], n)
    result = pipeline.prefill(
        i["q"], i["k"], i["token_ids"], set(i["sentence_ends"]), B, p, i["scaling"], i["softcap"], i.get("sinks")
    )
    return {
        "kept": result.eviction.kept, "budget": result.budget,
        "over_budget": max(0, len(result.eviction.kept) - result.budget), "offsets": offsets_of(result.trunks),
        "protected": result.protected, "ratio": [float(r) for r in result.eviction.ratio],
        "scores": spread(result.score, len(result.trunks)), "D": result.eviction.D,
    }


def csr_degree(i: Json, p: CrystalCacheParameters) -> Results:
    return {"degree": s4.degree(plain.rows_of(i["indptr"], i["weights"]))}


def covered(i: Json, p: CrystalCacheParameters) -> Results:
    first = i["offsets"][0]
    lists = [[position - first for position in g] for g in plain.trunk_lists(i["offsets"])]
    B_prot = sum(len(g) for g, shut in zip(lists, i["protected"], strict=True) if shut)
    k = s6.reserve(sum(map(len, lists)), i["B"], B_prot, Fraction(repr(p.coverage)))
    before = s6.Eviction([at - first for at in i["kept"]], [Fraction(r) for r in i["ratio"]], [], 0)
    result = s6.backfill(before, lists, i["D"], k)
    return {"reserve": k, "kept": [first + at for at in result.kept], "ratio": [float(r) for r in result.ratio],
            "D": result.D}


def merge_threshold(i: Json, p: CrystalCacheParameters) -> Results:
    pieces = plain.trunk_lists(i["sentences"])
    return {"tau": s2.median_strength(pieces, [tuple(edge) for edge in i["edges"]], p.tau_merge)}


ORACLES = "conformance.oracles."
PLAIN = "lab.vector_writer.brute_force."
CC = "crystalcache."

OPERATIONS: dict[str, Operation] = {
    "CC-MEMORY": direct(PLAIN + "kv_bytes", "bytes", "memory.kv_bytes"),
    "CC-OBSERVED-LAYER": direct(PLAIN + "observed_layer", "layer", CC + "observed_layer.observed_layer"),
    "CC-BUDGET-FORMS": direct(ORACLES + "s6.tokens", "tokens"),
    "CC-BUDGET": Operation(
        ORACLES + "s6.effective_budget",
        lambda i, p: {"B": s6.effective_budget(share(i), i["n"], p.N_sink, p.W_recent)},
        reference=CC + "protection.effective_budget", gives=["B"],
    ),
    "CC-ATTENTION": direct(ORACLES + "s1.attention", "A", CC + "coattention.attention"),
    "CC-SALIENCE": direct(ORACLES + "s1.salience", "S", CC + "coattention.salience"),
    "CC-ROW-NORM": direct(ORACLES + "s1.row_normalise", "rows", CC + "coattention.row_normalise"),
    "CC-INTRA": Operation(
        ORACLES + "s1.strongest", intra, reference=CC + "coattention.intra_neighbours", gives=NEIGHBOURS,
    ),
    "CC-CROSS": Operation(
        ORACLES + "s1.strongest",
        lambda i, p: neighbours([dict(enumerate(row)) for row in i["earlier"]], p.k_cross, p.tau_cross),
        reference=CC + "coattention.cross_neighbours", gives=NEIGHBOURS,
    ),
    "CC-EDGES": direct(PLAIN + "edge_list", "edges"),
    "coattention": Operation(ORACLES + "s1.coattention", coattention, ["CC-COATTENTION"]),
    "CC-SENTENCES": Operation(
        ORACLES + "s2.sentences", lambda i, p: {"offsets": offsets_of(s2.sentences(i["ends"]))},
        reference=CC + "sentences.sentence_offsets", gives=["offsets"],
    ),
    "CC-INTERFACE": Operation(ORACLES + "s2.last5, " + ORACLES + "s2.first5", interface),
    "CC-INTERFACE-EDGES": Operation(
        ORACLES + "s2.interface_weights",
        lambda i, p: {"weights": s2.interface_weights(
            list(range(*i["current"])), list(range(*i["sentence"])), [tuple(edge) for edge in i["edges"]]
        )},
    ),
    "CC-MERGE": direct(ORACLES + "s2.merges", "merges", CC + "trunks.merges"),
    "CC-SPLIT": Operation(
        ORACLES + "s2.split",
        lambda i, p: {"sizes": [len(piece) for piece in s2.split(list(range(i["size"])), i["T_max"])]},
        reference=CC + "trunks.split_sizes", gives=["sizes"],
    ),
    "trunks": Operation(ORACLES + "s2.trunks", trunks, ["CC-TRUNKS", "CC-TRUNK-IMPACT"]),
    "CC-COUNT": direct(ORACLES + "s3.counts", "c", CC + "impact.token_counts"),
    "CC-RARITY": Operation(
        ORACLES + "s3.rarity", lambda i, p: {"U": [s3.rarity(c) for c in i["c"]]},
        reference=CC + "impact.rarity", gives=["U"],
    ),
    "CC-IMPACT": Operation(
        ORACLES + "s3.token_impact",
        lambda i, p: {"M": [s3.token_impact(S, U, p) for S, U in zip(i["S"], i["U"], strict=True)]},
    ),
    "CC-TRUNK-IMPACT": Operation(
        ORACLES + "s3.trunk_impact",
        lambda i, p: {"M_bar": [s3.trunk_impact(i["M"], g) for g in plain.trunk_lists(i["offsets"])]},
        reference=CC + "impact.trunk_impact", gives=["M_bar"],
    ),
    "impact": Operation(
        ORACLES + "s3.impact", lambda i, p: {"M": s3.impact(i["salience"], i["token_ids"], p)},
        ["CC-COUNT", "CC-RARITY", "CC-IMPACT"],
    ),
    "CC-TRUNK-EDGES": Operation(
        ORACLES + "s4.cross_weights",
        lambda i, p: {"pairs": plain.pairs([tuple(edge) for edge in i["edges"]], i["offsets"])},
    ),
    "CC-TRUNK-WEIGHT": Operation(ORACLES + "s4.trunk_weight", trunk_weight),
    "CC-DEGREE": Operation(ORACLES + "s4.degree", csr_degree, reference=CC + "graph.degree", gives=["degree"]),
    "CC-CRYSTALLIZATION": Operation(
        ORACLES + "s4.crystallization", lambda i, p: {"D": s4.crystallization(i["degree"], p)},
    ),
    "graph": Operation(
        ORACLES + "s4.weight_matrix, " + ORACLES + "s4.crystallization", graph,
        ["CC-TRUNK-EDGES", "CC-TRUNK-WEIGHT", "CC-DEGREE", "CC-CRYSTALLIZATION"],
    ),
    "CC-NORMALISED-IMPACT": Operation(
        ORACLES + "s5.normalised_impact",
        lambda i, p: {"M_tilde": spread(s5.normalised_impact(i["M_bar"], alive(i), p.epsilon), len(i["M_bar"]))},
        reference=CC + "score.normalised_impact", gives=["M_tilde"],
    ),
    "CC-SCORE": direct(PLAIN + "score", "score", CC + "score.score"),
    "score": Operation(
        ORACLES + "s5.score", lambda i, p: {"score": spread(s5.score(i["D"], i["impact"], alive(i), p), len(i["D"]))},
        ["CC-NORMALISED-IMPACT", "CC-SCORE"],
    ),
    "CC-PROTECTED": Operation(
        ORACLES + "s6.protected",
        lambda i, p: {"protected": s6.protected(plain.trunk_lists(i["offsets"]), i["n"], p.N_sink, p.W_recent)},
        reference=CC + "protection.protected_trunks", gives=["protected"],
    ),
    "CC-CUT": direct(PLAIN + "cut", "c_0", CC + "protection.cut"),
    "CC-ALLOCATE": Operation(
        ORACLES + "s6.allocate", lambda i, p: {"r": [float(r) for r in s6.allocate(i["sizes"], i["c_0"], p.N_min)[0]]},
        reference=CC + "dissolution.allocate", gives=["r"],
    ),
    "CC-KEEP-COUNT": Operation(
        ORACLES + "s6.keep_count", lambda i, p: {"k": s6.keep_count(Fraction(i["r"]), i["size"], p.N_min)},
        reference=CC + "dissolution.keep_count", gives=["k"],
    ),
    "CC-DISSOLVE-D": direct(PLAIN + "dissolved_D", "D", CC + "dissolution.dissolved_D"),
    "dissolve": Operation(
        ORACLES + "s6.dissolve", dissolve,
        ["CC-DISSOLVE", "CC-CUT", "CC-ALLOCATE", "CC-KEEP-COUNT", "CC-DISSOLVE-D"],
    ),
    "CC-MEAN-SALIENCE": Operation(
        ORACLES + "s1.salience", lambda i, p: {"S": s1.salience(i["own"], replace(p, heads="mean"))},
        reference=CC + "coattention.mean_salience", gives=["S"],
    ),
    "CC-UNIT-IMPACT": Operation(
        ORACLES + "s3.token_impact",
        lambda i, p: {"M": [s3.token_impact(S, U, p, max(i["S"])) for S, U in zip(i["S"], i["U"], strict=True)]},
        reference=CC + "impact.unit_impact", gives=["M"],
    ),
    "CC-UNIT-TRUNK-IMPACT": Operation(
        ORACLES + "s3.unit_trunk_impact",
        lambda i, p: {"M_bar": s3.unit_trunk_impact(i["M_bar"], replace(p, trunk_impact="unit"))},
        reference=CC + "impact.unit_trunk_impact", gives=["M_bar"],
    ),
    "CC-TIER-COUNT": direct(ORACLES + "s6.tier_counts", "kept", CC + "tiers.tier_counts"),
    "CC-TIERS": Operation(
        ORACLES + "s6.tier_allocate",
        lambda i, p: {"r": [float(r) for r in s6.tier_allocate(i["sizes"], i["c_0"], p.N_min)[0]]},
        reference=CC + "tiers.tier_allocate", gives=["r"],
    ),
    "CC-RENEWAL": direct(PLAIN + "renewed_D", "D", CC + "renewal.renewed_D"),
    "CC-RARITY-FORMS": Operation(
        ORACLES + "s3.rarity_of", lambda i, p: {"U": [s3.rarity_of(c, p) for c in i["c"]]},
    ),
    "CC-ADAPTIVE-MERGE": Operation(ORACLES + "s2.median_strength", merge_threshold),
    "CC-COVERAGE": Operation(ORACLES + "s6.backfill", covered),
    "CC-COMPACT": direct(PLAIN + "compact", "K V", CC + "compaction.compact"),
    "prefill": Operation(ORACLES + "pipeline.prefill", prefill, ["CC-PREFILL"]),
    **expected_decode.OPERATIONS,
    **{
        item: Operation(module.__name__, partial(lambda of, i, p: of(i), of), reference=name, gives=gives.split())
        for module in (expected_policies, expected_diversity, expected_nestedkv) for item, of in module.RESULTS.items()
        for name, gives in [module.DIRECT.get(item, ("", ""))]
    },
    "anomaly_score": Operation(
        ORACLES + "nestedkv.scores", lambda i, p: expected_nestedkv.RESULTS["NK-SCORE"](i), ["NK-SCORE"],
    ),
    **expected_injection.OPERATIONS,
}
