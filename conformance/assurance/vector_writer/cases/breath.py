"""Decode: key norms, activation, pulses, Hebbian growth, decay, the tail, breaths and later segments."""

from typing import Any

from conformance.assurance.vector_writer.case import Case, Group
from conformance.vectors.example_state import CHAIN, WAITING, state
from conformance.vectors.json_values import Json

__all__ = ["GROUPS"]

INF = float("inf")
NO_EDGES: Json = {"indptr": [0, 0, 0, 0], "indices": [], "weights": []}


def new() -> dict[str, Any]:
    """Nothing seen yet."""
    empty: list[Json] = []
    return {
        "budget": 8, "seen": 0, "step": 0, "positions": empty, "offsets": [0], "impact": empty,
        "inverse_norms": empty, "trunk_impact": empty, "D": empty, "indptr": [0], "indices": empty,
        "weights": empty, "ids": empty, "counts": empty, "mu": 0.0, "sigma": 1.0, "tail_ids": empty,
        "tail_inverse_norms": empty,
    }


TIGHT = {"N_sink": 0, "W_recent": 0, "N_min": 1}


def one_hot(rows: list[int], d: int) -> Json:
    """One head whose rows point at these keys alone: weights are 0 and 1 in every precision."""
    return [[[2048.0 if c == row else 0.0 for c in range(d)] for row in rows]]


def unit(d: int) -> Json:
    return [[[1.0 if c == row else 0.0 for c in range(d)] for row in range(d)]]


def turn(before: dict[str, Any], targets: list[int], ids: list[int]) -> dict[str, Any]:
    """A segment each of whose queries reads one of the stored keys or of its own."""
    stored = len(before["positions"]) + len(before["tail_ids"])
    d = stored + len(ids)
    return {**before, "q": one_hot(targets, d), "k": unit(d), "token_ids": ids, "sentence_ends": [7], "scaling": 1.0}


GROUPS = [
    Group("inverse_key_norms", [
        Case(1, "two heads: the mean of the inverses", ["MeanOfInverses"],
             {"k": [[[3.0, 4.0], [1.0, 0.0]], [[0.0, 2.0], [0.0, 0.5]]]}),
        Case(2, "a zero key in one head", ["ZeroKey"], {"k": [[[0.0, 0.0], [2.0, 0.0]], [[1.0, 0.0], [4.0, 0.0]]]}),
    ]),
    Group("CC-ETA", [
        Case(10, "a zero key has eta 1 and is no maximum", ["ZeroKey"], {"inverse_norms": [0.25, 0.5, INF]}),
        Case(11, "zero keys alone", ["ZeroKey"], {"inverse_norms": [INF, INF]}),
        Case(12, "no token", ["EmptyResult"], {"inverse_norms": []}),
    ]),
    Group("activation", [
        Case(20, "half of the members is not enough", ["MoreThanHalf"],
             {"offsets": [0, 2, 5], "inverse_norms": [1.0, 0.125, 1.0, 0.5, 0.125]}),
        Case(21, "single tokens, one of them a zero key", ["ZeroKey"],
             {"offsets": [0, 1, 2, 3], "inverse_norms": [0.125, INF, 0.5]}),
    ]),
    Group("activation", [
        Case(22, "eta equal to the threshold", ["StrictThreshold"],
             {"offsets": [0, 1, 2], "inverse_norms": [1.0, 0.5]}),
    ], {"theta_act": 0.5}),
    Group("CC-PULSE", [
        Case(30, "a chain: two hops, each through its weight", ["Plain"], {"source": 0, **CHAIN}),
        Case(31, "an isolated source still receives 1", ["SourceReceives"], {"source": 1, **NO_EDGES}),
        Case(32, "two ways in at the second hop: the stronger one", ["StrongestParent"],
             {"source": 0, "indptr": [0, 2, 4, 6, 8], "indices": [1, 2, 0, 3, 0, 3, 1, 2],
              "weights": [0.75, 0.5, 0.75, 0.5, 0.5, 1.0, 0.5, 1.0]}),
        Case(33, "a neighbour of a neighbour that was reached before is not reached again", ["VisitedSet"],
             {"source": 0, "indptr": [0, 2, 4, 6], "indices": [1, 2, 0, 2, 0, 1],
              "weights": [0.25, 1.0, 0.25, 1.0, 1.0, 1.0]}),
    ]),
    Group("CC-PULSE", [
        Case(34, "a pulse equal to tau_pulse is delivered, one below is not", ["StrictThreshold"],
             {"source": 0, "indptr": [0, 2, 3, 4], "indices": [1, 2, 0, 0], "weights": [0.5, 0.25, 0.5, 0.25]}),
    ], {"tau_pulse": 0.25}),
    Group("CC-PULSE", [
        Case(35, "no hop: the source alone", ["SourceReceives"], {"source": 0, **CHAIN}),
    ], {"max_hops": 0}),
    Group("CC-RAISE", [
        Case(40, "a share of what is missing", ["Plain"], {"D": [0.5, 0.25, 0.0], "pulse": [1.0, 0.5, 0.0]}),
        Case(41, "D = 1 stays", ["Plain"], {"D": [1.0, 0.0], "pulse": [1.0, 1.0]}),
    ], {"alpha_res": 0.5}),
    Group("resonance", [
        Case(50, "two sources: once for each pulse", ["OncePerPulse"],
             {"D": [0.5, 0.25, 0.75], **CHAIN, "active": [True, False, True]}),
        Case(51, "nothing active: D as it was", ["EmptyResult"],
             {"D": [0.5, 0.25, 0.75], **CHAIN, "active": [False, False, False]}),
    ], {"alpha_res": 0.5}),
    Group("hebbian", [
        Case(60, "both ends active: growth; elsewhere decay, and a prune", ["PruneAfterUpdate"],
             {"indptr": [0, 2, 4, 6], "indices": [1, 2, 0, 2, 0, 1],
              "weights": [0.5, 0.0625, 0.5, 0.25, 0.0625, 0.25], "active": [True, True, False]}),
        Case(61, "no edge is made between active trunks", ["NoNewEdge"],
             {"indptr": [0, 0, 0], "indices": [], "weights": [], "active": [True, True]}),
        Case(62, "a weight above 1 falls to 1", ["CapAtOne"],
             {"indptr": [0, 1, 2], "indices": [1, 0], "weights": [1.25, 1.25], "active": [True, True]}),
        Case(63, "a weight that decays to tau_edge is pruned", ["StrictThreshold"],
             {"indptr": [0, 1, 2], "indices": [1, 0], "weights": [0.25, 0.25], "active": [False, True]}),
    ], {"eta_Hebb": 0.25, "gamma_decay": 0.5, "tau_edge": 0.125}),
    Group("hebbian", [
        Case(64, "the static graph stays, above 1 too", ["AblationForm"],
             {"indptr": [0, 1, 2], "indices": [1, 0], "weights": [1.25, 1.25], "active": [True, True]}),
    ], {"hebb": "static"}),
    Group("decay", [
        Case(70, "strong trunks fade slowly, 0 stays 0", ["Plain"],
             {"D": [0.5, 0.5, 1.0, 0.0], "trunk_impact": [0.0, 8.0, 16.0, 1.0]}),
        Case(71, "no trunk", ["EmptyResult"], {"D": [], "trunk_impact": []}),
        Case(72, "subnormal values, and the least and greatest impact", ["Plain"],
             {"D": [2.0**-1074, 2.0**-1022, 1.0 - 2.0**-53, 2.0**-60], "trunk_impact": [0.0, 16.0, 15.0, 2.0**-52]}),
    ]),
    Group("CC-SEEN-COUNT", [
        Case(80, "evicted tokens count, and new ids find their place", ["SeenCounts"],
             {"ids": [2, 5], "counts": [3, 1], "new": [5, 9, 0, 9]}),
        Case(81, "nothing seen before", ["EmptyResult"], {"ids": [], "counts": [], "new": [4, 4]}),
    ]),
    Group("CC-TAIL", [
        Case(90, "the tail and both counters go on", ["Plain"],
             {**state(**WAITING), "token_id": 9, "inverse_norm": 0.25}),
        Case(91, "the first token of a cache without a prompt", ["EmptyResult"],
             {**new(), "token_id": 0, "inverse_norm": INF}),
        Case(92, "an id that was seen, far beyond 32 bits", ["TokenIds"],
             {**state(**WAITING), "token_id": 2**40, "inverse_norm": 2.0**-1074}),
    ]),
    Group("CC-TAIL-D", [
        Case(95, "Eq. 27 at degree 0", ["Plain"], {"mu": 0.5, "sigma": 0.25}),
        Case(96, "nothing prefilled: one half", ["EmptyResult"], {"mu": 0.0, "sigma": 1.0}),
    ]),
    Group("CC-TAIL-D", [Case(97, "the ablation D = 0", ["AblationForm"], {"mu": 0.5, "sigma": 0.25})],
          {"graph": "zero"}),
    Group("CC-TAIL-TRUNKS", [
        Case(100, "an end inside the tail; the cut ends the rest", ["TailSentences"],
             {**state(**WAITING), "sentence_ends": [2]}),
        Case(101, "no tail: nothing changes", ["EmptyResult"], {**state(), "sentence_ends": [2]}),
        Case(102, "the first tokens of a sequence", ["EmptyResult"],
             {**new(), "seen": 2, "step": 2, "tail_ids": [4, 4], "tail_inverse_norms": [1.0, 0.5],
              "sentence_ends": [7]}),
    ]),
    Group("CC-TAIL-TRUNKS", [
        Case(103, "a tail longer than T_max is split, larger pieces first", ["TailSentences"],
             {**state(**WAITING), "sentence_ends": [7]}),
    ], {"T_max": 2}),
    Group("CC-CHUNK-TRUNKS", [
        Case(104, "a tail, then a chunk of which a token in the middle is gone", ["TailSentences", "SeenCounts"],
             {**state(tail_ids=[3], tail_inverse_norms=[0.5], seen=12, step=1), "token_ids": [5, 5, 2, 3],
              "kept": [0, 2, 3], "chunk_inverse_norms": [0.25, 1.0, INF], "sentence_ends": [2]}),
        Case(105, "a session begins with a chunk", ["EmptyResult"],
             {**new(), "token_ids": [4, 2, 4], "kept": [0, 1, 2], "chunk_inverse_norms": [1.0, 0.5, 0.25],
              "sentence_ends": [2]}),
        Case(106, "a sentence of which nothing is stored is no trunk", ["DeadTrunks"],
             {**state(), "token_ids": [4, 2, 3, 3], "kept": [2], "chunk_inverse_norms": [1.0], "sentence_ends": [2]}),
    ]),
    Group("CC-START", [
        Case(110, "twelve tokens, uniform attention: what lives, and counts of all", ["SeenCounts", "DeadTrunks"],
             {"q": [[[0.0]] * 12], "k": [[[float(i + 1)] for i in range(12)]],
              "token_ids": [1, 2, 9, 3, 4, 9, 1, 1, 9, 1, 5, 9], "sentence_ends": [9], "budget": 8, "scaling": 1.0}),
        Case(111, "two tokens, of one id", ["SentenceRuns"],
             {"q": [[[1.0], [1.0]]], "k": [[[2.0], [0.0]]], "token_ids": [9, 9], "sentence_ends": [9], "budget": 8,
              "scaling": 0.5}),
        Case(112, "no sentence ends: pieces of T_max; nothing is evicted", ["Plain"],
             {"q": [[[0.0]] * 7], "k": [[[float(7 - i)] for i in range(7)]], "token_ids": [5, 5, 5, 5, 5, 5, 5],
              "sentence_ends": [9], "budget": 7, "scaling": 1.0}),
    ], {"C": 6, "k_intra": 0, "k_cross": 0, "T_max": 3, "N_sink": 1, "W_recent": 1, "N_min": 1}),
    Group("CC-LIVE", [
        Case(120, "a trunk dies: its edges go, later trunks are renumbered", ["DeadTrunks"],
             {**state(), "slots": [0, 2, 6, 7], "D_after": [0.25, 0.0, 0.75]}),
        Case(121, "all stay", ["Plain"], {**state(), "slots": list(range(8)), "D_after": [0.5, 0.25, 0.75]}),
    ]),
    Group("CC-LIVE-PROTECTED", [
        Case(130, "what is left of a trunk counts, not where it began", ["LiveMembers"],
             {"positions": [3, 4, 5, 8, 9, 10, 11], "offsets": [0, 2, 4, 7], "seen": 12}),
    ], {"N_sink": 4, "W_recent": 3}),
    Group("CC-LIVE-PROTECTED", [
        Case(131, "no window", ["EmptyResult"], {"positions": [0, 1], "offsets": [0, 1, 2], "seen": 2}),
    ], {"N_sink": 0, "W_recent": 0}),
    Group("CC-BREATH-PROTECTED", [Case(135, "the paper protects nobody", ["ProtectionForm"], state())]),
    Group("CC-BREATH-PROTECTED", [Case(136, "sink and recent window", ["ProtectionForm"], state())],
          {"breath_protection": "sink+recent", "N_sink": 1, "W_recent": 1}),
    Group("CC-REEVICT", [
        Case(140, "a count is what stays", ["Plain"],
             {**state(budget=6), "protected": [False, False, False]}),
        Case(141, "a fraction is of the tokens seen, not of the live ones", ["BudgetOfSeen"],
             {**state(budget="0.5"), "protected": [False, False, False]}),
        Case(142, "the protected stay above the budget", ["ProtectedAboveBudget"],
             {**state(budget=2), "protected": [True, False, False]}),
    ], TIGHT),
    Group("CC-BREATH", [
        Case(150, "everything in one: pulses, growth, a tail, an eviction", ["BreathOrder"],
             {**state(**WAITING), "sentence_ends": [2]}),
        Case(151, "only a tail", ["EmptyResult"],
             {**new(), "seen": 2, "step": 2, "tail_ids": [4, 5], "tail_inverse_norms": [1.0, 0.5],
              "sentence_ends": [7]}),
    ], TIGHT),
    Group("decode_step", [
        Case(160, "between breaths: D fades, the tail grows", ["Plain"],
             {**state(), "token_id": 5, "inverse_norm": 0.5, "sentence_ends": [2]}),
        Case(161, "the fourth step breathes after the decay", ["BreathOrder"],
             {**state(**WAITING), "token_id": 5, "inverse_norm": 0.5, "sentence_ends": [2]}),
    ], {**TIGHT, "T_breath": 4}),
    Group("segment_graph", [
        Case(170, "a cross edge to a trunk with gaps, sized by its live tokens", ["LiveMembers", "LaterSegment"],
             {"bounds": [0, 5, 11, 13, 14], "sizes": [2, 4, 2, 1], "indptr": [0, 1, 2], "indices": [1, 0],
              "weights": [0.5, 0.5], "edges": [[11, 12, 1.0], [13, 12, 0.5], [2, 11, 0.5], [9, 13, 1.0]]}),
        Case(171, "no older trunk", ["EmptyResult"],
             {"bounds": [0, 1, 3], "sizes": [1, 2], "indptr": [0], "indices": [], "weights": [],
              "edges": [[0, 1, 0.5]]}),
    ]),
    Group("segment_crystallization", [
        Case(180, "mu and sigma of all, D of the new", ["LaterSegment"], {"degree": [0.0, 1.0, 2.0], "old": 2}),
        Case(181, "equal degrees", ["Plain"], {"degree": [1.0, 1.0], "old": 1}),
    ]),
    Group("extend", [
        Case(190, "a turn that reads an old trunk; one of its sentences ends", ["LaterSegment"],
             turn(state(budget=14), [3, 9, 10, 9], [3, 7, 5, 5])),
        Case(191, "a turn that reads the tail: it is trunked first", ["TailFirst"],
             turn(state(budget=17, **WAITING), [8, 9, 13, 13], [3, 7, 5, 5])),
        Case(192, "the first segment is a prefill", ["Plain"], turn(new(), [0, 0, 2, 2], [3, 7, 5, 5])),
    ], {"C": 2, "M_min": 0.125, "N_sink": 1, "W_recent": 2, "N_min": 1}),
]
