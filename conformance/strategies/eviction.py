"""Eviction problems for S6. One definition serves Hypothesis and a seeded generator: both reach the same corners."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from conformance.oracles import s6
from conformance.strategies.sizes import EVICTED_SIZE, EVICTED_TRUNKS
from spec.arrays import BoolVector, Vector
from spec.backend import CrystalStages
from spec.parameters import CrystalCacheParameters
from spec.records import Dissolution, Trunks

__all__ = ["CORNERS", "EvictionProblem", "corners", "evictions", "random_evictions"]

# Draws an integer in [low, high]; the third argument names it.
Integer = Callable[[int, int, str], int]

CORNERS = ("overshoot 1", "overshoot 2", "a partial trunk", "protected above budget", "nothing unprotected")


@dataclass(frozen=True)
class EvictionProblem:
    """What S6 is given."""

    score: Vector
    trunks: Trunks
    impact: Vector
    D: Vector
    protected: BoolVector
    budget: int
    parameters: CrystalCacheParameters

    @property
    def lists(self) -> list[list[int]]:
        """The trunks as lists of positions, for the oracle."""
        offsets = self.trunks.offsets.tolist()
        return [list(range(offsets[g], offsets[g + 1])) for g in range(len(offsets) - 1)]

    def run(self, stages: CrystalStages) -> Dissolution:
        """What a backend's S6 makes of it."""
        return stages.dissolve(
            self.score, self.trunks, self.impact, self.D, self.protected, self.budget, self.parameters
        )

    def expected(self) -> s6.Eviction:
        """What Algorithm 1 makes of it."""
        scores = {g: x for g, x in enumerate(self.score.tolist()) if not self.protected[g]}
        return s6.evict(
            self.lists, scores, self.impact.tolist(), self.D.tolist(), self.protected.tolist(), self.budget,
            self.parameters,
        )


def _problem(integer: Integer) -> EvictionProblem:
    m = integer(1, EVICTED_TRUNKS, "m")
    sizes = [integer(1, EVICTED_SIZE, "size") for _ in range(m)]
    protected = _protected(integer, m)
    score = np.array([integer(0, 5, "sixths") / 6 for _ in range(m)])
    score[protected] = np.nan
    n = sum(sizes)
    N_min = [3, 3, 3, 3, 0, 1, 2, 4, 9, 12][integer(0, 9, "N_min")]
    return EvictionProblem(
        score,
        Trunks(np.cumsum([0, *sizes]).astype(np.int64), np.zeros(m)),
        np.array([integer(1, 4, "impact") / 2 for _ in range(n)]),
        np.array([integer(0, 4, "D") / 4 for _ in range(m)]),
        protected,
        _budget(integer, sizes, score, protected),
        CrystalCacheParameters(N_min=N_min),
    )


def _protected(integer: Integer, m: int) -> BoolVector:
    """Ends protected as the sink and the window do it; rarely all trunks, rarely any pattern."""
    kind = integer(0, 19, "protection")
    if kind == 0:
        return np.ones(m, dtype=np.bool_)
    if kind <= 2:
        return np.array([integer(0, 1, "protected") == 1 for _ in range(m)])
    first, last = integer(0, 2, "sink trunks"), integer(0, 3, "recent trunks")
    g = np.arange(m)
    mask: BoolVector = (g < first) | (g >= m - last)
    return mask


def _budget(integer: Integer, sizes: list[int], score: Vector, protected: BoolVector) -> int:
    """Half the time the cut falls within 4 of a trunk's edge in eviction order; else B is anything up to n + 3."""
    n = sum(sizes)
    if integer(0, 1, "aim") == 0:
        return integer(0, n + 3, "B")
    order = sorted((g for g in range(len(sizes)) if not protected[g]), key=lambda g: (score[g], g))
    evicted = order[: integer(0, len(order), "trunks evicted")]
    cut = sum(sizes[g] for g in evicted) + integer(-4, 4, "offset")
    return min(max(0, n - cut), n + 3)


@st.composite
def evictions(draw: st.DrawFn) -> EvictionProblem:
    """Problems that shrink."""
    return _problem(lambda low, high, label: draw(st.integers(low, high), label=label))


def random_evictions(seed: int, count: int) -> Iterator[EvictionProblem]:
    """The same problems from a seed, a hundred times faster."""
    source = random.Random(seed)
    for _ in range(count):
        yield _problem(lambda low, high, _label: source.randint(low, high))


def corners(problem: EvictionProblem, result: s6.Eviction) -> Iterator[str]:
    """Which of CORNERS the problem is."""
    B_prot = int(problem.trunks.sizes[problem.protected].sum())
    if result.c in (-1, -2):
        yield f"overshoot {-result.c}"
    if any(0 < r < 1 for r in result.ratio):
        yield "a partial trunk"
    if B_prot > problem.budget:
        yield "protected above budget"
    if problem.protected.all() and problem.budget < len(problem.impact):
        yield "nothing unprotected"
