"""Implementations of one stage on drawn inputs: the extracted model and any others must agree to the bit."""

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, is_dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np

from conformance.assurance.oracles.blocks import best_blocks
from conformance.engine.backend import backend_of
from conformance.engine.process import Engine
from conformance.strategies.eviction import random_evictions
from conformance.strategies.trunks import record
from spec.arrays import BoolMatrix, IntVector, Matrix
from spec.backend import Backend
from spec.parameters import TINY
from spec.policy import Selection

__all__ = ["block_choosers", "block_questions", "differences", "engine_backend", "questions"]

T = TypeVar("T")

Question: TypeAlias = Callable[[Backend], Any]
Chooser: TypeAlias = Callable[[Matrix, IntVector, BoolMatrix, int], Selection]


def engine_backend(program: Path, seconds: float = 60) -> tuple[Engine, Backend]:
    """The extracted model as a process, which is stopped by its `stop`, and as a backend."""
    engine = Engine(f"{sys.executable} -m conformance.assurance.proofs.coq.engine {program}", seconds)
    return engine, backend_of(engine)


def _eviction(seed: int) -> Question:
    (problem,) = random_evictions(seed, 1)
    return lambda backend: problem.run(backend.require_crystal())


def _trunks(seed: int) -> Question:
    """A text with sentences of a few tokens, and weights around the threshold; tenths do not add up exactly."""
    draw = random.Random(seed)
    n, start = draw.randint(1, 40), draw.choice([0, 7])
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
    often = draw.choice([0.05, 0.4])
    ends = np.array([draw.random() < often for _ in range(n)])
    return lambda backend: backend.require_crystal().trunks(found, impact, ends, p)


def _selection(seed: int) -> Question:
    draw = random.Random(seed)
    groups, n = draw.randint(1, 3), draw.randint(1, 12)
    values = np.array([[draw.choice([0.0, 0.5, 1.0, 1.5, np.nan]) for _ in range(n)] for _ in range(groups)])
    pinned = np.array([[draw.random() < 0.2 for _ in range(n)] for _ in range(groups)])
    shares = np.array([draw.randint(0, n) for _ in range(groups)])
    return lambda backend: backend.require_policies().best_tokens(values, shares, pinned)


def questions(seed: int, number: int) -> Iterator[tuple[str, Question]]:
    """As many of each kind, each with a name that makes it again."""
    for at in range(seed, seed + number):
        for kind in (_eviction, _trunks, _selection):
            yield f"{kind.__name__.strip('_')} {at}", kind(at)


def block_choosers(engine: Engine, reference: Chooser) -> dict[str, Chooser]:
    """Who chooses blocks, which is no stage: the extracted model, brute force, and a reference."""
    def extracted(values: Matrix, shares: IntVector, pinned: BoolMatrix, b: int) -> Selection:
        rows = [[x.hex() for x in row] for row in values.tolist()]
        arguments = {"values": rows, "shares": shares.tolist(), "pinned": pinned.tolist(), "b": b}
        return engine.ask(
            "PO-BEST-BLOCKS", arguments, lambda said: Selection(np.array(said["positions"]), np.array(said["offsets"])))

    def brute(values: Matrix, shares: IntVector, pinned: BoolMatrix, b: int) -> Selection:
        scores = np.where(pinned, np.array(None), values).tolist()
        kept = [best_blocks(row, b, share) for row, share in zip(scores, shares.tolist(), strict=True)]
        return Selection(np.array([*chain(*kept)]), np.cumsum([0, *map(len, kept)]))

    return {"coq": extracted, "brute force": brute, "reference": reference}


def block_questions(seed: int, number: int) -> Iterator[tuple[str, Callable[[Chooser], Selection]]]:
    """Rows in blocks of a few tokens; tenths do not add up exactly."""
    for at in range(seed, seed + number):
        draw = random.Random(at)
        groups, n = draw.randint(1, 3), draw.randint(1, 20)
        values = np.array([[draw.choice([0.1, 0.2, 0.3, 0.6, np.nan]) for _ in range(n)] for _ in range(groups)])
        pinned = np.array([[draw.random() < 0.1 for _ in range(n)] for _ in range(groups)])
        shares = np.array([draw.randint(0, n) for _ in range(groups)])
        yield f"blocks {at}", partial(_chosen, values, shares, pinned, draw.randint(1, 4))


def _chosen(values: Matrix, shares: IntVector, pinned: BoolMatrix, b: int, choose: Chooser) -> Selection:
    return choose(values, shares, pinned, b)


def _same(a: Any, b: Any) -> bool:
    if is_dataclass(a) and not isinstance(a, type):
        return all(_same(x, y) for x, y in zip(astuple(a), astuple(b), strict=True))
    return np.array_equal(a, b, equal_nan=np.asarray(a).dtype.kind == "f")


def differences(answering: Mapping[str, T], asked: Iterable[tuple[str, Callable[[T], Any]]]) -> Iterator[str]:
    """Each question that they do not all answer alike, and who stands alone with his answer."""
    for name, question in asked:
        answers = {who: question(one) for who, one in answering.items()}
        alone = [who for who in answers if not any(_same(answers[who], answers[o]) for o in answers if o != who)]
        if alone:
            yield f"{name}: {', '.join(alone)} stands alone"
