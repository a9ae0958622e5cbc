"""NestedKV."""

from conformance.assurance.brute import numbers
from conformance.assurance.vector_writer.case import Case, Group
from conformance.vectors.json_values import Json

__all__ = ["GROUPS"]

UNIT = [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, -1.0], [1.0, 0.0]]
SCALES = [[0.0, 0.25, 0.5, 1.0, 0.75], [0.0, 1.0, 0.5, 0.25, 0.75], [1.0, 0.0, 0.5, 0.5, 0.25]]
SMALL = {"b_min": 3, "b_max": 6, "blocks": 4, "W": 4, "N_sink": 2}


def keys(seed: int, H_kv: int, n: int, d: int = 4) -> Json:
    return numbers(seed, H_kv, n, d)


GROUPS = [
    Group("NK-UNIT-KEYS", [
        Case(1, "lengths 5, 13 and 1", ["Plain"], {"k": [[3.0, 4.0], [5.0, -12.0], [0.0, 1.0]]}),
        Case(2, "a zero key has no direction", ["Refused"], {"k": [[3.0, 4.0], [0.0, 0.0]]}, refused="k"),
    ]),
    Group("NK-STABLE", [
        Case(10, "the mean of five", ["Plain"], {"unit": UNIT}),
        Case(11, "one key", ["Plain"], {"unit": [[0.6, -0.8]]}),
        Case(12, "keys that cancel", ["Plain"], {"unit": [[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]]}),
    ]),
    Group("NK-EPISODIC", [
        Case(20, "blocks of two; the last has one token", ["ShortBlock"],
             {"unit": UNIT, "b_min": 2, "b_max": 2, "N": [5]}),
        Case(21, "the paper's clip: 128 up to 4127 tokens, 256 from 8192 on", ["ClipAtBounds"],
             {"unit": UNIT, "N": [4127, 4128, 6400, 8191, 8192, 32768]}),
    ]),
    Group("NK-CURRENT", [
        Case(30, "a window of three, shorter at the start, the token itself inside", ["Plain"],
             {"unit": UNIT, "W": 3}),
        Case(31, "longer than the prompt", ["OneChunk"], {"unit": UNIT, "W": 64}),
    ]),
    Group("NK-ANOMALY", [
        Case(40, "like, across, against", ["Plain"], {"unit": UNIT, "mu": [[0.5, 0.0]] * 5}),
        Case(41, "a memory without direction explains nothing", ["ZeroRange"],
             {"unit": UNIT[:2], "mu": [[0.0, 0.0], [0.0, 2.0**-17]]}),
    ]),
    Group("NK-MIN-MAX", [
        Case(50, "moved to [0, 1]", ["Plain"], {"a": [-1.0, 0.5, 1.0, -0.5]}),
        Case(51, "no range: zeros, also where rounding makes one", ["ZeroRange"], {"a": [-1.0, -1.0 + 2.0**-40, -1.0]}),
    ]),
    Group("NK-GAP", [
        Case(60, "two of five on either side", ["Plain"], {"a": SCALES, "p": "2/5"}),
        Case(61, "ten percent of five tokens is one", ["AtLeastOne"], {"a": SCALES, "p": "1/10"}),
    ]),
    Group("NK-BLEND", [
        Case(70, "the paper's prior", ["Plain"], {"a": SCALES, "delta": [1.0, 0.5, 0.25]}),
        Case(71, "equal gaps: the prior itself", ["Plain"], {"a": SCALES, "delta": [0.5, 0.5, 0.5]}),
    ]),
    Group("NK-SURPRISE", [
        Case(80, "normalised, then centred and cut at 0", ["RectifiedSurprise"], {"a": SCALES}),
        Case(81, "one token", ["ZeroRange"], {"a": [[0.0], [0.0], [0.0]]}),
    ]),
    Group("NK-ROUTE", [
        Case(90, "closed, half open, open", ["Plain"],
             {"a": SCALES, "blend": [0.25, 0.5, 0.5, 0.5, 0.75], "s": [0.0, 0.6, 0.0, 1.0, 0.3]}),
        Case(91, "one token", ["Plain"], {"a": [[0.5], [0.25], [1.0]], "blend": [0.625], "s": [1.0]}),
        Case(92, "on the threshold, next to it and beyond it", ["StrictThreshold"],
             {"a": [[0.0, 1.0, 0.5, 0.25]] * 3, "blend": [0.1, 0.2, 0.3, 0.4],
              "s": [0.5, 0.5 - 2.0**-54, 0.5 + 2.0**-53, 2.0**-1074]}),
    ]),
    Group("NK-SCORE", [
        Case(100, "one head, two blocks and a short one", ["Plain"], {"k": keys(3, 1, 8), **SMALL}),
        Case(101, "three heads of more channels", ["Plain"], {"k": keys(15, 3, 21, 6), **SMALL}),
        Case(102, "keys of one direction: every scale is 0", ["Plain"],
             {"k": [[[float(i), 0.0] for i in range(1, 9)]], **SMALL}),
    ]),
    Group("NK-NESTEDKV", [
        Case(110, "two layers of two heads", ["SinksInside"],
             {"k": [keys(4, 2, 12), keys(5, 2, 12)], "B": 6, "alpha_s": "1/2", **SMALL}),
        Case(111, "the paper's quota", ["SinksInside"], {"k": [keys(6, 3, 16)], "B": 10, **SMALL}),
        Case(112, "everything stays", ["NothingUnprotected"], {"k": [keys(7, 2, 5)], "B": 5, **SMALL}),
        Case(113, "a budget that cannot hold the sinks", ["Refused"], {"k": [keys(8, 2, 9)], "B": 1, **SMALL},
             refused="budget"),
    ]),
    Group("NK-TOKENS", [
        Case(120, "0.8 of ten go: two stay, where floats give one", ["DecimalFraction"], {"r": "0.8", "N": 10}),
        Case(121, "0.75 of 1001", ["Plain"], {"r": "0.75", "N": 1001}),
        Case(122, "nothing would stay", ["Refused"], {"r": "0.95", "N": 10}, refused="r"),
        Case(123, "all of it", ["Refused"], {"r": "1.0", "N": 10}, refused="r"),
    ]),
    Group("NK-ABLATIONS", [
        Case(130, "the four variants of Table 2", ["AblationForm"],
             {"k": [keys(9, 2, 14)], "B": 6, "alpha_s": "1/2", **SMALL}),
        Case(131, "two layers, all of the quota guarded", ["AblationForm"],
             {"k": [keys(16, 1, 17), keys(17, 1, 17)], "B": 9, "alpha_s": "1/1", **SMALL}),
        Case(132, "nothing is guarded", ["AblationForm"],
             {"k": [keys(18, 2, 12)], "B": 7, "alpha_s": "0/1", **SMALL}),
    ]),
    Group("anomaly_score", [
        Case(140, "two heads, blocks of three, windows of four", ["Plain"], {"k": keys(10, 2, 13), **SMALL}),
        Case(141, "the paper's constants: one block, one window", ["OneChunk"], {"k": keys(11, 1, 20)}),
        Case(142, "equal keys: zeros", ["ZeroRange"], {"k": [[[1.0, 0.0, 2.0]] * 7], **SMALL}),
        Case(143, "one key", ["ZeroRange"], {"k": [[[1.0, 0.0, 2.0]]], **SMALL}),
        Case(144, "a zero key", ["Refused"], {"k": [[[1.0, 0.0], [0.0, 0.0]]], **SMALL}, refused="k"),
    ]),
]
