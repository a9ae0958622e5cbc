"""The parts of policies, and policies whose vectors have a form of their own; the others' are with their oracles."""

from conformance.assurance.brute import MODES, numbers, seeded
from conformance.assurance.oracles import brutes
from conformance.assurance.vector_writer.case import Case, Group
from conformance.vectors.json_values import Json

__all__ = ["GROUPS"]


OPEN = [False] * 6
SINK = [True, *[False] * 5]
HEADS = [[9.0, 8.0, 7.0, 6.0, 5.0, 4.0], [3.0, 3.0, 1.0, 0.0, 0.0, 0.0]]
UNIFORM = {"q": [[[[0.0], [0.0]]]], "k": [[[[1.0], [3.0]]]], "v": [[[[1.0], [1.0]]]], "scaling": 1.0}

CONTEXT = {"token_ids": [50, 51, 52, 53, 54, 55, 56, 57, 58], "template": [[1, 2], [3], [4, 5]]}


def rehearsed(seed: int, L: int, chunks: list[Json], r: int, H: int = 4) -> dict[str, Json]:
    """Nine tokens, the first and the last of which are protected."""
    return {
        "k": numbers(seed, L, 2, 9, 2), "scaling": 0.75, "N_sink": 1, "N_recent": 1, "chunks": chunks,
        "repeat_q": numbers(seed + 1, len(chunks), L, H, r, 2), "repeat_k": numbers(seed + 2, len(chunks), L, 2, r, 2),
    }


GROUPS = [
    Group("PO-RETAIN", [
        Case(1, "a layer of two heads keeps B tokens in each", ["Plain"], {**seeded(1), "B": 4}),
        Case(2, "a budget above the tokens seen keeps all", ["NothingUnprotected"], {**seeded(1), "B": 99}),
    ]),
    Group("PO-OBSERVED-ATTENTION", [
        Case(10, "uniform attention: the window's key is in the sum", ["Plain"], {**UNIFORM, "W": 1}),
        Case(11, "causal inside the window", ["CausalByPosition"], {**UNIFORM, "W": 2}),
    ]),
    Group("PO-POOL", [
        Case(20, "the divisor is 5 at the edge too", ["Plain"], {"row": [5.0, 0.0, 0.0, 0.0, 0.0], "kernel": 5}),
        Case(21, "what lies outside is not a zero", ["EmptyResult"], {"row": [-4.0, -2.0, -3.0], "kernel": 3}),
    ]),
    Group("PO-TOP-UNITS", [
        Case(30, "equal scores: the lower position stays", ["TieAtBoundary"],
             {"values": [[1.0, 2.0, 1.0, 1.0, 2.0, 0.0]], "protected": OPEN, "B": 3}),
        Case(31, "a protected token comes first", ["ProtectedNotRead"],
             {"values": HEADS, "protected": [*[False] * 5, True], "B": 2}),
    ]),
    Group("PO-FILL-UNITS", [
        Case(40, "the second chunk is kept in part, by its best token", ["PartialKeepsBest"],
             {"values": [[5.0, 1.0, 2.0, 2.5, 0.0, 1.0]], "protected": OPEN, "c": 2, "B": 3}),
        Case(41, "equal chunks: the lower one", ["TieAtBoundary"],
             {"values": [[1.0, 1.0, 1.0, 1.0, 0.0, 9.0]], "protected": [*[False] * 5, True], "c": 2, "B": 3}),
    ]),
    Group("PO-WHOLE-SHARES", [
        Case(50, "remainders 1/2, 3/4, 3/4: the two larger ones", ["Plain"], {"targets": ["5/2", "7/4", "11/4"]}),
        Case(51, "remainders 1/2, 1/2, 0, and one token for two: the lower", ["TieAtBoundary"],
             {"targets": ["5/2", "3/2", "3"]}),
        Case(364, "one place for remainders 1/4, 3/8, 3/8: the lower of the equal ones", ["TieAtBoundary"],
             {"targets": ["9/4", "11/8", "27/8"]}),
    ]),
    Group("PO-PYRAMID-BUDGET", [
        Case(60, "the line is exact where the published one has 4016 + 256", ["Plain"],
             {"B": 128, "W": 8, "L": 32, "n": 4096, "beta": 20}),
        Case(61, "layer 0 cannot have more than there is", ["CutHeldToAlive"],
             {"B": 10, "W": 2, "L": 3, "n": 13, "beta": 20}),
        Case(62, "one layer", ["OneChunk"], {"B": 5, "W": 2, "L": 1, "n": 9, "beta": 20}),
        Case(63, "more than there is: all of it, in every layer", ["CutHeldToAlive"],
             {"B": 9, "W": 2, "L": 3, "n": 7, "beta": 20}),
    ]),
    Group("PO-ADAPTIVE-BUDGET", [
        Case(70, "the wins are 6 and 2, the even share is 4", ["Plain"],
             {"values": HEADS, "protected": OPEN, "B": 4, "safeguard": "1/5"}),
        Case(71, "a protected token is beside the competition", ["ProtectedNotRead"],
             {"values": HEADS, "protected": SINK, "B": 3, "safeguard": "1/2"}),
    ]),
    Group("PO-COMPETITION-BUDGET", [
        Case(80, "a quota of one token each, then the layer's best", ["Plain"],
             {"values": [[9.0, 8.0, 7.0, 6.0, 5.0, 4.0], [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]], "protected": OPEN, "B": 3,
              "safeguard": "2/5"}),
        Case(81, "a protected token counts in the quota", ["ProtectedNotRead"],
             {"values": HEADS, "protected": SINK, "B": 3, "safeguard": "1/3"}),
    ]),
    Group("PO-THRESHOLD", [
        Case(296, "above the threshold, and not at it", ["Plain"],
             {"values": HEADS, "protected": OPEN, "B": 6, "tau": 5.0}),
        Case(297, "a protected token counts, whatever it scores; the share is an upper bound", ["ProtectedNotRead"],
             {"values": HEADS, "protected": SINK, "B": 3, "tau": 2.0}),
    ]),
    Group("PO-PYRAMID-OFFICIAL", [
        Case(90, "32 layers: 4.6 % over", ["Plain"], {"capacity": 128, "W": 8, "L": 32, "n": 4096, "beta": 20}),
        Case(91, "80 layers: 29.2 % over", ["Plain"], {"capacity": 128, "W": 8, "L": 80, "n": 4096, "beta": 20}),
        Case(92, "flat below 2 (capacity - W) tokens", ["CutHeldToAlive"],
             {"capacity": 128, "W": 8, "L": 4, "n": 239, "beta": 20}),
    ]),
    Group("PO-ADAKV-OFFICIAL", [
        Case(100, "nothing should go, and a token goes", ["HalfToEven"],
             {"wins": [101, 101], "base": 101, "safeguard": "1/2"}),
        Case(101, "one token under", ["HalfToEven"], {"wins": [4, 8], "base": 6, "safeguard": "1/5"}),
    ]),
    Group("PO-STEP", [
        Case(110, "when a step is due: every, excess, seen, live, B", ["StrictThreshold"],
             {"steps": [[1, 1, 9, 4, 4], [1, 1, 9, 5, 4], [4, 1, 8, 5, 4], [4, 1, 9, 9, 4], [1, 3, 9, 6, 4],
                        [1, 3, 9, 7, 4], [None, 1, 9, 9, 4]]}),
    ]),
    Group("PO-TURN", [
        Case(115, "the second head has dropped two tokens; the last is protected", ["Plain"],
             {"k": [[[2.0], [1.0], [4.0], [3.0], [5.0]], [[1.0], [2.0], [9.0]]],
              "positions": [[0, 1, 2, 3, 4], [0, 3, 4]], "seen": 5, "B": 2, "sink": 0, "recent": 1}),
        Case(116, "a share above what is stored, and no sink left", ["NothingUnprotected"],
             {"k": [[[2.0], [1.0], [4.0], [3.0], [5.0]], [[7.0], [2.0], [9.0]]],
              "positions": [[1, 2, 3, 5, 6], [4, 5, 6]], "seen": 7, "B": 4, "sink": 1, "recent": 1}),
    ]),
    Group("PO-READ", [
        Case(117, "two tokens are read: nothing goes, and sums grow", ["Plain"],
             {"live": [[0, 2, 3], [1, 2, 3]], "sums": [[2.0, 0.5, 1.0], [0.5, 1.5, 1.0]], "tokens": 2, "seen": 6,
              "q": [[[1024.0, 0.0], [0.0, 1024.0]], [[0.0, 1024.0], [0.0, 1024.0]]],
              "k": [[[1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 1.0]],
                    [[0.0, 0.0], [0.0, 1.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]], "scaling": 1.0}),
    ]),
    Group("PO-STREAMINGLLM", [
        Case(120, "two sinks and the last three", ["Plain"], {"n": 10, "N_sink": 2, "B": 5}),
        Case(362, "a budget of the sinks and one token", ["Plain"], {"n": 7, "N_sink": 4, "B": 5}),
        Case(363, "a budget of all tokens", ["NothingUnprotected"], {"n": 6, "N_sink": 2, "B": 9}),
    ]),
    Group("PO-TWO-STAGES", [
        Case(271, "half of five places is two; three go to the second score", ["TieAtBoundary"],
             {"values": HEADS, "second": [[0.0, 1.0, 0.0, 2.0, 2.0, 2.0]] * 2, "protected": OPEN, "B": 5,
              "share": "1/2"}),
        Case(272, "a protected token is in no stage", ["ProtectedNotRead"],
             {"values": HEADS, "second": [[9.0, 1.0, 0.0, 2.0, 2.0, 2.0]] * 2, "protected": SINK, "B": 3,
              "share": "1/2"}),
    ]),
    Group("PO-BEST-BLOCKS", [
        Case(274, "blocks of two by their sums; the open one takes a place", ["Plain"],
             {"values": [[3.0, 3.0, 5.0, 0.0, 1.0, 4.0, 9.0]], "protected": [False] * 7, "b": 2, "B": 6}),
        Case(275, "equal blocks: the lower one", ["TieAtBoundary"],
             {"values": HEADS, "protected": OPEN, "b": 2, "B": 3}),
        Case(276, "a protected token keeps its block, of which all places count", ["ProtectedNotRead"],
             {"values": HEADS, "protected": [*[False] * 4, True, False], "b": 3, "B": 5}),
    ]),
    Group("PO-BLOCKS", [
        Case(277, "a window of two holds the last blocks", ["Plain"], {**seeded(21), "B": 8, "b": 3, **MODES}),
        Case(278, "a budget below one block is one block", ["Plain"], {**seeded(22, n=9), "B": 2, "b": 3, **MODES}),
    ]),
    Group("PO-REPRESENTATIVES", [
        Case(308, "two heads, three of five blocks that are left", ["Plain"],
             {"values": numbers(2, 2, 13), "protected": [False] * 13, "b": 2, "B": 9, "share": "3/4",
              "anchor": "alternating"}),
        Case(309, "equal distances: the lower block; a protected block takes no part", ["TieAtBoundary"],
             {"values": [[float(at % 3) for at in range(14)]], "protected": [True, *[False] * 13], "b": 2, "B": 8,
              "share": "1/2", "anchor": "mean"}),
        Case(310, "from zeros: the blocks with the fewest good tokens come first", ["Plain"],
             {"values": numbers(3, 2, 15), "protected": [False] * 15, "b": 3, "B": 9, "share": "1", "anchor": "zeros"}),
        Case(311, "from ones", ["Plain"],
             {"values": numbers(3, 2, 15), "protected": [False] * 15, "b": 3, "B": 9, "share": "1", "anchor": "ones"}),
    ]),
    Group("PO-PREFERENCE-BUDGET", [
        Case(280, "in proportion, whole by largest remainder", ["Plain"],
             {"preferences": [1.0, 2.0, 4.0], "B": 8, "W": 2, "n": 40}),
        Case(281, "two layers are full one after the other, and the rest goes to the others", ["TieAtBoundary"],
             {"preferences": [64.0, 1.0, 8.0, 1.0], "B": 8, "W": 2, "n": 12}),
        Case(282, "no layer has a preference", ["TieAtBoundary"],
             {"preferences": [0.0, 0.0, 0.0], "B": 4, "W": 2, "n": 9}),
    ]),
    Group("PO-REHEARSAL", [
        Case(300, "three chunks, the last one short", ["Plain"],
             {**CONTEXT, "N_sink": 1, "N_recent": 0, "chunk": 3, "overlap": 2}),
        Case(301, "chunks shorter than the overlap; one token at each end stays out", ["Plain"],
             {**CONTEXT, "N_sink": 1, "N_recent": 1, "chunk": 2, "overlap": 8}),
        Case(302, "no context between both ends", ["NothingUnprotected"],
             {**CONTEXT, "N_sink": 5, "N_recent": 4, "chunk": 2, "overlap": 1}),
    ]),
    Group("PO-GLOBAL-BUDGET", [
        Case(303, "one pool for all sets", ["Plain"], {"values": HEADS, "protected": OPEN, "B": 4}),
        Case(304, "equal scores: the lower set, then the lower position", ["TieAtBoundary"],
             {"values": [[1.0, 2.0, 2.0, 0.0, 1.0, 1.0]] * 3, "protected": SINK, "B": 3}),
    ]),
    Group("PO-KVZIP", [
        Case(305, "two layers, one chunk", ["Plain"], {**rehearsed(25, 2, [[1, 8]], 4), "B": 5}),
        Case(306, "three chunks", ["Plain"], {**rehearsed(26, 1, [[1, 4], [4, 7], [7, 8]], 3), "B": 5}),
    ]),
    Group("PO-KVZIP-PLUS", [
        Case(307, "two layers, two chunks", ["Plain"],
             {**rehearsed(27, 2, [[1, 5], [5, 8]], 3), "B": 5, "v": numbers(30, 2, 2, 9, 2),
              "W_o": numbers(31, 2, 4, 2, 3), "norms": [[[1.0, 4.0, 0.5], [2.0, 1.0, 3.0]]] * 2}),
    ]),
    Group("PO-HEAD-SCORES", [
        Case(314, "the mean of three contexts' largest scores", ["Plain"],
             {"contexts": [[[0.5, 0.125], [0.25, 1.0]], [[0.25], [0.75]], [[0.0, 0.75, 0.5], [0.25, 0.125, 0.0]]]}),
    ]),
    Group("PO-FULL-HEADS", [
        Case(315, "two full heads, a rest that does not divide", ["Plain"],
             {"head_scores": [0.1, 0.9, 0.3, 0.8, 0.2], "n": 20, "B": 11, "window": 4}),
        Case(316, "equal scores: the lower head", ["TieAtBoundary"],
             {"head_scores": [0.5, 0.5, 0.5], "n": 10, "B": 6, "window": 2}),
        Case(317, "no full head", ["EmptyResult"], {"head_scores": [0.5, 0.25], "n": 30, "B": 9, "window": 4}),
        Case(318, "a budget above the tokens", ["NothingUnprotected"],
             {"head_scores": [0.5, 0.25], "n": 5, "B": 9, "window": 2}),
    ]),
    Group("PO-KVZIP-HEADS", [
        Case(319, "two layers of two heads", ["Plain"],
             {"head_scores": [[0.5, 0.25], [0.125, 0.75]], "n": 12, "B": 8, "N_sink": 2, "N_recent": 1}),
    ]),
    Group("PO-UNIFORM", [
        Case(292, "two blocks and a half", ["Plain"], {"seed": 1, "group": 2, "seen": 30, "n": 10}),
        Case(293, "a seed of 64 bits", ["Plain"], {"seed": 2**64 - 1, "group": 0, "seen": 4, "n": 4}),
    ]),
    Group("PO-EPICACHE", [
        Case(250, "every query sees every key", ["Plain"], {**seeded(15), "B": 4}),
        Case(360, "six of 15", ["Plain"], {**seeded(40, n=15), "B": 6}),
        Case(361, "two layers", ["Plain"], {**seeded(40, L=2, n=13), "B": 5}),
    ]),
    *(Group(brute.item, brute.vectors) for brute in brutes() if brute.vectors),
]
