"""Set-conditioned diversity."""

from conformance.assurance.brute import numbers
from conformance.assurance.vector_writer.case import Case, Group

__all__ = ["GROUPS"]

OPEN = [False] * 3
THREE = {"s": [1.0, 0.9, 0.8], "V": [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]], "retained": OPEN, "k": 2}
MODEL = {"k": numbers(3, 2, 2, 7, 3), "v": numbers(4, 2, 2, 7, 3), "B": 4}

GROUPS = [
    Group("DV-COSINE", [
        Case(1, "epsilon outside the root: 3, 4 has length 5; a zero row stays zero", ["EpsilonOutside"],
             {"u": [[3.0, 4.0], [0.0, 0.0], [-6.0, -8.0]]}),
        Case(2, "five channels, added in their order", ["SumOrder"], {"u": numbers(2, 4, 5)}),
    ]),
    Group("DV-SIGNATURE", [
        Case(10, "one signature for the cache", ["SumOrder"], {"values": numbers(5, 2, 3, 3, 3), "mode": "flat"}),
        Case(11, "one for each layer", ["HeadSharing"], {"values": numbers(5, 2, 3, 3, 3), "mode": "layer"}),
        Case(12, "one for each head", ["HeadSharing"], {"values": numbers(5, 2, 3, 3, 3), "mode": "head"}),
    ]),
    Group("DV-GREEDY", [
        Case(20, "0.9 - 0.5 is less than 0.8: the third token", ["Plain"], {**THREE, "lam": 0.5}),
        Case(21, "0.9 - 0.1 is 0.8, a tie: the lower position", ["TieAtBoundary"],
             {**THREE, "s": [1.0, 0.875, 0.75], "lam": 0.125}),
        Case(22, "an opposite token has no bonus", ["NoBonus"],
             {"s": [1.0, 0.5, 0.5], "V": [[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]], "retained": OPEN, "k": 2, "lam": 0.5}),
        Case(23, "what is retained already counts", ["RetainedCounts"],
             {"s": [1.0, 0.9, 9.0], "V": [[0.6, 0.8], [1.0, 0.0], [0.0, 1.0]], "retained": [False, False, True], "k": 2,
              "lam": 0.5}),
        Case(24, "a token without a score is the last", ["ProtectedNotRead"],
             {**THREE, "s": [float("nan"), 1.0, 1.0], "lam": 9.0}),
        Case(25, "all of them", ["CutEqualsTotal"], {**THREE, "k": 3, "lam": 0.5}),
        Case(26, "a negative penalty", ["Refused"], {**THREE, "lam": -0.5}, refused="lam"),
        Case(27, "no penalty at all", ["Refused"], {**THREE, "lam": float("nan")}, refused="lam"),
        Case(28, "more than there are", ["Refused"], {**THREE, "k": 4, "lam": 0.5}, refused="k"),
        Case(29, "like the first that is kept, unlike the newest: all that are kept count", ["AllKeptCount"],
             {"s": [1.0, 0.9, 0.8, 0.75], "V": [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]],
              "retained": [False] * 4, "k": 3, "lam": 0.5}),
    ]),
    Group("DV-POLICY", [
        Case(30, "a signature for the cache", ["Plain"], {**MODEL, "lam": 4.0, "mode": "flat"}),
        Case(31, "a signature for each layer", ["HeadSharing"], {**MODEL, "lam": 4.0, "mode": "layer"}),
        Case(32, "a signature for each head", ["HeadSharing"], {**MODEL, "lam": 4.0, "mode": "head"}),
        Case(33, "without penalty the base policy's set", ["Plain"], {**MODEL, "lam": 0.0, "mode": "flat"}),
    ]),
    Group("DV-VARIANT-B", [
        Case(40, "two equal tokens both stay", ["Modular"],
             {"s": [1.0, 0.9, 0.8], "V": [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]], "B": 2, "lam": 0.5}),
        Case(41, "equal scores: the lower index", ["TieAtBoundary"],
             {"s": [0.5, 0.5, 0.5, 0.5], "V": [[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]], "B": 3, "lam": 0.5}),
        Case(42, "a penalty of 0: the scores alone", ["Modular"],
             {"s": [0.25, 1.0, 0.5], "V": [[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]], "B": 2, "lam": 0.0}),
    ]),
    Group("DV-SCHEDULE", [
        Case(50, "from the front", ["Plain"], {"B": 64, "rounds": 5, "tilt": 16}),
        Case(51, "from the back, in parts of a token", ["SumOrder"], {"B": 10, "rounds": 4, "tilt": -5}),
        Case(52, "a round without a token", ["Refused"], {"B": 8, "rounds": 4, "tilt": 8}, refused="tilt"),
    ]),
]
