"""Memory, the observed layer, and how a budget is written and read."""

from conformance.assurance.vector_writer.case import Case, Group
from conformance.vectors.json_values import Json

__all__ = ["GROUPS"]


def memory(L: int, H_kv: int, d: int, n: int, batch: int, b: int) -> Json:
    return {"L": L, "H_kv": H_kv, "d": d, "n": n, "batch": batch, "b": b}


def full_layers(i: int) -> Json:
    return {"full_layers": [1, 3, 5, 8], "i": i}


def asked(budget: float | int | str, seen: int) -> Json:
    return {"budget": budget, "seen": seen}


def refused(tcId: int, comment: str, budget: Json) -> Case:
    return Case(tcId, comment, ["Refused"], {"budget": budget, "seen": 10}, refused="budget")


GROUPS = [
    Group("CC-MEMORY", [
        Case(1, "Llama-3.1-8B at 131072 tokens in bf16: 16 GiB", ["Plain"], memory(32, 8, 128, 131072, 1, 2)),
        Case(2, "four sequences of a tiny model in float32", ["Plain"], memory(2, 2, 16, 10, 4, 4)),
    ]),
    Group("CC-BUDGET-FORMS", [
        Case(10, "half of 1001 tokens is 501: the ceiling", ["Plain"], asked(0.5, 1001)),
        Case(11, "0.28 of 25 is 7; the product in binary rounds up to 8", ["DecimalFraction"], asked(0.28, 25)),
        Case(12, "the same as text in percent", ["DecimalFraction"], asked("28%", 25)),
        Case(13, "the same as text", ["DecimalFraction"], asked("0.28", 25)),
        Case(14, "0.1 of 10 is 1; the double's exact value asks for 2", ["DecimalFraction"], asked(0.1, 10)),
        Case(15, "0.07 of 100 is 7; the product in binary rounds up to 8", ["DecimalFraction"], asked(0.07, 100)),
        Case(16, "1.0 is everything", ["OneToken"], asked(1.0, 40)),
        Case(17, "1 is one token", ["OneToken"], asked(1, 40)),
        Case(18, "digits alone are tokens", ["OneToken"], asked("1", 40)),
        Case(19, "100% is everything", ["OneToken"], asked("100%", 40)),
        Case(20, "a count may exceed what was seen", ["OneToken"], asked(512, 40)),
        Case(21, "spaces around a text say nothing", ["OneToken"], asked("  512 ", 40)),
        Case(22, "no digit before the point", ["DecimalFraction"], asked(".3", 10)),
        Case(23, "no digit behind the point: a share, not a count", ["OneToken"], asked("1.", 40)),
        Case(24, "a decimal in percent", ["DecimalFraction"], asked("12.5%", 25)),
        Case(25, "no digit behind the point, in percent", ["DecimalFraction"], asked("1.%", 1000)),
        Case(26, "64 characters are not too many", ["OneToken"], asked("0." + "1" * 62, 40)),
        refused(30, "a bool is no budget", True),
        refused(31, "no token", 0),
        refused(32, "a negative count", -3),
        refused(33, "no share", 0.0),
        refused(34, "a share above 1", 1.5),
        refused(35, "a share above 1, as text", "1.5"),
        refused(36, "a share above 1, in percent", "200%"),
        refused(37, "a word", "half"),
        refused(38, "no text", ""),
        refused(39, "nothing", None),
        refused(40, "an infinite share", float("inf")),
        refused(41, "not a number", float("nan")),
        refused(42, "digits that are not ASCII's", "\u0660.\u0663"),
        refused(43, "an exponent", "1e-1"),
        refused(44, "a sign", "+1"),
        refused(45, "two percent signs", "50%%"),
        refused(46, "a count beyond int64", "9223372036854775808"),
        refused(47, "text of more than 64 characters", "0." + "1" * 63),
    ]),
    Group("CC-BUDGET", [
        Case(50, "the share is above the floor of 132", ["Plain"], {"budget": 0.5, "n": 1000}),
        Case(51, "the floor of 132 is above the share", ["FloorOfBudget"], {"budget": 0.3, "n": 200}),
        Case(52, "the floor applies to a count too", ["FloorOfBudget"], {"budget": 16, "n": 1000}),
        Case(53, "B exceeds n", ["FloorOfBudget"], {"budget": 1.0, "n": 40}),
        Case(54, "share and floor are equal", ["FloorOfBudget"], {"budget": "50%", "n": 264}),
    ]),
    Group("CC-BUDGET", [
        Case(60, "without sink and window B is the budget alone", ["FloorOfBudget", "DecimalFraction"],
             {"budget": 0.28, "n": 25}),
    ], {"N_sink": 0, "W_recent": 0}),
    Group("CC-OBSERVED-LAYER", [
        Case(3, "the first is the paper's", ["Plain"], full_layers(0)),
        Case(4, "full-attention layers are counted, no others", ["Plain"], full_layers(2)),
        Case(5, "from the last", ["Plain"], full_layers(-3)),
        Case(6, "none as far from the first", ["Refused"], full_layers(4), refused="observed_layer"),
        Case(7, "none as far from the last", ["Refused"], full_layers(-5), refused="observed_layer"),
    ]),
]
