"""S4: the trunk graph and D."""

from conformance.assurance.vector_writer.case import Case, Group
from conformance.assurance.vector_writer.cases.trunks import linked
from conformance.vectors.json_values import Json

__all__ = ["GROUPS"]

EXACT = ("weights", "degree")


def over(offsets: list[int], edges: Json) -> Json:
    return {**edges, "offsets": offsets}


PAIR = [(0, 1, 0.75), (1, 0, 0.75)]

GROUPS = [
    Group("CC-TRUNK-EDGES", [
        Case(1, "a mutual pair counts twice; edges inside a trunk do not count", ["AdditiveMultiset", "MutualPair"],
             {"edges": [[0, 1, 0.75], [1, 0, 0.75], [2, 0, 0.5], [2, 3, 1.0]], "offsets": [0, 1, 2, 4]}),
        Case(2, "equal weights of different token pairs are two edges", ["AdditiveMultiset"],
             {"edges": [[0, 2, 0.5], [1, 3, 0.5]], "offsets": [0, 2, 4]}),
        Case(3, "the sum runs in the order of E", ["SumOrder"],
             {"edges": [[0, 1, 0.1], [1, 0, 0.2], [2, 1, 0.3]], "offsets": [0, 1, 3]}),
        Case(4, "no edge between trunks", ["EmptyResult"], {"edges": [[0, 1, 1.0]], "offsets": [0, 2, 3]}),
        Case(5, "pairs ascend, whatever the order of E", ["StableOrder"],
             {"edges": [[3, 2, 0.5], [0, 3, 0.25], [1, 0, 0.125]], "offsets": [0, 1, 2, 3, 4]}),
    ]),
    Group("CC-TRUNK-WEIGHT", [
        Case(10, "the mean times the root of the density; 0.05 is pruned", ["StrictThreshold"],
             {"pairs": [[0, 1, 2, 1.5], [0, 2, 1, 0.5], [1, 2, 1, 0.1]], "sizes": [1, 1, 4]}),
        Case(11, "dyadic weights", ["Plain"], {"pairs": [[0, 1, 1, 0.5], [0, 2, 4, 3.0]], "sizes": [1, 4, 4]},
             exact=("weights",)),
        Case(12, "a mutual pair of single tokens at weight 1: the root of 2", ["AdditiveMultiset"],
             {"pairs": [[0, 1, 2, 2.0]], "sizes": [1, 1]}),
    ]),
    Group("CC-TRUNK-WEIGHT", [
        Case(13, "a weight equal to tau_edge is 0", ["StrictThreshold"],
             {"pairs": [[0, 1, 1, 0.5], [0, 2, 1, 0.5]], "sizes": [1, 4, 1]}, exact=("weights",)),
    ], {"tau_edge": 0.25}),
    Group("CC-DEGREE", [
        Case(20, "row sums; a trunk without an edge has 0", ["Plain"],
             {"indptr": [0, 2, 3, 4, 4], "weights": [1.0, 0.25, 1.0, 0.25]}),
        Case(21, "by ascending neighbour", ["SumOrder"], {"indptr": [0, 3], "weights": [0.1, 0.2, 0.3]}),
    ]),
    Group("CC-CRYSTALLIZATION", [
        Case(30, "two trunks: z is -1 and 1 by the population sigma", ["PopulationSigma"], {"degree": [0.0, 1.0]}),
        Case(31, "a sigma below epsilon is replaced by 1", ["SigmaFallback"], {"degree": [0.0, 1e-9]}),
        Case(32, "equal degrees: exactly one half", ["SigmaFallback"], {"degree": [2.0, 2.0, 2.0]}, exact=("D",)),
        Case(33, "one trunk: exactly one half", ["PopulationSigma"], {"degree": [0.25]}, exact=("D",)),
        Case(34, "five trunks", ["PopulationSigma"], {"degree": [0.0, 0.25, 0.5, 1.0, 3.0]}),
    ]),
    Group("CC-CRYSTALLIZATION", [
        Case(35, "s = 1000: arguments of -1000 and 1000", ["SaturatedLogistic"], {"degree": [0.0, 1.0]}),
    ], {"s": 1000.0}),
    Group("CC-CRYSTALLIZATION", [
        Case(36, "the ablation graph = zero: D is 0", ["AblationForm"], {"degree": [0.0, 1.0]}, exact=("D",)),
    ], {"graph": "zero"}),
    Group("graph", [
        Case(40, "a mutual pair, a backward edge and one inside a trunk", ["AdditiveMultiset", "MutualPair"],
             over([0, 1, 2, 4], linked(4, [*PAIR, (2, 0, 0.5), (2, 3, 1.0)]))),
        Case(41, "single tokens with one edge each: weights are the edges'", ["Plain"],
             over([0, 1, 2, 3], linked(3, [(0, 1, 0.5), (2, 1, 0.25)])), exact=EXACT),
        Case(42, "no edge: D is exactly one half", ["EmptyResult"], over([0, 2, 4], linked(4)),
             exact=(*EXACT, "D")),
        Case(43, "a cross edge of a later segment", ["LaterSegment"],
             over([10, 11, 12], linked(2, cross=[(10, 11, 0.5)], start=10)), exact=EXACT),
        Case(44, "columns ascend though the edges do not", ["StableOrder"],
             over([0, 1, 2, 3], linked(3, [(0, 2, 0.75), (0, 1, 0.5)])), exact=EXACT),
        Case(45, "two edges between trunks of two tokens", ["Plain"],
             over([0, 2, 4, 5], linked(5, [(0, 2, 0.5), (1, 3, 0.25), (4, 0, 0.5)]))),
    ]),
    Group("graph", [
        Case(50, "a weight equal to tau_edge is pruned", ["StrictThreshold"],
             over([0, 1, 2, 3], linked(3, [(0, 1, 0.25), (1, 2, 0.5)])), exact=EXACT),
    ], {"tau_edge": 0.25}),
    Group("graph", [
        Case(51, "graph = zero: the graph stays, D is 0", ["AblationForm"],
             over([0, 1, 2], linked(2, [(0, 1, 0.5)])), exact=(*EXACT, "D")),
    ], {"graph": "zero"}),
]
