"""Large cases, made from seeds: what small inputs cannot show. By file of spec/vectors."""

import math
from collections.abc import Mapping, Sequence

from conformance.assurance.vector_writer.case import Case, Group
from conformance.vectors.json_values import Json

__all__ = ["LARGE"]

FAR = 2**32 + 5  # a first position beyond int32 and uint32
# Ids that a narrower type takes for one another.
ALIASED = [1, 65_537, 131_073, 2**31 + 1, 2**32 + 1, 2**52, str(2**53), str(2**53 + 1)]


def runs(*of: Sequence[Json]) -> Json:
    return {"form": "runs", "of": [list(run) for run in of]}


def choice(seed: int, of: Sequence[Json], *shape: int) -> Json:
    return {"form": "choice", "seed": seed, "shape": list(shape), "of": list(of)}


def integers(seed: int, low: int, high: int, *shape: int) -> Json:
    return {"form": "integers", "seed": seed, "shape": list(shape), "low": low, "high": high}


def fractions(seed: int, *shape: int, bits: int = 53) -> Json:
    return {"form": "fractions", "seed": seed, "shape": list(shape), "bits": bits}


def sums(of: Json, start: int = 0) -> Json:
    return {"form": "sums", "start": start, "of": of}


def joined(*of: Json, axis: int = 0) -> Json:
    return {"form": "joined", "axis": axis, "of": list(of)}


def lists(
    n: int, near: Sequence[int], far: Sequence[int] = (), places: tuple[int, int] = (4, 2), C: int = 1024,
    start: int = 0, seed: int = 1,
) -> Json:
    """Neighbours and sources of n tokens, `near` and `far` steps away."""
    def side(name: str, steps: Sequence[int], k: int, seed: int) -> Json:
        index = {"form": "neighbours", "seed": seed, "shape": [n, k], "steps": list(steps), "C": C, "start": start,
                 "earlier": name == "cross"}
        falling = {"form": "falling", "seed": seed + 1, "along": name, "bits": 53}
        return {name: index if k else runs([[], n]), f"{name}_weight": falling if k else runs([[], n])}

    return {
        "start": start, **side("intra", near, places[0], seed), **side("cross", far, places[1] if far else 0, seed + 2)
    }


def linked(index: Json, n: int, seed: int) -> Json:
    """Neighbours of n tokens as they are given, and no sources."""
    return {"start": 0, "intra": index, "intra_weight": {"form": "falling", "seed": seed, "along": "intra", "bits": 53},
            "cross": runs([[], n]), "cross_weight": runs([[], n])}


NEAR = [1, -1, 2, 3, -2, 4, -3, 5]
# S2 and S4 take any list; these thresholds admit every weight that is drawn.
ANY = {"tau_intra": 0.0, "tau_cross": 0.0}

TRUNKS = [
    Group("trunks", [
        Case(500, "4000 tokens in some 440 sentences; sums of weights of 53 bits around tau_merge",
             ["ManySentences", "SumOrder", "WindowOfFive"],
             {**lists(4_000, NEAR, [-1_024, -1_030, -1_500, -2_100], seed=11),
              "ends": choice(15, [True, *[False] * 8], 4_000), "impact": fractions(16, 4_000)}),
        Case(501, "3000 tokens from 2^32 + 5 on; every second token ends a sentence, trunks grow to T_max",
             ["ManySentences", "InclusiveSize", "LaterSegment", "WideNumbers"],
             {**lists(3_000, NEAR, places=(8, 0), start=FAR, seed=21), "ends": choice(25, [True, False], 3_000),
              "impact": choice(26, [0.25, 0.5, 4.0, 20.0], 3_000)}),
    ], {**ANY, "tau_merge": 0.5}),
    Group("trunks", [
        Case(502, "one sentence of 70 001 tokens, in 2188 pieces: the larger ones first",
             ["SplitLargerFirst", "WideNumbers"],
             {**lists(70_001, [], places=(0, 0)), "ends": runs([False, 70_001]),
              "impact": choice(31, [0.5, 1.0, 2.0], 70_001)}),
    ]),
]

IMPACT = [
    Group("impact", [
        Case(500, "3000 ids of which narrower types, and doubles, make fewer", ["TokenIds", "WideNumbers"],
             {"salience": choice(41, [0.125, 1.0, 7.5, 20.0], 3_000), "token_ids": choice(42, ALIASED, 3_000)}),
        Case(501, "5000 tokens, 4000 of them one id, the others of a vocabulary of 151 936", ["TokenIds", "LogOnePlus"],
             {"salience": fractions(43, 5_000),
              "token_ids": joined(runs([198, 2_500]), integers(44, 0, 151_936, 1_000), runs([198, 1_500]))}),
        Case(502, "2000 ids, each once, in no order", ["TokenIds"],
             {"salience": fractions(45, 2_000), "token_ids": {"form": "permutation", "seed": 46, "n": 2_000}}),
    ]),
]

TOKENS = 46_400  # 46 341 squared is beyond 2^31

GRAPH = [
    Group("graph", [
        Case(500, "46 400 trunks of one token: a pair's number exceeds 2^31", ["WideNumbers", "StableOrder"],
             {**lists(TOKENS, [1, -2, 7, 900], places=(2, 0), C=TOKENS, seed=51),
              "offsets": sums(runs([1, TOKENS]))}),
        Case(501, "a hub: 1999 trunks have one edge each, all to trunk 700", ["SumOrder", "LongRows"],
             {**linked(runs([[700], 700], [[-1], 1], [[700], 1_299]), 2_000, 55), "offsets": sums(runs([1, 2_000]))}),
    ], {**ANY, "tau_edge": 0.0001}),
    Group("graph", [
        Case(502, "3000 tokens from 2^32 + 5 on, in trunks of 1 to 12: pairs of many edges, from near and far",
             ["AdditiveMultiset", "SumOrder", "LaterSegment", "WideNumbers"],
             {**lists(3_000, [1, -1, 3, -4, 6, 9, -11, 14, 40, -90], [-1_024, -1_025, -1_300, -1_301, -2_047],
                      places=(8, 4), C=512, start=FAR, seed=61),
              "offsets": sums(joined(integers(65, 1, 13, 440), runs([9, 13])), FAR)}),
    ], ANY),
    Group("graph", [
        Case(503, "two trunks of 70 000 tokens: the product of their sizes exceeds 2^32", ["WideNumbers"],
             {**linked({"form": "neighbours", "seed": 71, "shape": [140_000, 1], "steps": [70_000, -70_000],
                        "C": 140_000, "start": 0, "earlier": False}, 140_000, 72),
              "offsets": [0, 70_000, 140_000]}),
    ], {**ANY, "tau_edge": 0.0001}),
]

SCORE = [
    Group("score", [
        Case(500, "700 trunks; one in eleven is protected, and some of them are extreme", ["ProtectedNotRead"],
             {"D": choice(81, [0.0, 0.125, 0.25, 0.5], 700), "impact": fractions(82, 700),
              "protected": choice(83, [True, *[False] * 10], 700)}),
        Case(501, "1000 trunks of which the last two are the least and the greatest", ["LongRows"],
             {"D": fractions(84, 1_000), "impact": joined(integers(85, 1, 9, 998), runs([0, 1], [19, 1])),
              "protected": runs([False, 1_000])}),
    ]),
]


def eviction(m: int, largest: int, scores: Sequence[float], seed: int, start: int = 0) -> Json:
    """m trunks of 1 to `largest` tokens; a NaN among the scores stands where a trunk is protected."""
    return {
        "score": choice(seed + 1, scores, m), "offsets": sums(integers(seed, 1, largest + 1, m), start),
        "D": fractions(seed + 2, m), "protected": choice(seed + 1, [x != x for x in scores], m),
    }


DISSOLUTION = [
    Group("CC-CUT", [
        Case(500, "900 trunks, one in eight protected", ["ManyTies"],
             {"sizes": integers(90, 1, 33, 900), "protected": choice(89, [True, *[False] * 7], 900), "B": 9_001}),
    ]),
    Group("dissolve", [
        Case(501, "600 trunks from 2^32 + 5 on; five scores, so that the cut falls among a hundred ties",
             ["TieAtBoundary", "ManyTies", "ProtectedNotRead", "WideNumbers"],
             {**eviction(600, 32, [math.nan, 0.25, 0.5, 0.125, 0.75, 0.375], 91, FAR),
              "impact": choice(94, [1.0, 2.0, 3.0], 9_925), "B": 5_500}),
        Case(502, "2000 trunks of one score, members of one impact", ["TieAtBoundary", "ManyTies"],
             {**eviction(2_000, 9, [0.5], 101), "impact": runs([1.0, 9_978]), "B": 6_001}),
        Case(503, "40 trunks of up to 400 tokens: a partial one keeps hundreds, by impacts that tie",
             ["PartialKeepsBest", "ManyTies"],
             {**eviction(40, 400, [0.25, 0.5, 0.75], 111), "impact": choice(114, [0.5, 1.0, 1.5, 2.0], 8_523),
              "B": 6_301}),
        Case(504, "a budget far above the tokens, beyond every 32-bit type: nothing goes", ["WideNumbers"],
             {**eviction(300, 20, [0.25, math.nan, 0.5], 121), "impact": choice(124, [1.0, 2.0], 3_277),
              "B": 2**53 - 1}),
    ]),
    Group("dissolve", [
        Case(505, "trunks whose remnant is below N_min go whole, long as they are", ["RemnantThree", "ManyTies"],
             {**eviction(40, 400, [0.25, 0.5, 0.75], 111), "impact": choice(114, [0.5, 1.0, 1.5, 2.0], 8_523),
              "B": 6_301}),
    ], {"N_min": 300}),
]

ROWS = [choice(131, [0.0, 0.25, 0.5, 0.75, 1.0, 2.0], 2_000), choice(132, [0.5, 1.0], 2_000), runs([1.0, 2_000])]

POLICIES = [
    Group("PO-TOP-UNITS", [
        Case(500, "2000 tokens of six, two and one score: the last place falls among hundreds of ties",
             ["TieAtBoundary", "ManyTies"],
             {"values": ROWS, "protected": choice(133, [True, *[False] * 40], 2_000), "B": 700}),
    ]),
    Group("PO-FILL-UNITS", [
        Case(501, "197 chunks of ten before a window of 30: equal sums by the dozens", ["TieAtBoundary", "ManyTies"],
             {"values": ROWS, "protected": runs([False, 1_970], [True, 30]), "c": 10, "B": 705}),
    ]),
    Group("PO-WHOLE-SHARES", [
        Case(502, "597 targets of three remainders: of 201 equal ones 99 are rounded up", ["ManyTies"],
             {"targets": choice(135, ["5/2", "9/4", "7/4"], 597)}),
    ]),
]

BREATH = [
    Group("activation", [
        Case(500, "500 trunks of up to 60 tokens; some keys are zero", ["MoreThanHalf", "ZeroKey", "LongRows"],
             {"offsets": sums(integers(141, 1, 61, 500)),
              "inverse_norms": choice(142, [0.25, 1.0, 0.125, 2.0, math.inf, 0.5, 0.75, 1.25], 15_681)}),
    ]),
]

C, QUERIES = 64, 300
HOT = 256.0  # the next best key of a query is 2 * HOT behind
# Each token's own key: the first token of its run, in its chunk.
RUNS = [[0, 10], [10, 31], [41, 23], [64, 40], [104, 24], [128, 1], [129, 63], [192, 5], [197, 59], [256, 44]]
OWN = runs(*RUNS)


def elsewhere(seed: int, heads: int) -> Json:
    """What the other heads attend: any key of earlier chunks; in the first chunk the token's own."""
    later = [integers(seed + at, 0, at, heads, min(C, QUERIES - at)) for at in range(C, QUERIES, C)]
    return joined([runs(*RUNS[:3])] * heads, *later, axis=1)


def looking(keys: Json, sign: int) -> Json:
    return {"form": "signs", "bits": 16, "scale": sign * HOT, "of": keys}


EVERY = sums(runs([1, QUERIES - 1]))

COATTENTION = [
    Group("coattention", [
        Case(500, "eight heads on four KV heads point at one key each: five sources in earlier chunks for four places",
             ["HeadSharing", "TieAtBoundary", "ManyTies", "TopThreeSum"], {
                 "q": joined(
                     looking([OWN, OWN], 1), looking(joined([OWN], elsewhere(1_000, 1)), -1),
                     looking(elsewhere(2_000, 2), 1), looking(elsewhere(3_000, 2), -1),
                 ),
                 "k": [{"form": "signs", "bits": 16, "scale": sign, "of": EVERY} for sign in (1.0, -1.0, 1.0, -1.0)],
                 "positions": EVERY, "scaling": 1.0, "softcap": None,
             }, exact=("salience", "intra", "cross", "cross_weight"), bits=6),
    ], {"C": C, "M_min": 0.125}),
]

LARGE: Mapping[str, Sequence[Group]] = {
    "coattention": COATTENTION, "trunks": TRUNKS, "impact": IMPACT, "graph": GRAPH, "score": SCORE,
    "dissolution": DISSOLUTION, "breath": BREATH, "policies": POLICIES,
}
