"""Random inputs of items, with the parameters that matter, as in spec/vectors. The inputs include edge cases.

Tenths do not add up exactly, so the order of summation matters. Few values are different, so that many of them tie.
"""

from collections.abc import Callable, Mapping
from fractions import Fraction
from itertools import accumulate
from random import Random
from typing import Any, TypeAlias

import numpy as np

__all__ = ["ITEMS", "LARGEST", "TEXTS", "few_values", "flags"]

Json: TypeAlias = Any

FAR = 2**62
"""First position of a range with positions that neither a float nor an OCaml machine word can represent."""
LARGEST = 2**63 - 1
FEW = (0.0, 0.1, 0.2, 0.3, 0.6, 0.7)
TEXTS = (
    "15", " 15 ", "0.5364229131356656", "1", "1.", "1.0", "1.%", "100%", "100.%", "101%", "100.000001%", ".5", "5.%",
    ".%", ".", "%", "", "0", "0.0", "0%", "00512", "0.28", "1.0000000001", "3 4", "5 %", "%5", "1e-3", "+5", "-1",
    "0x10", "1_0", "2/", "2:", "\u0663", "5\t", "\n5", "0..5", "0.5%%", str(LARGEST), str(LARGEST + 1), "9" * 64,
    "0." + "3" * 61, "0." + "3" * 62, "0." + "3" * 63, " " * 61 + "0.5", " " * 62 + "0.5", "0" * 63 + "7",
    "0" * 64 + "7",
)
"""Edge cases of the grammar of CC-BUDGET-FORMS, of its 64 characters, and of its counts."""


def flags(draw: Random, n: int, often: float) -> list[bool]:
    return [draw.random() < often for _ in range(n)]


def few_values(draw: Random, n: int, *others: float) -> list[float]:
    return [draw.choice([*FEW, *others]) for _ in range(n)]


def _bounds(draw: Random, start: int, groups: int, most: int) -> list[int]:
    return [start, *accumulate((draw.randint(1, most) for _ in range(groups)), initial=start)][1:]


def _size(draw: Random, least: int = 1) -> int:
    """Return a small size, or a size too large for a float or a machine word."""
    return draw.choice([draw.randint(least, 40), draw.randint(least, 3000), 10**18 + draw.randint(0, 99)])


def _form(draw: Random) -> str | int | float:
    """Return an int, a float or a text: an edge case, a fraction or a count, sometimes with a wrong character."""
    if draw.random() < 0.2:
        return draw.choice([draw.randint(0, 3), LARGEST, draw.randint(1, 10**6), draw.randint(1, 1100) / 1000])
    digits = "".join(draw.choice("0123456789") for _ in range(draw.randint(1, 12)))
    kinds = [f"0.{digits}", f"{digits[:2]}.{digits}%", f"{digits[:2]}%", digits, f".{digits}"]
    text = draw.choice([draw.choice(TEXTS), *kinds])
    at = draw.randint(0, len(text))
    return draw.choice([text, text, text, text[:at] + draw.choice(" .%0e-/:") + text[at + draw.randint(0, 1) :]])


def _forms(draw: Random) -> tuple[Json, Json]:
    return {"budget": _form(draw), "seen": _size(draw, 0)}, {}


def _budget(draw: Random) -> tuple[Json, Json]:
    return {"budget": _form(draw), "n": _size(draw)}, {"N_sink": draw.randint(0, 9), "W_recent": draw.randint(0, 9)}


def _protected(draw: Random) -> tuple[Json, Json]:
    bounds = _bounds(draw, draw.choice([0, FAR]), draw.randint(1, 6), 5)
    parameters = {"N_sink": draw.randint(0, 6), "W_recent": draw.randint(0, 6)}
    return {"offsets": bounds, "n": bounds[-1] + draw.randint(0, 3)}, parameters


def _cut(draw: Random) -> tuple[Json, Json]:
    sizes = [draw.randint(1, 9) for _ in range(draw.randint(1, 6))]
    B = draw.choice([draw.randint(1, sum(sizes) + 3), LARGEST])
    return {"sizes": sizes, "protected": flags(draw, len(sizes), 0.4), "B": B}, {}


def _allocate(draw: Random) -> tuple[Json, Json]:
    sizes = [draw.choice([draw.randint(1, 9), 2**40]) for _ in range(draw.randint(1, 6))]
    c = draw.choice([draw.randint(0, sum(sizes)), min(sum(sizes), draw.randint(0, 30))])
    return {"sizes": sizes, "c_0": c}, {"N_min": draw.randint(0, 5)}


def _keep_count(draw: Random) -> tuple[Json, Json]:
    """Return inputs with shares of whole tokens, as from CC-ALLOCATE, or with exact halves."""
    size = draw.randint(2, 64)
    r = draw.choice([draw.randint(1, size - 1) / size, draw.randint(1, 7) / 8])
    return {"r": r, "size": size}, {"N_min": draw.randint(0, 5)}


def _dissolved(draw: Random) -> tuple[Json, Json]:
    m = draw.randint(1, 6)
    return {"D": few_values(draw, m, 1.0), "r": [draw.randint(0, 7) / 7 for _ in range(m)]}, {}


def _ends(draw: Random) -> tuple[Json, Json]:
    return {"ends": flags(draw, draw.randint(1, 20), draw.choice([0.0, 0.2, 0.7, 1.0]))}, {}


def _sides(draw: Random) -> Json:
    a, b, c = _bounds(draw, draw.choice([0, FAR]), 2, 9)
    return {"current": [a, b], "sentence": [b, c]}


def _interface_edges(draw: Random) -> tuple[Json, Json]:
    given = _sides(draw)
    (a, _), (_, c) = given["current"], given["sentence"]
    pairs = {(draw.randrange(a, c), draw.randrange(a, c)) for _ in range(draw.randint(0, 40))}
    return {**given, "edges": [[i, j, draw.choice(FEW[1:])] for i, j in sorted(pairs)]}, {}


def _merge(draw: Random) -> tuple[Json, Json]:
    parameters = {"tau_merge": draw.choice([0.0, 0.1, 0.2, 0.3, 1.0]), "T_max": draw.randint(1, 12)}
    sizes = {"size": draw.randint(1, 6), "next_size": draw.randint(1, 6)}
    return {"weights": few_values(draw, draw.randint(0, 6)), **sizes}, parameters


def _split(draw: Random) -> tuple[Json, Json]:
    return {"size": draw.randint(1, 99), "T_max": draw.randint(1, 40)}, {}


def _path(draw: Random) -> tuple[Json, Json]:
    m = draw.randint(1, 6)
    inputs = {"D": few_values(draw, m, 1.0), "M_tilde": few_values(draw, m, np.nan)}
    return inputs, {"alpha": draw.choice([0.3, 0.7, 1.0, 2.0])}


def _units(draw: Random) -> tuple[Json, Json]:
    m = draw.randint(1, 7)
    bounds = _bounds(draw, 0, m, 4)
    values = [few_values(draw, m, np.nan) for _ in range(draw.randint(1, 2))]
    return {"values": values, "offsets": bounds, "pinned": flags(draw, m, 0.2), "B": draw.randint(0, bounds[-1])}, {}


def _blocks(draw: Random) -> tuple[Json, Json]:
    groups, n = draw.randint(1, 3), draw.randint(1, 20)
    return {
        "values": [few_values(draw, n, np.nan) for _ in range(groups)],
        "pinned": [flags(draw, n, 0.1) for _ in range(groups)],
        "shares": [draw.randint(0, n) for _ in range(groups)], "b": draw.randint(1, 4),
    }, {}


def _targets(draw: Random) -> tuple[Json, Json]:
    """Return exact targets with an integer sum.

    Small denominators cause ties. Numbers with large denominators exceed 63 bits.
    """
    denominator = draw.choice([1, 2, 4, 1000, 10**12 + 39])
    parts = [Fraction(draw.randint(0, 9 * denominator), draw.choice([1, denominator])) % draw.choice([9, 2**50])
             for _ in range(draw.randint(0, 8))]
    parts.append(-sum(parts, Fraction()) % 1 + draw.randint(0, 3))
    draw.shuffle(parts)
    return {"targets": [str(part) for part in parts]}, {}


def _pyramid(draw: Random) -> tuple[Json, Json]:
    """Return inputs with budgets from only the window to more than all tokens. They may be too large for a float."""
    n, W = draw.choice([draw.randint(1, 60), draw.randint(1, 3000), 10**15 + draw.randint(0, 99)]), draw.randint(0, 9)
    least = min(W, n)
    B = draw.choice([least, n - 1, n, n + 1, 2 * n, draw.randint(least, n), draw.randint(least, min(n, least + 40))])
    return {"B": max(B, least), "W": W, "L": draw.randint(1, 40), "n": n, "beta": draw.choice([1, 2, 3, 14, 20])}, {}


def _cosines(draw: Random) -> tuple[Json, Json]:
    n, d = draw.randint(1, 4), draw.randint(1, 6)
    return {"V": [few_values(draw, d, -0.3, -0.7, 0.8) for _ in range(n)]}, {}


ITEMS: Mapping[str, Callable[[Random], tuple[Json, Json]]] = {
    "CC-BUDGET-FORMS": _forms, "CC-BUDGET": _budget, "CC-PROTECTED": _protected, "CC-CUT": _cut,
    "CC-ALLOCATE": _allocate, "CC-KEEP-COUNT": _keep_count, "CC-DISSOLVE-D": _dissolved, "CC-SENTENCES": _ends,
    "CC-INTERFACE": lambda draw: (_sides(draw), {}), "CC-INTERFACE-EDGES": _interface_edges, "CC-MERGE": _merge,
    "CC-SPLIT": _split, "CC-SCORE": _path, "PO-TOP-UNITS": _units, "PO-BEST-BLOCKS": _blocks,
    "PO-WHOLE-SHARES": _targets, "PO-PYRAMID-BUDGET": _pyramid, "DV-COSINE": _cosines,
}
