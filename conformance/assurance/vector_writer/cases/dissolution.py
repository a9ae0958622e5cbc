"""S6: protection, the cut, the allocation and what stays."""

import math
from collections.abc import Sequence

from conformance.assurance.vector_writer.case import Case, Group
from conformance.vectors.json_values import Json

__all__ = ["GROUPS"]

NAN = math.nan


def eviction(
    sizes: Sequence[int], score: Sequence[float], B: int, impact: Sequence[float] | None = None,
    protected: Sequence[bool] | None = None, start: int = 0,
) -> Json:
    """S6's input; M is 1 and D is 1/2 where nothing is said."""
    offsets = [start]
    for size in sizes:
        offsets.append(offsets[-1] + size)
    return {
        "score": list(score), "offsets": offsets, "impact": list(impact or [1.0] * sum(sizes)),
        "D": [0.5] * len(sizes), "protected": list(protected or [False] * len(sizes)), "B": B,
    }


def sizes(*sizes: int, c_0: int) -> Json:
    return {"sizes": list(sizes), "c_0": c_0}


GROUPS = [
    Group("CC-PROTECTED", [
        Case(1, "sink and window touch the first and the last trunk", ["WholeTrunkProtected"],
             {"offsets": [0, 5, 9, 12], "n": 12}),
    ], {"N_sink": 4, "W_recent": 3}),
    Group("CC-PROTECTED", [
        Case(2, "one recent token more reaches the second trunk", ["WholeTrunkProtected"],
             {"offsets": [0, 5, 9, 12], "n": 12}),
        Case(3, "a trunk that starts at N_sink is outside", ["WholeTrunkProtected"],
             {"offsets": [0, 4, 8, 12], "n": 12}),
    ], {"N_sink": 4, "W_recent": 4}),
    Group("CC-PROTECTED", [
        Case(4, "neither sink nor window", ["EmptyResult"], {"offsets": [0, 5, 9, 12], "n": 12}),
    ], {"N_sink": 0, "W_recent": 0}),
    Group("CC-PROTECTED", [
        Case(5, "the window is longer than the prompt", ["NothingUnprotected"], {"offsets": [0, 5, 9, 12], "n": 12}),
    ], {"N_sink": 0, "W_recent": 20}),
    Group("CC-PROTECTED", [
        Case(6, "the paper's defaults on 150 tokens protect every trunk", ["NothingUnprotected"],
             {"offsets": [0, 18, 50, 75, 100, 125, 150], "n": 150}),
    ]),
    Group("CC-CUT", [
        Case(10, "two tokens too many", ["Plain"], {"sizes": [5, 4, 3], "protected": [True, False, True], "B": 10}),
        Case(11, "protected trunks exceed B: all of the others", ["ProtectedAboveBudget", "CutHeldToAlive"],
             {"sizes": [5, 4, 3], "protected": [True, False, True], "B": 6}),
        Case(12, "n = B", ["Plain"], {"sizes": [5, 4, 3], "protected": [True, False, True], "B": 12}),
        Case(13, "nothing is unprotected", ["NothingUnprotected"],
             {"sizes": [5, 4], "protected": [True, True], "B": 3}),
        Case(14, "B = B_prot: all of the others, exactly", ["CutEqualsTotal"],
             {"sizes": [5, 4], "protected": [True, False], "B": 5}),
    ]),
    Group("CC-ALLOCATE", [
        Case(20, "three of five remain", ["RemnantThree"], sizes(5, 5, c_0=2)),
        Case(21, "two of four would remain", ["RemnantTwo"], sizes(4, 5, c_0=2)),
        Case(22, "one of four would remain", ["RemnantOne"], sizes(4, 5, c_0=3)),
        Case(23, "a whole trunk, then a partial one", ["Plain"], sizes(3, 10, 4, c_0=5)),
        Case(24, "the cut is everything", ["CutEqualsTotal"], sizes(4, 4, c_0=8)),
        Case(25, "the cut ends with a trunk: the next one is whole", ["CutEqualsTotal"], sizes(4, 4, 4, c_0=4)),
        Case(26, "nothing to cut", ["EmptyResult"], sizes(4, 4, c_0=0)),
        Case(27, "trunks of one and two tokens stay whole after the stop", ["RemnantOne"], sizes(4, 1, 2, c_0=1)),
        Case(28, "the division is correctly rounded", ["Plain"], sizes(7, 4, c_0=2)),
        Case(29, "an overshoot after a whole trunk", ["RemnantTwo"], sizes(2, 3, 3, c_0=3)),
    ]),
    Group("CC-ALLOCATE", [
        Case(30, "one token may remain", ["RemnantZero"], sizes(4, 4, c_0=3)),
        Case(31, "none: that is no partial trunk", ["RemnantZero"], sizes(4, 4, c_0=4)),
    ], {"N_min": 0}),
    Group("CC-ALLOCATE", [
        Case(32, "N_min above every size: whole trunks go", ["RemnantTwo"], sizes(9, 9, c_0=1)),
    ], {"N_min": 32}),
    Group("CC-KEEP-COUNT", [
        Case(40, "0.8 of 10", ["Plain"], {"r": 0.8, "size": 10}),
        Case(41, "the float nearest to 3/5, of 5", ["Plain"], {"r": 0.6, "size": 5}),
        Case(42, "half of 9 is 4", ["HalfToEven"], {"r": 0.5, "size": 9}),
        Case(43, "half of 11 is 6", ["HalfToEven"], {"r": 0.5, "size": 11}),
        Case(44, "at least N_min", ["RemnantThree"], {"r": 0.125, "size": 9}),
        Case(45, "at most all", ["RemnantTwo"], {"r": 0.1, "size": 2}),
        Case(46, "2046 of 2048", ["Plain"], {"r": 2046 / 2048, "size": 2048}),
        Case(47, "the float nearest to 1000/2047", ["Plain"], {"r": 1000 / 2047, "size": 2047}),
    ]),
    Group("CC-DISSOLVE-D", [
        Case(50, "gone, weakened, whole", ["Plain"], {"D": [0.5, 0.5, 0.25], "r": [0.0, 0.5, 1.0]}),
        Case(51, "a product that rounds", ["Plain"], {"D": [0.3, 0.1], "r": [2 / 3, 1.0]}),
    ]),
    Group("dissolve", [
        Case(60, "equal scores: the lower trunk goes first", ["TieAtBoundary"], eviction([4, 4, 4], [0.5] * 3, 8)),
        Case(61, "equal members of a partial trunk: the lower position stays", ["TieAtBoundary", "RemnantThree"],
             eviction([5, 5], [0.25, 0.75], 8, [1.0, 4.0, 2.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0])),
        Case(62, "the protected trunk alone exceeds B", ["ProtectedAboveBudget", "ProtectedNotRead"],
             eviction([6, 4], [NAN, 0.75], 5, protected=[True, False])),
        Case(63, "every trunk is protected", ["NothingUnprotected"],
             eviction([3, 3], [NAN, NAN], 2, protected=[True, True])),
        Case(64, "two tokens would remain", ["RemnantTwo"], eviction([5, 5], [0.25, 0.75], 7)),
        Case(65, "one token would remain", ["RemnantOne"], eviction([5, 5], [0.25, 0.75], 6)),
        Case(66, "a cut of exactly one trunk", ["CutEqualsTotal"], eviction([5, 5], [0.75, 0.25], 5)),
        Case(67, "n = B", ["EmptyResult"], eviction([5, 5], [0.75, 0.25], 10)),
        Case(68, "B above n", ["FloorOfBudget"], eviction([5, 5], [0.75, 0.25], 132)),
        Case(69, "the best of the partial trunk are its last tokens", ["PartialKeepsBest", "StableOrder"],
             eviction([6, 2], [0.25, 0.75], 5, [1.0, 1.0, 1.0, 2.0, 4.0, 3.0, 0.5, 0.5])),
        Case(70, "a later segment: positions are absolute", ["LaterSegment"],
             eviction([4, 4], [0.25, 0.75], 7, [1.0, 2.0, 3.0, 4.0, 1.0, 1.0, 1.0, 1.0], start=100)),
        Case(71, "scores order the trunks, positions order what is kept", ["StableOrder"],
             eviction([3, 3, 3], [0.75, 0.25, 0.5], 6)),
        Case(72, "a low score of a protected trunk is not read", ["ProtectedNotRead"],
             eviction([3, 3, 3], [-9.0, 0.25, 0.5], 6, protected=[True, False, False])),
        Case(73, "everything unprotected goes", ["CutEqualsTotal"],
             eviction([3, 2, 1], [NAN, 0.25, 0.5], 3, protected=[True, False, False])),
        Case(74, "the closed form's boundary: the sum before a trunk equals the cut", ["CutEqualsTotal", "RemnantOne"],
             eviction([3, 2, 4], [0.125, 0.25, 0.5], 6)),
        Case(75, "96 trunks, three scores: a sort that is not stable shows", ["TieAtBoundary", "StableOrder"],
             eviction([1 + 3 * g % 7 for g in range(96)], [(5 * g % 3) / 4 for g in range(96)], 200)),
        Case(76, "48 members, three values: the lower position stays", ["TieAtBoundary", "PartialKeepsBest"],
             eviction([48, 4], [0.25, 0.75], 24, [*(1.0 + 5 * i % 3 for i in range(48)), 1.0, 1.0, 1.0, 1.0])),
    ]),
    Group("dissolve", [
        Case(80, "one token may remain", ["RemnantZero"], eviction([4, 4], [0.25, 0.75], 5)),
    ], {"N_min": 0}),
    Group("dissolve", [
        Case(81, "no trunk is partial", ["RemnantTwo"], eviction([4, 4], [0.25, 0.75], 7)),
    ], {"N_min": 32}),
    Group("CC-COMPACT", [
        Case(90, "one head", ["Plain"],
             {"K": [[[1.0], [2.0], [3.0]]], "V": [[[4.0, 5.0], [6.0, 7.0], [8.0, 9.0]]], "R": [0, 2]}),
        Case(91, "the same positions for each KV head", ["HeadSharing"],
             {"K": [[[1.0], [2.0]], [[3.0], [4.0]]], "V": [[[5.0], [6.0]], [[7.0], [8.0]]], "R": [1]}),
    ]),
]
