"""What the three-way comparison asks: of every operation of the model, drawn inputs, the edges among them.

Tenths do not add up exactly, so that an order of summation shows; values are few, so that they tie.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np

from conformance.assurance.proofs.coq.three_way import Question, Side
from conformance.strategies.trunks import random_evictions, record
from spec.parameters import TINY

Json: TypeAlias = Any
Random: TypeAlias = random.Random
FAR = 2**62
"""Positions that no float and no machine word of OCaml's holds."""
LARGEST = 2**63 - 1
FEW = (0.0, 0.1, 0.2, 0.3, 0.6, 0.7)
TEXTS = (
    "15", " 15 ", "0.5364229131356656", "1", "1.", "1.0", "1.%", "100%", "100.%", "101%", "100.000001%", ".5", "5.%",
    ".%", ".", "%", "", "0", "0.0", "0%", "00512", "0.28", "1.0000000001", "3 4", "5 %", "%5", "1e-3", "+5", "-1",
    "0x10", "1_0", "2/", "2:", "\u0663", "5\t", "\n5", "0..5", "0.5%%", str(LARGEST), str(LARGEST + 1), "9" * 64,
    "0." + "3" * 61, "0." + "3" * 62, "0." + "3" * 63, " " * 61 + "0.5", " " * 62 + "0.5", "0" * 63 + "7",
    "0" * 64 + "7",
)
"""The edges of CC-BUDGET-FORMS' grammar, of its 64 characters, and of its counts."""


def _flags(draw: Random, n: int, often: float) -> list[bool]:
    return [draw.random() < often for _ in range(n)]


def _few(draw: Random, n: int, *others: float) -> list[float]:
    return [draw.choice([*FEW, *others]) for _ in range(n)]


def _bounds(draw: Random, start: int, groups: int, most: int) -> list[int]:
    return [start, *accumulate((draw.randint(1, most) for _ in range(groups)), initial=start)][1:]


def _size(draw: Random, least: int = 1) -> int:
    """Small, or too large for a float or a word."""
    return draw.choice([draw.randint(least, 40), draw.randint(least, 3000), 10**18 + draw.randint(0, 99)])


# ---- stages ----


def _eviction(draw: Random) -> Question:
    """Of a segment that begins at position 0, or later."""
    (problem,) = random_evictions(draw.randrange(2**32), 1)
    problem = replace(problem, trunks=replace(problem.trunks, offsets=problem.trunks.offsets + draw.choice([0, 7])))
    if draw.random() < 0.1:
        problem = replace(problem, budget=LARGEST)
    return lambda side: problem.run(side.backend.require_crystal())


def _trunks(draw: Random) -> Question:
    """A text with sentences of a few tokens, and weights around the threshold."""
    n, start = draw.randint(1, 40), draw.choice([0, 7, 2**40])
    tau, low, high, unit = draw.choice([(0.25, 1, 8, 1 / 16), (0.3, 2, 4, 0.1), (0.0, 1, 5, 0.1)])
    p = replace(TINY, C=8, T_max=draw.randint(1, 9), tau_merge=tau, k_intra=6, k_cross=2)

    def row(allowed: list[int], k: int) -> list[tuple[int, float]]:
        chosen = draw.sample(allowed, min(k, len(allowed), draw.randint(0, k)))
        rated = [(start + j, draw.randint(low, high) * unit) for j in chosen]
        return sorted(rated, key=lambda edge: (-edge[1], edge[0]))

    intra = [row([j for j in range(i // 8 * 8, min(n, i // 8 * 8 + 8)) if j != i], 6) for i in range(n)]
    cross = [row(list(range(max(0, i // 8 * 8 - 6), i // 8 * 8)), 2) for i in range(n)]
    found = record([1.0] * n, intra, cross, 6, 2, start)
    impact = np.array([draw.randint(1, 9) * unit for _ in range(n)])
    ends = np.array(_flags(draw, n, draw.choice([0.05, 0.4])))
    return lambda side: side.backend.require_crystal().trunks(found, impact, ends, p)


def _score(draw: Random) -> Question:
    """On the grid of 2^-30, as libraries' logarithms differ in their last bits; epsilon is seen on it."""
    m = draw.randint(1, 8)
    D, impact = np.array(_few(draw, m, 1.0)), np.array(_few(draw, m, 5.0, 1e4))
    protected = np.array(_flags(draw, m, draw.choice([0.0, 0.3, 1.0])))
    p = replace(TINY, alpha=draw.choice([0.3, 0.7, 1.0, 2.0]))
    return lambda side: np.rint(side.backend.require_crystal().score(D, impact, protected, p) * 2.0**30)


def _selection(draw: Random) -> Question:
    groups, n = draw.randint(1, 3), draw.randint(1, 12)
    values = np.array([_few(draw, n, np.nan) for _ in range(groups)])
    pinned = np.array([_flags(draw, n, 0.2) for _ in range(groups)])
    shares = np.array([draw.randint(0, n) for _ in range(groups)])
    return lambda side: side.backend.require_policies().best_tokens(values, shares, pinned)


def _diverse(draw: Random) -> Question:
    """Signatures of which several are alike, some of them kept already; or more than 64 are, in many directions."""
    if draw.random() < 0.05:
        n, often = draw.randint(90, 110), 0.8
        V = np.array([np.eye(32)[draw.randrange(32)] * draw.choice([-1.0, 1.0]) for _ in range(n)])
    else:
        n, d, often = draw.randint(1, 9), draw.randint(1, 4), draw.choice([0.0, 0.3])
        V = np.array([_few(draw, d, -0.3, -0.7, 0.8) for _ in range(n)])
    s, retained = np.array(_few(draw, n, 0.9, 1.0, np.nan)), np.array(_flags(draw, n, often))
    k, lam = draw.randint(int(retained.sum()), n), draw.choice([0.0, 0.3, 0.5, 1.0, 2.0])
    return lambda side: side.backend.require_diversity().diverse(s, V, retained, k, lam)


STAGES: Mapping[str, Callable[[Random], Question]] = {
    "trunks": _trunks, "dissolve": _eviction, "score": _score, "PO-TOP-UNITS of one": _selection, "DV-GREEDY": _diverse,
}
"""By their operation in spec/vectors, or what they are besides."""

# ---- items: inputs, and the parameters that matter ----


def _form(draw: Random) -> str | int | float:
    """An int, a float, or a text: an edge, a fraction or a count, or one of these with a character wrong."""
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
    return {"sizes": sizes, "protected": _flags(draw, len(sizes), 0.4), "B": B}, {}


def _allocate(draw: Random) -> tuple[Json, Json]:
    sizes = [draw.choice([draw.randint(1, 9), 2**40]) for _ in range(draw.randint(1, 6))]
    c = draw.choice([draw.randint(0, sum(sizes)), min(sum(sizes), draw.randint(0, 30))])
    return {"sizes": sizes, "c_0": c}, {"N_min": draw.randint(0, 5)}


def _keep_count(draw: Random) -> tuple[Json, Json]:
    """Shares of whole tokens, as CC-ALLOCATE gives them, and exact halves."""
    size = draw.randint(2, 64)
    r = draw.choice([draw.randint(1, size - 1) / size, draw.randint(1, 7) / 8])
    return {"r": r, "size": size}, {"N_min": draw.randint(0, 5)}


def _dissolved(draw: Random) -> tuple[Json, Json]:
    m = draw.randint(1, 6)
    return {"D": _few(draw, m, 1.0), "r": [draw.randint(0, 7) / 7 for _ in range(m)]}, {}


def _ends(draw: Random) -> tuple[Json, Json]:
    return {"ends": _flags(draw, draw.randint(1, 20), draw.choice([0.0, 0.2, 0.7, 1.0]))}, {}


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
    return {"weights": _few(draw, draw.randint(0, 6)), **sizes}, parameters


def _split(draw: Random) -> tuple[Json, Json]:
    return {"size": draw.randint(1, 99), "T_max": draw.randint(1, 40)}, {}


def _path(draw: Random) -> tuple[Json, Json]:
    m = draw.randint(1, 6)
    return {"D": _few(draw, m, 1.0), "M_tilde": _few(draw, m, np.nan)}, {"alpha": draw.choice([0.3, 0.7, 1.0, 2.0])}


def _units(draw: Random) -> tuple[Json, Json]:
    m = draw.randint(1, 7)
    bounds = _bounds(draw, 0, m, 4)
    values = [_few(draw, m, np.nan) for _ in range(draw.randint(1, 2))]
    return {"values": values, "offsets": bounds, "pinned": _flags(draw, m, 0.2), "B": draw.randint(0, bounds[-1])}, {}


def _blocks(draw: Random) -> tuple[Json, Json]:
    groups, n = draw.randint(1, 3), draw.randint(1, 20)
    return {
        "values": [_few(draw, n, np.nan) for _ in range(groups)],
        "pinned": [_flags(draw, n, 0.1) for _ in range(groups)],
        "shares": [draw.randint(0, n) for _ in range(groups)], "b": draw.randint(1, 4),
    }, {}


def _targets(draw: Random) -> tuple[Json, Json]:
    """Exact targets with a whole sum; few denominators tie, large ones leave 63 bits behind."""
    denominator = draw.choice([1, 2, 4, 1000, 10**12 + 39])
    parts = [Fraction(draw.randint(0, 9 * denominator), draw.choice([1, denominator])) % draw.choice([9, 2**50])
             for _ in range(draw.randint(0, 8))]
    parts.append(-sum(parts, Fraction()) % 1 + draw.randint(0, 3))
    draw.shuffle(parts)
    return {"targets": [str(part) for part in parts]}, {}


def _pyramid(draw: Random) -> tuple[Json, Json]:
    """Budgets from the window alone to more than all tokens, which may be more than a float holds."""
    n, W = draw.choice([draw.randint(1, 60), draw.randint(1, 3000), 10**15 + draw.randint(0, 99)]), draw.randint(0, 9)
    least = min(W, n)
    B = draw.choice([least, n - 1, n, n + 1, 2 * n, draw.randint(least, n), draw.randint(least, min(n, least + 40))])
    return {"B": max(B, least), "W": W, "L": draw.randint(1, 40), "n": n, "beta": draw.choice([1, 2, 3, 14, 20])}, {}


def _cosines(draw: Random) -> tuple[Json, Json]:
    n, d = draw.randint(1, 4), draw.randint(1, 6)
    return {"V": [_few(draw, d, -0.3, -0.7, 0.8) for _ in range(n)]}, {}


ITEMS: Mapping[str, Callable[[Random], tuple[Json, Json]]] = {
    "CC-BUDGET-FORMS": _forms, "CC-BUDGET": _budget, "CC-PROTECTED": _protected, "CC-CUT": _cut,
    "CC-ALLOCATE": _allocate, "CC-KEEP-COUNT": _keep_count, "CC-DISSOLVE-D": _dissolved, "CC-SENTENCES": _ends,
    "CC-INTERFACE": lambda draw: (_sides(draw), {}), "CC-INTERFACE-EDGES": _interface_edges, "CC-MERGE": _merge,
    "CC-SPLIT": _split, "CC-SCORE": _path, "PO-TOP-UNITS": _units, "PO-BEST-BLOCKS": _blocks,
    "PO-WHOLE-SHARES": _targets, "PO-PYRAMID-BUDGET": _pyramid, "DV-COSINE": _cosines,
}


def _ask(operation: str, inputs: Json, parameters: Json, side: Side) -> Any:
    return side.item(operation, inputs, parameters)


def questions(seed: int, number: int) -> Iterator[tuple[str, Question]]:
    """The edges of the grammar, then as many of each operation, each with a name that makes it again."""
    for text in TEXTS:
        yield f"CC-BUDGET-FORMS {text!r}", partial(_ask, "CC-BUDGET-FORMS", {"budget": text, "seen": 10**18 + 9}, {})
    for at in range(seed, seed + number):
        for operation, stage in STAGES.items():
            yield f"{operation} {at}", stage(random.Random(f"{operation} {at}"))
        for operation in ITEMS:
            yield f"{operation} {at}", partial(_ask, operation, *ITEMS[operation](random.Random(f"{operation} {at}")))
