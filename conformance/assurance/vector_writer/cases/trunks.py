"""S2: sentences, interfaces, the merge pass and the split."""

import math
from collections.abc import Sequence

from conformance.assurance.vector_writer.case import Case, Group
from conformance.vectors.json_values import Json

__all__ = ["GROUPS", "linked"]

ABOVE = math.nextafter(0.3, 1)


def linked(
    n: int, intra: Sequence[tuple[int, int, float]] = (), cross: Sequence[tuple[int, int, float]] = (),
    start: int = 0, k: int = 2,
) -> Json:
    """The padded arrays of n tokens with these edges: intra (owner, neighbour), cross (source, owner)."""
    def arrays(lists: dict[int, list[tuple[int, float]]], name: str) -> Json:
        rows = [lists.get(start + i, []) for i in range(n)]
        return {
            name: [[j for j, _ in row] + [-1] * (k - len(row)) for row in rows],
            f"{name}_weight": [[w for _, w in row] + [0.0] * (k - len(row)) for row in rows],
        }

    near: dict[int, list[tuple[int, float]]] = {}
    far: dict[int, list[tuple[int, float]]] = {}
    for owner, j, w in intra:
        near.setdefault(owner, []).append((j, w))
    for source, owner, w in cross:
        far.setdefault(owner, []).append((source, w))
    return {"start": start, **arrays(near, "intra"), **arrays(far, "cross")}


def text(ends: str, edges: Json, impact: Sequence[float] | None = None) -> Json:
    """`ends` has a dot where a sentence ends."""
    return {**edges, "ends": [mark == "." for mark in ends], "impact": list(impact or [1.0] * len(ends))}


GROUPS = [
    Group("CC-SENTENCES", [
        Case(1, "an end belongs to its sentence, and ends in a row are sentences", ["SentenceRuns"],
             {"ends": [False, True, True, False]}),
        Case(2, "no end: one sentence", ["SentenceRuns"], {"ends": [False, False]}),
        Case(3, "one token", ["Plain"], {"ends": [True]}),
        Case(4, "every token ends one", ["SentenceRuns"], {"ends": [True, True, True]}),
        Case(5, "the first token ends one", ["SentenceRuns"], {"ends": [True, False, False]}),
    ]),
    Group("CC-INTERFACE", [
        Case(10, "eight tokens, then two", ["WindowOfFive"], {"current": [0, 8], "sentence": [8, 10]}),
        Case(11, "two tokens, then fourteen", ["WindowOfFive"], {"current": [4, 6], "sentence": [6, 20]}),
        Case(12, "five on either side", ["WindowOfFive"], {"current": [0, 5], "sentence": [5, 10]}),
        Case(13, "six on either side", ["WindowOfFive"], {"current": [0, 6], "sentence": [6, 12]}),
    ]),
    Group("CC-INTERFACE-EDGES", [
        Case(20, "(2, 1) is stored backwards and does not count", ["LiteralOrientation", "BackwardEdge"],
             {"edges": [[1, 2, 0.5], [2, 1, 0.75], [0, 3, 0.25]], "current": [0, 2], "sentence": [2, 4]}),
        Case(21, "by first endpoint, then by second, whatever the order of E", ["SumOrder"],
             {"edges": [[1, 3, 0.5], [1, 2, 0.25], [0, 3, 0.75]], "current": [0, 2], "sentence": [2, 4]}),
        Case(22, "tokens outside the window of five", ["WindowOfFive"],
             {"edges": [[0, 6, 0.5], [1, 6, 0.25], [5, 11, 0.75], [5, 10, 1.0]],
              "current": [0, 6], "sentence": [6, 12]}),
        Case(23, "edges inside one side", ["EmptyResult"],
             {"edges": [[0, 1, 0.5], [2, 3, 0.5]], "current": [0, 2], "sentence": [2, 4]}),
    ]),
    Group("CC-MERGE", [
        Case(30, "a strong interface, 32 tokens together", ["InclusiveSize"],
             {"weights": [0.25, 0.5], "size": 10, "next_size": 22}),
        Case(31, "the same with 33", ["InclusiveSize"], {"weights": [0.25, 0.5], "size": 10, "next_size": 23}),
        Case(32, "no edge", ["EmptyResult"], {"weights": [], "size": 1, "next_size": 1}),
        Case(33, "three weights of exactly 0.3", ["StrictThreshold"],
             {"weights": [0.3, 0.3, 0.3], "size": 1, "next_size": 1}),
        Case(34, "one above", ["Plain"], {"weights": [0.31], "size": 1, "next_size": 1}),
        Case(35, "the sum exceeds 3 * 0.3, the rounded mean does not exceed 0.3", ["MultipliedOut"],
             {"weights": [0.3, 0.3, ABOVE], "size": 1, "next_size": 1}),
        Case(36, "ten weights just above 0.3 do not sum above 10 * 0.3", ["MultipliedOut"],
             {"weights": [ABOVE] * 10, "size": 1, "next_size": 1}),
        Case(37, "nine of them do", ["MultipliedOut"], {"weights": [ABOVE] * 9, "size": 1, "next_size": 1}),
        Case(38, "0.25, 0.3, 0.35 from the left", ["SumOrder"],
             {"weights": [0.25, 0.3, 0.35], "size": 1, "next_size": 1}),
        Case(39, "the same weights in the other order", ["SumOrder"],
             {"weights": [0.35, 0.3, 0.25], "size": 1, "next_size": 1}),
    ]),
    Group("CC-SPLIT", [
        Case(50, "67 tokens", ["SplitLargerFirst"], {"size": 67, "T_max": 32}),
        Case(51, "95 tokens: steps of the floor would leave a piece of 33", ["SplitLargerFirst"],
             {"size": 95, "T_max": 32}),
        Case(52, "exactly T_max", ["InclusiveSize"], {"size": 32, "T_max": 32}),
        Case(53, "T_max + 1", ["SplitLargerFirst"], {"size": 33, "T_max": 32}),
        Case(54, "T_max = 1", ["SplitLargerFirst"], {"size": 5, "T_max": 1}),
        Case(55, "one token", ["Plain"], {"size": 1, "T_max": 32}),
        Case(56, "65 tokens: the least size that a split leaves", ["SplitLargerFirst"], {"size": 65, "T_max": 32}),
    ]),
    Group("trunks", [
        Case(60, "a forward edge across the sentence end merges", ["LiteralOrientation"],
             text("-.-.", linked(4, [(1, 2, 0.9)]))),
        Case(61, "a backward one does not", ["BackwardEdge"], text("-.-.", linked(4, [(2, 1, 0.9)]))),
        Case(62, "a cross edge counts from its source", ["LiteralOrientation"],
             text("-.-.", linked(4, cross=[(1, 2, 0.5)]))),
        Case(63, "five tokens without an end, at position 100", ["SplitLargerFirst", "LaterSegment"],
             text("-----", linked(5, start=100))),
        Case(64, "a chain of tokens: the trunk is full at four, and the next one starts", ["InclusiveSize"],
             text("......", linked(6, [(i, i + 1, 1.0) for i in range(5)]))),
        Case(65, "a sentence that did not merge is the running trunk", ["Plain"],
             text(".-..", linked(4, [(2, 3, 1.0)]))),
        Case(66, "trunk impact: the three largest of four, and of a trunk of one", ["TopThreeOfTrunk"],
             text("---.-", linked(5), [1.0, 8.0, 3.0, 4.0, 3.0])),
        Case(67, "trunk impact: the largest are added first", ["SumOrder", "TopThreeOfTrunk"],
             text("---", linked(3), [0.1, 0.2, 0.3])),
    ], {"T_max": 4}),
    Group("trunks", [
        Case(70, "tokens 0 and 11 stand outside the window", ["WindowOfFive"],
             text("-----.-----.", linked(12, [(0, 6, 1.0), (5, 11, 1.0)]))),
        Case(71, "tokens 1 and 10 stand in it", ["WindowOfFive"],
             text("-----.-----.", linked(12, [(1, 6, 1.0), (5, 10, 1.0)]))),
        Case(72, "the sum runs by (a, b), not by rank", ["SumOrder"],
             text("--.-", linked(4, [(0, 3, 0.25), (1, 3, 0.3), (2, 3, 0.35)]))),
        Case(73, "the same weights the other way round", ["SumOrder"],
             text("--.-", linked(4, [(0, 3, 0.35), (1, 3, 0.3), (2, 3, 0.25)]))),
    ]),
    Group("trunks", [
        Case(80, "T_max = 1: single tokens, whatever the edges and ends", ["AblationForm"],
             text("-.--", linked(4, [(1, 2, 1.0)]))),
    ], {"T_max": 1}),
]
