"""The published policies and their parts."""

from conformance.assurance.vector_writer.case import Case, Group
from conformance.vectors.json_values import Json

__all__ = ["GROUPS"]


def numbers(seed: int, *shape: int) -> Json:
    """Nested lists of multiples of 1/16 in (-2, 2), no two rows alike."""
    if len(shape) == 1:
        return [((seed * 37 + at * 11 + (seed + at) ** 2 * 7) % 61 - 30) / 16 for at in range(shape[0])]
    return [numbers(seed * 5 + at + 1, *shape[1:]) for at in range(shape[0])]


def inputs(seed: int, L: int = 1, H: int = 4, H_kv: int = 2, n: int = 10, d: int = 2) -> dict[str, Json]:
    return {
        "q": numbers(seed, L, H, n, d), "k": numbers(seed + 1, L, H_kv, n, d), "v": numbers(seed + 2, L, H_kv, n, d),
        "scaling": 0.75,
    }


OPEN = [False] * 6
SINK = [True, *[False] * 5]
HEADS = [[9.0, 8.0, 7.0, 6.0, 5.0, 4.0], [3.0, 3.0, 1.0, 0.0, 0.0, 0.0]]
UNIFORM = {"q": [[[[0.0], [0.0]]]], "k": [[[[1.0], [3.0]]]], "v": [[[[1.0], [1.0]]]], "scaling": 1.0}
MODES = {"W": 2, "kernel": 3}
WIDE = {"W": 3, "kernel": 5}

CONTEXT = {"token_ids": [50, 51, 52, 53, 54, 55, 56, 57, 58], "template": [[1, 2], [3], [4, 5]]}


def rehearsed(seed: int, L: int, chunks: list[Json], r: int, H: int = 4) -> dict[str, Json]:
    """Nine tokens, the first and the last of which are protected."""
    return {
        "k": numbers(seed, L, 2, 9, 2), "scaling": 0.75, "N_sink": 1, "N_recent": 1, "chunks": chunks,
        "repeat_q": numbers(seed + 1, len(chunks), L, H, r, 2), "repeat_k": numbers(seed + 2, len(chunks), L, 2, r, 2),
    }


GROUPS = [
    Group("PO-RETAIN", [
        Case(1, "a layer of two heads keeps B tokens in each", ["Plain"], {**inputs(1), "B": 4}),
        Case(2, "a budget above the tokens seen keeps all", ["NothingUnprotected"], {**inputs(1), "B": 99}),
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
    Group("PO-H2O", [
        Case(130, "newest two, heaviest three", ["Plain"], {**inputs(3), "B": 5}),
        Case(328, "four of 15 by their sums", ["Plain"], {**inputs(40, n=15), "B": 7}),
        Case(329, "three query heads on each KV head", ["HeadSharing"], {**inputs(40, H=6, n=18), "B": 9}),
    ]),
    Group("PO-H2O-DESCRIBED", [
        Case(131, "a window of three", ["Plain"], {**inputs(3), "B": 5, "W": 3}),
        Case(330, "a window of two", ["Plain"], {**inputs(40, n=15), "B": 7, "W": 2}),
        Case(331, "three query heads on each KV head", ["HeadSharing"], {**inputs(40, H=6, n=18), "B": 9, "W": 3}),
    ]),
    Group("PO-SNAPKV", [
        Case(140, "a window of two, a pool of three", ["HeadSharing"], {**inputs(4), "B": 5, **MODES}),
        Case(320, "a pool of three, with neighbours that tie", ["PoolBeforeWindow", "TieAtBoundary"],
             {**inputs(55, n=14), "B": 6, "W": 3, "kernel": 3}),
        Case(321, "a pool of five", ["PoolBeforeWindow", "TieAtBoundary"],
             {**inputs(41, n=16), "B": 8, "W": 4, "kernel": 5}),
        Case(322, "three query heads on each KV head", ["HeadSharing", "PoolBeforeWindow", "TieAtBoundary"],
             {**inputs(49, H=6, n=18), "B": 8, "W": 4, "kernel": 5}),
        Case(323, "four query heads on one KV head", ["HeadSharing", "PoolBeforeWindow", "TieAtBoundary"],
             {**inputs(48, H_kv=1, n=15), "B": 7, "W": 3, "kernel": 3}),
        Case(324, "the queries of the window do not see the keys after them", ["CausalByPosition", "TieAtBoundary"],
             {**inputs(59, H=2, H_kv=1, n=20), "B": 9, "W": 5, "kernel": 3}),
        Case(325, "a pool of seven on ten tokens", ["PoolBeforeWindow", "TieAtBoundary"],
             {**inputs(53, H=2, n=12), "B": 5, "W": 2, "kernel": 7}),
        Case(326, "a query head for each KV head", ["CausalByPosition", "TieAtBoundary"],
             {**inputs(56, H=3, H_kv=3, n=16), "B": 7, "W": 4, "kernel": 3}),
        Case(327, "a pool of seven on 18 tokens", ["PoolBeforeWindow", "TieAtBoundary"],
             {**inputs(42, H=8, n=24), "B": 12, "W": 6, "kernel": 7}),
    ]),
    Group("PO-PYRAMIDKV", [
        Case(150, "three layers", ["Plain"], {**inputs(5, L=3, H=2, H_kv=1), "B": 5, "beta": 20, **MODES}),
        Case(332, "three layers of two heads", ["HeadSharing"], {**inputs(40, L=3, n=16), "B": 6, "beta": 20, **MODES}),
        Case(333, "four layers on a flatter line", ["Plain"],
             {**inputs(40, L=4, H=2, H_kv=1, n=14), "B": 7, "beta": 4, **WIDE}),
    ]),
    Group("PO-PYRAMIDKV-DESCRIBED", [
        Case(151, "three layers", ["Plain"], {**inputs(5, L=3, H=2, H_kv=1), "B": 5, "beta": 20, "W": 2}),
        Case(334, "three layers of two heads", ["HeadSharing"], {**inputs(40, L=3, n=16), "B": 6, "beta": 20, "W": 2}),
        Case(335, "four layers on a flatter line", ["Plain"],
             {**inputs(40, L=4, H=2, H_kv=1, n=14), "B": 7, "beta": 4, "W": 3}),
    ]),
    Group("PO-CHUNKKV", [
        Case(160, "chunks of three before a window of two", ["PartialKeepsBest"],
             {**inputs(6), "B": 6, "c": 3, "W": 2}),
        Case(336, "the third chunk ends at the window", ["PartialKeepsBest"],
             {**inputs(40, n=17), "B": 8, "c": 3, "W": 3}),
        Case(337, "two layers, a last chunk of one", ["PartialKeepsBest"],
             {**inputs(40, n=19, L=2), "B": 9, "c": 4, "W": 2}),
    ]),
    Group("PO-CHUNKKV-DESCRIBED", [
        Case(161, "chunks of three", ["PartialKeepsBest"], {**inputs(6), "B": 5, "c": 3}),
        Case(338, "a last chunk of two", ["PartialKeepsBest"], {**inputs(40, n=17), "B": 7, "c": 3}),
        Case(339, "two layers", ["PartialKeepsBest"], {**inputs(40, n=19, L=2), "B": 9, "c": 4}),
    ]),
    Group("PO-TOVA", [
        Case(170, "one set for the layer", ["Plain"], {**inputs(7), "B": 4}),
        Case(340, "six of 15", ["Plain"], {**inputs(40, n=15), "B": 6}),
        Case(341, "two layers, three query heads on each KV head", ["HeadSharing"],
             {**inputs(40, L=2, H=6, n=13), "B": 5}),
    ]),
    Group("PO-KEYDIFF", [
        Case(180, "a set for each head", ["Plain"], {**inputs(8), "B": 4}),
        Case(342, "six of 15", ["Plain"], {**inputs(40, n=15), "B": 6}),
        Case(343, "two layers", ["Plain"], {**inputs(40, L=2, n=13), "B": 5}),
    ]),
    Group("PO-KNORM", [
        Case(190, "small keys stay", ["Plain"], {**inputs(9), "B": 4}),
        Case(344, "six of 15", ["Plain"], {**inputs(40, n=15), "B": 6}),
        Case(345, "two layers", ["Plain"], {**inputs(40, L=2, n=13), "B": 5}),
    ]),
    Group("PO-LAGKV", [
        Case(260, "two partitions of three are ranked, two tokens follow the last", ["Plain"],
             {**inputs(16, n=13), "B": 8, "N_sink": 2, "lag": 3}),
        Case(261, "a budget below the unranked end keeps the newest", ["TieAtBoundary"],
             {**inputs(17, n=13), "B": 4, "N_sink": 2, "lag": 3}),
        Case(262, "keys and values are constant: no channel has a range, and positions decide", ["TieAtBoundary"],
             {**inputs(18, H=1, H_kv=1), "k": [[[[0.5, -1.0]] * 10]], "v": [[[[0.25, 2.0]] * 10]], "B": 6, "N_sink": 1,
              "lag": 3}),
    ]),
    Group("PO-EXPECTED-ATTENTION", [
        Case(200, "two sinks, four positions ahead", ["Plain"],
             {**inputs(10), "B": 5, "inv_freq": [0.5], "N_sink": 2, "N_future": 4}),
        Case(346, "two pairs of channels", ["Plain"],
             {**inputs(47, n=15, d=4), "B": 6, "inv_freq": [1.0, 0.25], "N_sink": 1, "N_future": 3}),
        Case(347, "three query heads on each KV head", ["HeadSharing"],
             {**inputs(49, H=6, n=13), "B": 6, "inv_freq": [0.5], "N_sink": 2, "N_future": 6}),
    ]),
    Group("PO-ADAKV", [
        Case(210, "two heads share a layer", ["Plain"], {**inputs(11), "B": 5, "safeguard": "1/5", **MODES}),
        Case(348, "nine and three of 15", ["Plain"], {**inputs(40, n=15), "B": 6, "safeguard": "1/5", **MODES}),
        Case(349, "three heads share a layer, half of it for each alone", ["HeadSharing"],
             {**inputs(40, H=6, H_kv=3, n=14), "B": 7, "safeguard": "1/2", **WIDE}),
    ]),
    Group("PO-RKV", [
        Case(220, "a window of two", ["Plain"], {**inputs(12), "B": 5, "lam": 0.1, **MODES}),
        Case(350, "six of 15", ["Plain"], {**inputs(40, n=15), "B": 6, "lam": 0.1, **MODES}),
        Case(351, "redundancy counts as much as importance", ["Plain"],
             {**inputs(54, n=14), "B": 7, "lam": 0.5, **WIDE}),
    ]),
    Group("PO-CAOTE", [
        Case(230, "values decide", ["Plain"], {**inputs(13), "B": 4}),
        Case(352, "six of 15", ["Plain"], {**inputs(46, n=15), "B": 6}),
        Case(353, "two layers", ["Plain"], {**inputs(42, L=2, n=13), "B": 5}),
    ]),
    Group("PO-DEFENSIVEKV", [
        Case(240, "two heads share a layer", ["Plain"], {**inputs(14), "B": 5, "W_o": numbers(2, 4, 2, 3), **MODES}),
        Case(354, "six of 15", ["Plain"], {**inputs(41, n=15), "B": 6, "W_o": numbers(48, 4, 2, 3), **MODES}),
        Case(355, "a pool of five", ["Plain"], {**inputs(47, n=14), "B": 7, "W_o": numbers(56, 4, 2, 3), **WIDE}),
    ]),
    Group("PO-VATP", [
        Case(270, "two sinks, half of six recent", ["Plain"], {**inputs(19), "B": 6, "N_sink": 2}),
        Case(356, "one sink", ["Plain"], {**inputs(54, n=15), "B": 7, "N_sink": 1}),
        Case(357, "three query heads on each KV head", ["HeadSharing"], {**inputs(44, H=6, n=18), "B": 8, "N_sink": 2}),
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
        Case(277, "a window of two holds the last blocks", ["Plain"], {**inputs(21), "B": 8, "b": 3, **MODES}),
        Case(278, "a budget below one block is one block", ["Plain"], {**inputs(22, n=9), "B": 2, "b": 3, **MODES}),
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
    Group("PO-KVCRUSH", [
        Case(312, "two layers of two heads, a window of two", ["Plain"],
             {**inputs(28, L=2, n=13), "B": 8, "b": 2, "share": "1/2", "anchor": "alternating", **MODES}),
        Case(313, "a budget below one block is one block", ["Plain"],
             {**inputs(29, n=11), "B": 2, "b": 3, "share": "1/2", "anchor": "mean", **MODES}),
    ]),
    Group("PO-CRITICALKV", [
        Case(273, "two heads, a window of two", ["Plain"],
             {**inputs(20), "B": 6, "W_o": numbers(3, 4, 2, 3), **MODES}),
        Case(358, "seven of 15", ["Plain"], {**inputs(40, n=15), "B": 7, "W_o": numbers(47, 4, 2, 3), **MODES}),
        Case(359, "a pool of five", ["Plain"], {**inputs(40, n=14), "B": 8, "W_o": numbers(49, 4, 2, 3), **WIDE}),
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
    Group("PO-MORPHKV", [
        Case(290, "the sum over two recent queries", ["Plain"], {**inputs(23), "B": 5, "W": 2, "fusion": "sum"}),
        Case(291, "the largest of four", ["Plain"], {**inputs(24), "B": 7, "W": 4, "fusion": "max"}),
    ]),
    Group("PO-UNIFORM", [
        Case(292, "two blocks and a half", ["Plain"], {"seed": 1, "group": 2, "seen": 30, "n": 10}),
        Case(293, "a seed of 64 bits", ["Plain"], {"seed": 2**64 - 1, "group": 0, "seen": 4, "n": 4}),
    ]),
    Group("PO-VASE", [
        Case(294, "two heads draw different numbers", ["Plain"],
             {**inputs(25, n=12), "B": 8, "N_sink": 1, "share": "1/2", "seed": 3, **MODES}),
        Case(295, "no places but for wide values", ["Plain"],
             {**inputs(26, n=12), "B": 8, "N_sink": 1, "share": "1", "seed": 3, **MODES}),
    ]),
    Group("PO-CAKE", [
        Case(283, "three layers", ["Plain"],
             {**inputs(21, L=3), "B": 5, "gamma": 200.0, "tau1": 1.0, "tau2": 1.0, **MODES}),
        Case(284, "temperatures", ["Plain"],
             {**inputs(22, L=2), "B": 6, "gamma": 8.0, "tau1": 2.0, "tau2": 0.5, **MODES}),
    ]),
    Group("PO-EPICACHE", [
        Case(250, "every query sees every key", ["Plain"], {**inputs(15), "B": 4}),
        Case(360, "six of 15", ["Plain"], {**inputs(40, n=15), "B": 6}),
        Case(361, "two layers", ["Plain"], {**inputs(40, L=2, n=13), "B": 5}),
    ]),
]
