"""TriAttention."""

from conformance.assurance.brute import numbers
from conformance.assurance.vector_writer.case import Case, Group

__all__ = ["GROUPS"]

MINE = {"model": "a", "inv_freq": [1.0, 0.5], "factor": 1.0}
HERE = {"served_model": "a", "served_inv_freq": [1.0, 0.5], "served_factor": 1.0}
ROWS = {"X": [[[[-3.0, -1.0, 1.0, 3.0], [3.0, 1.0, -1.0, -3.0]]], [[[0.0, 0.0, 4.0, 4.0], [1.0, 1.0, 1.0, 1.0]]]],
        "pinned": [False] * 4}
KEYS = {
    "k": numbers(6, 2, 2, 8, 4), "v": numbers(7, 2, 2, 8, 4), "B": 4, "inv_freq": [0.75, 0.125],
    "mean": numbers(8, 2, 4, 4), "magnitude": [[[3.0, 3.5]] * 4] * 2,
}

GROUPS = [
    Group("TA-STATISTICS", [
        Case(1, "channels f and f + d / 2 are a band: 3 + 4i and 5 + 12i", ["BandHalves"],
             {"q": [[[3.0, 5.0, 4.0, 12.0], [-3.0, 5.0, 4.0, -12.0]]]}),
        Case(2, "two heads, one query, one band", ["BandHalves"], {"q": [[[0.5, -2.0]], [[0.0, 0.0]]]}),
        Case(3, "queries that cancel: the mean is 0, the magnitude is not", ["Plain"],
             {"q": [[[1.0, 2.0, 2.0, 0.0], [-1.0, -2.0, -2.0, 0.0]]]}),
    ]),
    Group("TA-CALIBRATION", [
        Case(10, "the model and the rotation that it was taken from", ["Plain"], {**MINE, **HERE}),
        Case(11, "another model", ["Refused"], {**MINE, **HERE, "served_model": "b"}, refused="calibration"),
        Case(12, "another frequency", ["Refused"], {**MINE, **HERE, "served_inv_freq": [1.0, 0.25]},
             refused="calibration"),
        Case(13, "another factor", ["Refused"], {**MINE, **HERE, "served_factor": 1.25}, refused="calibration"),
    ]),
    Group("TA-SCORE", [
        Case(20, "without rotation: 2 x 3 x 1, and (4 - 2) x 3", ["Plain"],
             {"k": [[3.0, 0.0]], "positions": [5], "t": 9, "mean": [[2.0, 0.0]], "magnitude": [[4.0]],
              "inv_freq": [0.0], "factor": 1.0}),
        Case(21, "two bands, three positions with gaps, a factor", ["PositionCancels"],
             {"k": numbers(9, 3, 4), "positions": [0, 3, 11], "t": 12, "mean": numbers(10, 2, 4),
              "magnitude": [[3.0, 2.5], [2.75, 3.0]], "inv_freq": [1.0, 0.0625], "factor": 1.25}),
    ]),
    Group("TA-RANKING", [
        Case(30, "the largest of all rows", ["PopulationSigma"], {**ROWS, "mode": "global"}),
        Case(31, "a head's mean over the layers", ["PopulationSigma"], {**ROWS, "mode": "head"}),
        Case(32, "each head of each layer", ["PopulationSigma"], {**ROWS, "mode": "layer and head"}),
        Case(33, "a pinned token takes no part", ["ProtectedNotRead"],
             {**ROWS, "pinned": [True, True, False, False], "mode": "global"}),
    ]),
    Group("TA-POLICY", [
        Case(40, "one set for the cache", ["Plain"], {**KEYS, "mode": "global", "pin_prompt": 0}),
        Case(41, "the same for a head of every layer", ["HeadSharing"], {**KEYS, "mode": "head", "pin_prompt": 0}),
        Case(42, "a set for each head", ["HeadSharing"], {**KEYS, "mode": "layer and head", "pin_prompt": 0}),
        Case(43, "two pinned tokens inside the budget", ["ProtectedNotRead"],
             {**KEYS, "mode": "global", "pin_prompt": 2}),
        Case(44, "a pinned prompt above the budget", ["Refused"], {**KEYS, "mode": "global", "pin_prompt": 5},
             refused="pin_prompt"),
    ]),
]
