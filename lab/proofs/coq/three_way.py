"""Comparison of the model's operations on random inputs: the extracted model and all other sides must agree exactly.

An operation is a stage of a backend, or an item with inputs and parameters as in spec/vectors. For an item, the third
answer comes from brute force, because accelerated backends have only stages.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, is_dataclass, replace
from fractions import Fraction
from operator import methodcaller
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

import numpy as np

from conformance.checks.vector_checks import same
from conformance.engine.process import Engine, backend_of
from conformance.methods import policies
from conformance.oracles.diversity import cosine
from conformance.strategies.trunks import random_evictions, record
from conformance.vectors.codec import plain
from lab import item_vectors
from lab.proofs.coq.inputs import ITEMS, LARGEST, TEXTS, few_values, flags
from lab.vector_writer.brute_force import encoded
from lab.vector_writer.expected import OPERATIONS
from reference.diversity import cosines
from reference.policies.selectors import best_blocks, top_units
from spec.backend import Backend, resolve
from spec.errors import SpecError
from spec.parameters import TINY, CrystalCacheParameters
from spec.policy import Scores

Json: TypeAlias = Any
Answer: TypeAlias = Callable[[Json, CrystalCacheParameters], Any]


@dataclass(frozen=True)
class Side:
    """Source of answers: a backend for the stages, and a function for the items, which returns None for an error."""

    backend: Backend
    item: Callable[[str, Json, Mapping[str, Json]], Any]


Question: TypeAlias = Callable[[Side], Any]


def extracted(program: Path, seconds: float = 60) -> tuple[Engine, Side]:
    """Return the extracted model as a process, which must be stopped with `stop`, and as a side."""
    engine = Engine(f"{sys.executable} -m lab.proofs.coq.engine {program}", seconds)

    def item(operation: str, inputs: Json, parameters: Mapping[str, Json]) -> Any:
        if "budget" in inputs:
            inputs = {**inputs, "budget": str(inputs["budget"])}  # the model parses text
        shown = {**vars(TINY), **parameters}
        known = {name: value for name, value in shown.items() if isinstance(value, int | float)}
        return engine.ask(operation, encoded({**inputs, "parameters": known}), _read)

    return engine, Side(backend_of(engine), item)


def _read(value: Json) -> Json:
    """Convert floats and large integers from text, at any depth."""
    if isinstance(value, Mapping):
        return {name: _read(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_read(inner) for inner in value]
    if not isinstance(value, str):
        return value
    return int(value) if value.lstrip("-").isdigit() else float.fromhex(value)


def in_reference() -> Side:
    """Return the side of the reference, including any edits of it that are in force."""
    return Side(resolve("numpy"), _side({**item_vectors.ITEMS, **_OF_REFERENCE}))


def independent() -> Side:
    """Return the side of Numba's stages and of brute force for items."""
    return Side(resolve("numba"), _side({**{name: one.results for name, one in OPERATIONS.items()}, **_BY_FORCE}))


def _side(answers: Mapping[str, Answer]) -> Callable[[str, Json, Mapping[str, Json]], Any]:
    def item(operation: str, inputs: Json, parameters: Mapping[str, Json]) -> Any:
        try:
            return answers[operation](inputs, replace(TINY, **parameters))
        except SpecError:
            return None

    return item


def _asked(name: str, tokens: int | None) -> Any:
    return None if tokens is None else {name: tokens}


def _effective(i: Json, p: CrystalCacheParameters) -> Any:
    tokens = policies.asked(str(i["budget"]), i["n"])
    return _asked("B", None if tokens is None else max(p.N_sink + p.W_recent, tokens))


def _units_of_reference(i: Json, p: CrystalCacheParameters) -> Any:
    """Return the best units, which are protected through their first tokens."""
    bounds, protected = np.array(i["offsets"]), np.zeros(i["offsets"][-1], dtype=np.bool_)
    protected[bounds[:-1][np.array(i["pinned"])]] = True
    result = top_units(Scores(np.array(i["values"]), bounds), np.full(len(i["values"]), i["B"]), protected)
    return {"kept": np.split(result.positions, result.offsets[1:-1])}


def _blocks_of_reference(i: Json, p: CrystalCacheParameters) -> Any:
    values, shares, pinned = (np.array(i[name]) for name in ("values", "shares", "pinned"))
    result = best_blocks(values, shares, pinned, i["b"])
    return {"positions": result.positions, "offsets": result.offsets}


def _blocks_by_force(i: Json, p: CrystalCacheParameters) -> Any:
    rows = zip(i["values"], i["pinned"], strict=True)
    scores = [[None if flag else x for x, flag in zip(*row, strict=True)] for row in rows]
    kept = [policies.best_blocks(row, i["b"], share) for row, share in zip(scores, i["shares"], strict=True)]
    return {"positions": [at for row in kept for at in row], "offsets": np.cumsum([0, *map(len, kept)])}


_OF_REFERENCE: Mapping[str, Answer] = {
    "PO-TOP-UNITS": _units_of_reference, "PO-BEST-BLOCKS": _blocks_of_reference,
    "DV-COSINE": lambda i, p: {"cosines": cosines(np.array(i["V"]))},
}
_BY_FORCE: Mapping[str, Answer] = {
    "CC-BUDGET-FORMS": lambda i, p: _asked("tokens", policies.asked(str(i["budget"]), i["seen"])),
    "CC-BUDGET": _effective,
    "PO-TOP-UNITS": lambda i, p: {
        "kept": [policies.best_units(row, i["offsets"], i["pinned"], i["B"]) for row in i["values"]]
    },
    "PO-BEST-BLOCKS": _blocks_by_force,
    "PO-PYRAMID-BUDGET": lambda i, p: {
        "shares": policies.pyramid_shares(Fraction(i["B"]), min(i["W"], i["n"]), i["L"], i["n"], i["beta"])
    },
    "DV-COSINE": lambda i, p: {"cosines": [[cosine(a, b) for b in i["V"]] for a in i["V"]]},
}


def differences(answering: Mapping[str, Side], asked: Iterable[tuple[str, Question]]) -> Iterator[str]:
    """Yield each question for which the answers differ, with the sides whose answer equals no other."""
    for name, question in asked:
        answers = {who: question(one) for who, one in answering.items()}
        alone = [who for who in answers if not any(_same(answers[who], answers[o]) for o in answers if o != who)]
        if alone:
            yield f"{name}: {', '.join(alone)} stands alone"


def _same(a: Any, b: Any) -> bool:
    if is_dataclass(a) and not isinstance(a, type):
        return all(_same(x, y) for x, y in zip(astuple(a), astuple(b), strict=True))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(plain(a[name]), plain(b[name])) for name in a)
    if a is None or b is None:
        return a is b
    return np.array_equal(a, b, equal_nan=np.asarray(a).dtype.kind == "f")


def _eviction(draw: Random) -> Question:
    """Return a question about an eviction, in a segment that begins at position 0 or later."""
    (problem,) = random_evictions(draw.randrange(2**32), 1)
    problem = replace(problem, trunks=replace(problem.trunks, offsets=problem.trunks.offsets + draw.choice([0, 7])))
    if draw.random() < 0.1:
        problem = replace(problem, budget=LARGEST)
    return lambda side: problem.run(side.backend.require_crystal())


def _trunks(draw: Random) -> Question:
    """Return a question about a text with sentences of a few tokens, and with weights near the threshold."""
    n, start = draw.randint(1, 40), draw.choice([0, 7, 2**40])
    tau, low, high, unit = draw.choice([(0.25, 1, 8, 1 / 16), (0.3, 2, 4, 0.1), (0.0, 1, 5, 0.1)])
    p = replace(TINY, C=8, T_max=draw.randint(1, 9), tau_merge=tau, k_intra=6, k_cross=2)

    def row(allowed: list[int], k: int) -> list[tuple[int, float]]:
        chosen = draw.sample(allowed, min(k, len(allowed), draw.randint(0, k)))
        rated = [(start + j, draw.randint(low, high) * unit) for j in chosen]
        return sorted(rated, key=lambda edge: (-edge[1], edge[0]))

    intra = [row([j for j in range(i // 8 * 8, min(n, i // 8 * 8 + 8)) if j != i], 6) for i in range(n)]
    cross = [row(list(range(max(0, i // 8 * 8 - 6), i // 8 * 8)), 2) for i in range(n)]
    result = record([1.0] * n, intra, cross, 6, 2, start)
    impact = np.array([draw.randint(1, 9) * unit for _ in range(n)])
    ends = np.array(flags(draw, n, draw.choice([0.05, 0.4])))
    return lambda side: side.backend.require_crystal().trunks(result, impact, ends, p)


def _score(draw: Random) -> Question:
    """Return a question about scores on the grid of 2^-30, because libraries' logarithms differ in their last bits.

    An effect of epsilon is visible on this grid.
    """
    m = draw.randint(1, 8)
    D, impact = np.array(few_values(draw, m, 1.0)), np.array(few_values(draw, m, 5.0, 1e4))
    protected = np.array(flags(draw, m, draw.choice([0.0, 0.3, 1.0])))
    p = replace(TINY, alpha=draw.choice([0.3, 0.7, 1.0, 2.0]))
    return lambda side: np.rint(side.backend.require_crystal().score(D, impact, protected, p) * 2.0**30)


def _selection(draw: Random) -> Question:
    groups, n = draw.randint(1, 3), draw.randint(1, 12)
    values = np.array([few_values(draw, n, np.nan) for _ in range(groups)])
    pinned = np.array([flags(draw, n, 0.2) for _ in range(groups)])
    shares = np.array([draw.randint(0, n) for _ in range(groups)])
    return lambda side: side.backend.require_policies().best_tokens(values, shares, pinned)


def _diverse(draw: Random) -> Question:
    """Return a question about a choice of diverse tokens.

    Several signatures are equal, and some tokens are already kept. Rarely, more than 64 tokens in many directions are
    kept.
    """
    if draw.random() < 0.05:
        n, often = draw.randint(90, 110), 0.8
        V = np.array([np.eye(32)[draw.randrange(32)] * draw.choice([-1.0, 1.0]) for _ in range(n)])
    else:
        n, d, often = draw.randint(1, 9), draw.randint(1, 4), draw.choice([0.0, 0.3])
        V = np.array([few_values(draw, d, -0.3, -0.7, 0.8) for _ in range(n)])
    s, retained = np.array(few_values(draw, n, 0.9, 1.0, np.nan)), np.array(flags(draw, n, often))
    k, lam = draw.randint(int(retained.sum()), n), draw.choice([0.0, 0.3, 0.5, 1.0, 2.0])
    return lambda side: side.backend.require_diversity().diverse(s, V, retained, k, lam)


STAGES: Mapping[str, Callable[[Random], Question]] = {
    "trunks": _trunks, "dissolve": _eviction, "score": _score, "PO-TOP-UNITS of one": _selection, "DV-GREEDY": _diverse,
}
"""Stages by their operation in spec/vectors, or by a description."""


def questions(seed: int, number: int) -> Iterator[tuple[str, Question]]:
    """Yield the edge cases of the grammar, then `number` questions for each operation.

    Each name contains the seed that makes the question again.
    """
    for text in TEXTS:
        inputs = {"budget": text, "seen": 10**18 + 9}
        yield f"CC-BUDGET-FORMS {text!r}", methodcaller("item", "CC-BUDGET-FORMS", inputs, {})
    for at in range(seed, seed + number):
        for operation, stage in STAGES.items():
            yield f"{operation} {at}", stage(Random(f"{operation} {at}"))
        for operation, item in ITEMS.items():
            inputs, parameters = item(Random(f"{operation} {at}"))
            yield f"{operation} {at}", methodcaller("item", operation, inputs, parameters)
