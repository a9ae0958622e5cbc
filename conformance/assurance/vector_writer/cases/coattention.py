"""S1. Logits of 2048 make attention one-hot or even over 2 or 4 keys: then salience and head means are dyadic."""

import math
from collections.abc import Sequence

from conformance.assurance.vector_writer.case import Case, Group
from conformance.vectors.json_values import Json

__all__ = ["GROUPS", "attending"]

HOT = 2048.0
DYADIC = ("salience", "cross", "cross_weight")


def attending(*heads: Sequence[Sequence[int]], positions: Sequence[int] | None = None) -> Json:
    """q and k such that query i of head h attends heads[h][i], all alike; the keys are unit vectors."""
    live = len(positions or heads[0])
    q = [[[HOT if key in keys else 0.0 for key in range(live)] for keys in head] for head in heads]
    k = [[[float(i == j) for j in range(live)] for i in range(live)]]
    return {"q": q, "k": k, "positions": list(positions or range(live)), "scaling": 1.0, "softcap": None}


def one_head(logits: Sequence[float], at: int, keys: Sequence[int], scaling: float, softcap: float | None) -> Json:
    """One query at position `at`, whose products with the keys are `logits`."""
    return {"q": [[[1.0]]], "k": [[[x] for x in logits]], "query_positions": [at], "key_positions": list(keys),
            "scaling": scaling, "softcap": softcap}


EVEN = [[0.0] * 4 for _ in range(4)]

GROUPS = [
    Group("CC-ATTENTION", [
        Case(1, "logits 0 and ln 3 give a quarter and three quarters", ["Plain"],
             one_head([0.0, math.log(3)], 1, [0, 1], 1.0, None)),
        Case(2, "a key after the query has weight exactly 0", ["CausalByPosition"],
             one_head([0.0, 0.0, 9.0], 1, [0, 1, 2], 1.0, None), exact=("A",)),
        Case(3, "positions with gaps: slots say nothing", ["CausalByPosition"],
             one_head([0.0, 0.0, 9.0, 9.0], 8, [3, 8, 9, 11], 1.0, None), exact=("A",)),
        Case(4, "scaling 0.5 on logits 0 and 2 ln 3", ["Plain"],
             one_head([0.0, 2 * math.log(3)], 1, [0, 1], 0.5, None)),
        Case(5, "a soft cap of 2 on logits 0 and 8", ["SoftCap"], one_head([0.0, 8.0], 1, [0, 1], 1.0, 2.0)),
        Case(6, "four query heads on two KV heads: heads 0 and 1 share the first", ["HeadSharing"], {
            "q": [[[HOT, 0.0]]] * 4, "k": [[[1.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [1.0, 0.0]]],
            "query_positions": [1], "key_positions": [0, 1], "scaling": 1.0, "softcap": None,
        }, exact=("A",)),
        Case(7, "logits of 1e4: the maximum is subtracted first", ["Plain"],
             one_head([1e4, 1e4], 1, [0, 1], 1.0, None), exact=("A",)),
    ]),
    Group("CC-SALIENCE", [
        Case(10, "the three largest of four heads, each token its own", ["TopThreeSum", "MeanBeforeHeads"], {"own": [
            [[1.0, 0.0], [1.0, 0.0]], [[1.0, 0.0], [0.75, 0.25]], [[1.0, 0.0], [0.5, 0.5]],
            [[1.0, 0.0], [0.25, 0.75]],
        ]}, exact=("S",)),
        Case(11, "fewer heads than three: all are summed", ["TopThreeSum"],
             {"own": [[[1.0, 0.0], [0.5, 0.5]], [[1.0, 0.0], [0.25, 0.75]]]}, exact=("S",)),
        Case(12, "a token that nobody attends is at M_min", ["ClipAtBounds"],
             {"own": [[[1.0, 0.0], [1.0, 0.0]]]}, exact=("S",)),
        Case(13, "rows in tenths: bounded, not exact", ["Plain"],
             {"own": [[[1.0, 0.0, 0.0], [0.1, 0.9, 0.0], [0.3, 0.3, 0.4]]]}),
        Case(14, "rows whose mass lies mostly in earlier chunks are taken as they are", ["ChunkOwnQueries"],
             {"own": [[[0.125, 0.0], [0.0625, 0.0625]]]}, exact=("S",)),
    ]),
    Group("CC-SALIENCE", [
        Case(20, "the sum is clipped, not its terms", ["ClipAtBounds"],
             {"own": [[[1.0, 0.0], [0.5, 0.5]], [[1.0, 0.0], [1.0, 0.0]]]}, exact=("S",)),
    ], {"M_min": 0.0, "M_max": 2.5}),
    Group("CC-ROW-NORM", [
        Case(30, "a row of length 1/2, and a row of zeros", ["EpsilonOutside"], {"A": [[0.0, 0.0], [0.3, 0.4]]}),
        Case(31, "a row with little mass on the chunk's own keys is as long as any other", ["OwnKeysFirst"],
             {"A": [[0.01, 0.0], [0.006, 0.008]]}),
        Case(32, "a row of 1e-9: epsilon outweighs it", ["EpsilonOutside"], {"A": [[1e-9, 0.0], [0.0, 1e-9]]}),
    ]),
    Group("CC-INTRA", [
        Case(40, "neighbours on both sides, ties by lower index, cosine 0 left out", ["TieAtBoundary"], {"rows": [
            [1.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.5, 0.5], [0.5, 0.5, 0.5, 0.5], [0.0, 0.0, 0.0, 1.0],
        ]}),
    ], {"k_intra": 3}),
    Group("CC-INTRA", [
        Case(41, "one place: the token itself would take it", ["SelfInTopK"],
             {"rows": [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.5, 0.5, 0.0]]}),
        Case(42, "a single token has no neighbour", ["EmptyResult"], {"rows": [[1.0]]}),
        Case(43, "cosines 1 - 2^-30 and 1 - 2^-40 are one float32: the lower index wins", ["Float32Tie"],
             {"rows": [[1.0, 0.0, 0.0], [1 - 2**-30, 0.0, 0.0], [1 - 2**-40, 0.0, 0.0]]}),
    ], {"k_intra": 1}),
    Group("CC-INTRA", [
        Case(44, "a cosine equal to tau_intra is no edge", ["StrictThreshold"],
             {"rows": [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.25, 0.0, 0.0]]}),
    ], {"k_intra": 2, "tau_intra": 0.5}),
    Group("CC-CROSS", [
        Case(50, "a third weight exceeds 0.02 in float64 but not in float32; a tie",
             ["StrictThreshold", "TieAtBoundary"], {"earlier": [[0.5, 0.25, 0.0200000000001], [0.25, 0.5, 0.25]]}),
        Case(51, "five alike for four places", ["TieAtBoundary"], {"earlier": [[0.125] * 5]}),
        Case(52, "the later of two weights is larger in float64 alone", ["Float32Tie"],
             {"earlier": [[0.25, 0.25 + 2**-40, 0.5, 0.5, 0.5]]}),
        Case(53, "the stored weight is not rounded", ["Float32Tie"], {"earlier": [[0.1, 0.3]]}),
        Case(54, "the first chunk has no source", ["EmptyResult"], {"earlier": [[], []]}),
    ]),
    Group("CC-CROSS", [
        Case(55, "0.25 is not above 0.25, its successor in float32 is", ["StrictThreshold"],
             {"earlier": [[0.25, 0.25 + 2**-25, 0.25 + 2**-24]]}),
    ], {"tau_cross": 0.25, "k_cross": 2}),
    Group("CC-EDGES", [
        Case(60, "a mutual pair and a cross edge, of a segment at position 10", ["DirectedTriples", "LaterSegment"], {
            "start": 10, "intra": [[11, -1], [10, -1]], "intra_weight": [[0.5, 0.0], [0.5, 0.0]],
            "cross": [[-1], [7]], "cross_weight": [[0.0], [0.25]],
        }),
        Case(61, "order: all intra edges by owner and rank, then all cross edges", ["DirectedTriples"], {
            "start": 2, "intra": [[3, -1], [4, 2], [-1, -1]],
            "intra_weight": [[0.5, 0.0], [0.75, 0.5], [0.0, 0.0]],
            "cross": [[1, 0], [-1, -1], [0, -1]], "cross_weight": [[0.5, 0.25], [0.0, 0.0], [0.125, 0.0]],
        }),
        Case(62, "no edge at all", ["EmptyResult"], {
            "start": 0, "intra": [[-1], [-1]], "intra_weight": [[0.0], [0.0]], "cross": [[-1], [-1]],
            "cross_weight": [[0.0], [0.0]],
        }),
    ]),
    Group("coattention", [
        Case(70, "even attention in two chunks", ["ChunkOwnQueries"],
             {"q": [EVEN], "k": [EVEN], "positions": [0, 1, 2, 3], "scaling": 1.0, "softcap": None}),
        Case(71, "each query attends itself", ["Plain"], attending([[0], [1], [2], [3]]),
             exact=("salience", "intra", "cross", "cross_weight")),
        Case(72, "a later chunk's mass on an earlier key is a cross edge, not salience", ["ChunkOwnQueries"],
             attending([[0], [0], [0, 2], [0, 1]]), exact=DYADIC),
        Case(73, "sources tie: the lower position comes first", ["TieAtBoundary"],
             attending([[0], [1], [0, 1], [0, 1]]), exact=DYADIC),
        Case(74, "two heads: the mean of 1 and 0 is a cross weight of one half", ["Plain"],
             attending([[0], [0], [0], [2]], [[0], [1], [2], [3]]), exact=DYADIC),
        Case(75, "a segment of two tokens behind three live keys with gaps", ["ChunkOfSegment", "LaterSegment"],
             attending([[1], [3, 4]], positions=[2, 5, 6, 9, 10]), exact=DYADIC),
        Case(76, "three tokens behind one live key: the chunk ends after two of them", ["ChunkOfSegment"],
             attending([[0], [0, 1], [2, 3]], positions=[4, 7, 8, 9]), exact=DYADIC),
        Case(77, "one token, which no door asks for, behind two live keys", ["LaterSegment", "EmptyResult"],
             attending([[0, 2]], positions=[4, 7, 9]), exact=DYADIC),
        Case(78, "one token alone", ["EmptyResult"], attending([[0]], positions=[3]), exact=DYADIC),
    ], {"C": 2, "k_intra": 2, "k_cross": 2, "M_min": 0.125}),
    Group("coattention", [
        Case(80, "C >= n: no cross edge", ["OneChunk"], attending([[0], [0, 1], [0, 1], [2]]), exact=DYADIC),
        Case(81, "neighbours of identical rows, without the token itself", ["SelfInTopK", "TieAtBoundary"],
             attending([[0], [0], [0], [0]]), exact=("salience", "intra", "cross", "cross_weight")),
    ], {"C": 8, "k_intra": 2, "k_cross": 1, "M_min": 0.0}),
    Group("coattention", [
        Case(85, "four heads: a token's salience is the sum of its own three best", ["TopThreeSum"],
             attending([[0], [0]], [[0], [0]], [[0], [0, 1]], [[0], [1]]), exact=DYADIC),
    ], {"C": 2, "k_intra": 1, "k_cross": 1, "M_min": 0.125}),
]
