"""Algorithm 2, and what it refuses."""

from typing import Any

from conformance.assurance.vector_writer.case import Case, Group
from conformance.assurance.vector_writer.cases.coattention import attending
from conformance.vectors.json_values import Json

__all__ = ["GROUPS"]

EVEN = {"C": 6, "k_intra": 0, "k_cross": 0, "T_max": 3, "N_sink": 1, "W_recent": 1, "N_min": 1}
HOT = {"C": 8, "k_intra": 2, "k_cross": 0, "T_max": 2, "N_sink": 1, "W_recent": 1, "N_min": 1, "M_min": 0.125}
IDS = [1, 2, 9, 3, 4, 9, 1, 1, 9, 1, 5, 9]


def prompt(S1: Json, token_ids: list[int], ends: list[int], budget: float | int | str) -> Json:
    given = {name: S1[name] for name in ("q", "k", "scaling", "softcap")}
    return {**given, "token_ids": token_ids, "sentence_ends": ends, "budget": budget,
            "positions": list(range(len(token_ids)))}


def even(n: int) -> Json:
    zeros = [[[0.0]] * n]
    return {"q": zeros, "k": zeros, "scaling": 1.0, "softcap": None}


def refused(tcId: int, argument: str, comment: str, **change: Any) -> Case:
    good = prompt(even(4), [0, 1, 2, 3], [2], 0.5)
    return Case(tcId, comment, ["Refused"], {**good, **change}, refused=argument)


# Query i attends the keys listed: 0 and 1 alike, 2 and 3 alike, 4 and 5 alike, 6 and 7 alike.
TOPICS = attending([[0], [0], [2], [2], [4], [4], [6], [6]])

GROUPS = [
    Group("prefill", [
        Case(1, "even attention, no edges: a partial trunk", ["Plain", "PartialKeepsBest"],
             prompt(even(12), IDS, [9], 0.8)),
        Case(2, "the same budget in tokens", ["OneToken"], prompt(even(12), IDS, [9], 10)),
        Case(3, "everything", ["OneToken"], prompt(even(12), IDS, [9], 1.0)),
        Case(4, "0.28 of 25 tokens are 7", ["DecimalFraction"], prompt(even(25), [*IDS, *IDS, 9], [9], 0.28)),
        Case(5, "B below the protected trunks", ["ProtectedAboveBudget"], prompt(even(12), IDS, [9], 2)),
    ], EVEN),
    Group("prefill", [
        Case(10, "pairs that attend alike: edges inside trunks only", ["Plain", "TieAtBoundary"],
             prompt(TOPICS, [0, 1, 0, 2, 0, 3, 4, 0], [9], 0.5)),
        Case(11, "renamed ids give the same result", ["TokenIds"],
             prompt(TOPICS, [70, 128000, 70, 5, 70, 6, 1, 70], [9], 0.5)),
    ], HOT),
    Group("prefill", [
        Case(12, "uniform impact keeps the lowest positions of the partial trunk", ["AblationForm"],
             prompt(even(12), IDS, [9], 0.8)),
    ], {**EVEN, "impact": "uniform"}),
    Group("prefill", [
        Case(13, "token level: no partial trunk", ["AblationForm"], prompt(even(12), IDS, [9], 0.5)),
    ], {**EVEN, "T_max": 1}),
    Group("prefill", [
        refused(20, "budget", "a bool as budget", budget=True),
        refused(21, "budget", "a share of nothing", budget=0.0),
        refused(22, "token_ids", "a negative id", token_ids=[0, -1, 2, 3]),
        refused(23, "token_ids", "fewer ids than keys", token_ids=[0, 1, 2]),
        refused(24, "token_ids", "one token is no segment", q=[[[0.0]]], k=[[[0.0]]], token_ids=[0], positions=[0]),
        refused(25, "sentence_ends", "no sentence end", sentence_ends=[]),
        refused(26, "q", "NaN in a query", q=[[[0.0], [float("nan")], [0.0], [0.0]]]),
        refused(27, "k", "an infinite key", k=[[[0.0], [float("inf")], [0.0], [0.0]]]),
        refused(28, "q", "three query heads on two KV heads", q=[[[0.0]] * 4] * 3, k=[[[0.0]] * 4] * 2),
        refused(29, "k", "another head dimension", k=[[[0.0, 0.0]] * 4]),
        refused(30, "scaling", "scaling 0", scaling=0.0),
        refused(31, "softcap", "a negative soft cap", softcap=-1.0),
    ]),
]
