"""Texts, partitions into trunks, graphs between trunks, eviction problems, and decode states.

Hypothesis and a seeded generator draw eviction problems from the same definition.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from conformance.oracles import s6
from conformance.strategies.numbers import (
    DEGREES,
    EVICTED_SIZE,
    EVICTED_TRUNKS,
    LIVE_SIZE,
    LIVE_TRUNKS,
    NEAR,
    TEXT_TOKENS,
    end_masks,
    small_parameters,
)
from spec.arrays import BoolVector, IntVector, Matrix, Vector
from spec.backend import CrystalStages
from spec.budget import Budget, parse_budget
from spec.decode import DecodeState, LiveTrunks, TrunkWeights
from spec.parameters import TINY, CrystalCacheParameters
from spec.records import CoAttention, Dissolution, Trunks

# Function that draws an integer in [low, high]. The third argument names the integer.
Integer = Callable[[int, int, str], int]

CORNERS = ("overshoot 1", "overshoot 2", "a partial trunk", "protected above budget", "nothing unprotected")


@dataclass(frozen=True)
class EvictionProblem:
    """Arguments of S6."""

    score: Vector
    trunks: Trunks
    impact: Vector
    D: Vector
    protected: BoolVector
    budget: int
    parameters: CrystalCacheParameters

    @property
    def lists(self) -> list[list[int]]:
        """Return the trunks as lists of positions, for the oracle."""
        offsets = self.trunks.offsets.tolist()
        return [list(range(offsets[g], offsets[g + 1])) for g in range(len(offsets) - 1)]

    def run(self, stages: CrystalStages) -> Dissolution:
        """Return the result of a backend's S6."""
        return stages.dissolve(
            self.score, self.trunks, self.impact, self.D, self.protected, self.budget, self.parameters
        )

    def expected(self) -> s6.Eviction:
        """Return the result of Algorithm 1."""
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
    """Draw protected trunks: usually both ends, as the sink and the window protect them, rarely all or any pattern."""
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
    """Draw a budget B.

    In half of the draws the cut is within 4 tokens of a trunk's edge in eviction order. Otherwise B is at most n + 3.
    """
    n = sum(sizes)
    if integer(0, 1, "aim") == 0:
        return integer(0, n + 3, "B")
    order = sorted((g for g in range(len(sizes)) if not protected[g]), key=lambda g: (score[g], g))
    evicted = order[: integer(0, len(order), "trunks evicted")]
    cut = sum(sizes[g] for g in evicted) + integer(-4, 4, "offset")
    return min(max(0, n - cut), n + 3)


@st.composite
def evictions(draw: st.DrawFn) -> EvictionProblem:
    """Draw problems that shrink."""
    return _problem(lambda low, high, label: draw(st.integers(low, high), label=label))


def random_evictions(seed: int, count: int) -> Iterator[EvictionProblem]:
    """Yield problems of the same definition from a seed, a hundred times faster."""
    source = random.Random(seed)
    for _ in range(count):
        yield _problem(lambda low, high, _label: source.randint(low, high))


def corners(problem: EvictionProblem, result: s6.Eviction) -> Iterator[str]:
    """Yield the names in CORNERS that apply to the problem."""
    B_prot = int(problem.trunks.sizes[problem.protected].sum())
    if result.c in (-1, -2):
        yield f"overshoot {-result.c}"
    if any(0 < r < 1 for r in result.ratio):
        yield "a partial trunk"
    if B_prot > problem.budget:
        yield "protected above budget"
    if problem.protected.all() and problem.budget < len(problem.impact):
        yield "nothing unprotected"


@dataclass(frozen=True)
class Text:
    """Arguments of S2 and S4."""

    coattention: CoAttention
    impact: Vector
    ends: BoolVector
    parameters: CrystalCacheParameters


def record(
    salience: list[float], intra: list[list[tuple[int, float]]], cross: list[list[tuple[int, float]]],
    k_intra: int, k_cross: int, start: int = 0,
) -> CoAttention:
    """Return neighbour lists as the padded arrays of a `CoAttention`."""
    def padded(rows: list[list[tuple[int, float]]], k: int) -> tuple[IntVector, Vector]:
        index, weight = np.full((len(rows), k), -1, dtype=np.int64), np.zeros((len(rows), k))
        for i, row in enumerate(rows):
            for rank, (j, w) in enumerate(row):
                index[i, rank], weight[i, rank] = j, w
        return index, weight  # type: ignore[return-value]

    index, weight = padded(intra, k_intra)
    late, late_weight = padded(cross, k_cross)
    return CoAttention(start, np.array(salience), index, weight, late, late_weight)  # type: ignore[arg-type]


@st.composite
def coattentions(draw: st.DrawFn, n: int, p: CrystalCacheParameters, start: int = 0) -> CoAttention:
    """Draw neighbours anywhere the specification allows. Weights are multiples of 1/16 above the thresholds."""
    def neighbours(allowed: list[int], k: int, tau: float, label: str) -> list[tuple[int, float]]:
        if not allowed or not k:
            return []
        chosen = draw(st.lists(st.sampled_from(allowed), unique=True, max_size=k), label=label)
        low = int(tau * 16) + 1
        weights = [draw(st.integers(low, 16), label="sixteenths") / 16 for _ in chosen]
        return sorted(zip(chosen, weights, strict=True), key=lambda edge: (-edge[1], edge[0]))

    intra, cross = [], []
    for i in range(n):
        c = i // p.C * p.C
        near = [start + j for j in range(c, min(c + p.C, n)) if j != i and abs(i - j) <= NEAR]
        intra.append(neighbours(near, p.k_intra, p.tau_intra, "intra"))
        cross.append(neighbours([start + j for j in range(max(0, c - NEAR), c)], p.k_cross, p.tau_cross, "cross"))
    return record([1.0] * n, intra, cross, p.k_intra, p.k_cross, start)


def dyadic_impacts(n: int) -> st.SearchStrategy[Vector]:
    """Draw M_i of few values, so that tokens tie."""
    return st.lists(st.integers(1, 9), min_size=n, max_size=n).map(lambda result: np.array(result) / 4)


@st.composite
def texts(draw: st.DrawFn, max_n: int = TEXT_TOKENS) -> Text:
    """Draw co-attention, impact and sentence ends of one text, from position 0."""
    p = draw(st.one_of(st.just(TINY), small_parameters()), label="parameters")
    n = draw(st.integers(2, max_n), label="n")
    return Text(
        draw(coattentions(n, p), label="coattention"), draw(dyadic_impacts(n), label="impact"),
        draw(end_masks(n), label="ends"), p,
    )


@st.composite
def partitions(draw: st.DrawFn, n: int) -> Trunks:
    """Draw a partition of n tokens into trunks, with any impact."""
    inner = draw(st.sets(st.integers(1, n - 1)) if n > 1 else st.just(set()), label="boundaries")
    offsets = np.array([0, *sorted(inner), n], dtype=np.int64)
    return Trunks(offsets, draw(dyadic_impacts(len(offsets) - 1), label="trunk impact"))


def degrees() -> st.SearchStrategy[Vector]:
    """Draw degrees of 1 to 12 trunks, in multiples of 1/4 that are often equal."""
    quarters = st.one_of(st.integers(0, 3), st.integers(0, 400))
    return st.lists(quarters, min_size=1, max_size=DEGREES).map(lambda result: np.array(result) / 4)


ENDS = frozenset({2, 7})


def ends() -> frozenset[int]:
    """Return the ids that end a sentence, of an alphabet of nine ids."""
    return ENDS


def sixteenths(m: int, low: int = 0, high: int = 16) -> st.SearchStrategy[Vector]:
    """Draw m multiples of 1/16, so that products and sums are often exact and ties are common."""
    return st.lists(st.integers(low, high), min_size=m, max_size=m).map(lambda result: np.array(result) / 16)


def flags(m: int) -> st.SearchStrategy[BoolVector]:
    return st.lists(st.booleans(), min_size=m, max_size=m).map(lambda result: np.array(result, dtype=np.bool_))


@st.composite
def graphs(draw: st.DrawFn, m: int, tau_edge: float = 0.05) -> TrunkWeights:
    """Draw a symmetric graph of m trunks: chains, cliques, isolated trunks.

    Weights are above tau_edge, at most 1.375.
    """
    W = np.zeros((m, m))
    for a in range(m):
        for b in range(a):
            if draw(st.sampled_from([True, False, False]), label="edge"):
                W[a, b] = W[b, a] = draw(st.integers(int(tau_edge * 16) + 1, 22), label="sixteenths") / 16
    return csr_of_matrix(W)


def csr_of_matrix(W: Matrix) -> TrunkWeights:
    """Return the entries above 0 in CSR form, row by row."""
    row, column = np.nonzero(W)
    indptr = np.concatenate([[0], np.cumsum((W > 0).sum(axis=1))]).astype(np.int64)
    return TrunkWeights(indptr, column.astype(np.int64), W[row, column])


def inverse_norms(n: int) -> st.SearchStrategy[Vector]:
    """Draw positive multiples of 1/8, and occasionally infinity, the inverse norm of a zero key."""
    value = st.one_of(st.integers(1, 16).map(lambda x: x / 8), st.just(float("inf")))
    return st.lists(value, min_size=n, max_size=n).map(lambda result: np.array(result, dtype=np.float64))


@st.composite
def decode_parameters(draw: st.DrawFn) -> CrystalCacheParameters:
    """Draw small parameters in which every constant of decode also reaches its boundary values."""
    p = draw(small_parameters(), label="parameters")
    pick: dict[str, list[Any]] = {
        "T_breath": [3, 1, 2, 5], "beta_0": [0.05, 0.0, 1.0], "D_c": [2.0, 0.5], "theta_act": [0.3, 0.0, 0.5, 1.0],
        "max_hops": [2, 0, 1, 4], "gamma_hop": [0.5, 1.0, 0.0], "tau_pulse": [0.01, 0.0, 0.125],
        "alpha_res": [0.15, 0.0, 1.0], "eta_Hebb": [0.05, 0.0, 0.25], "gamma_decay": [0.99, 0.5, 1.0],
        "hebb": ["additive", "static"], "breath_protection": ["none", "sink+recent"],
        "impact": ["mixture", "uniform", "salience"], "graph": ["degree", "zero"],
    }
    changes: dict[str, Any] = {name: draw(st.sampled_from(values), label=name) for name, values in pick.items()}
    return replace(p, **changes)


@st.composite
def states(draw: st.DrawFn, p: CrystalCacheParameters, max_m: int = LIVE_TRUNKS, tail: bool = True) -> DecodeState:
    """Draw any state that decode can produce: trunks with gaps, evicted tokens, with or without a tail."""
    sizes = draw(st.lists(st.integers(1, LIVE_SIZE), max_size=max_m), label="live sizes")
    n, m = sum(sizes), len(sizes)
    gaps = draw(st.lists(st.sampled_from([1, 1, 2, 5]), min_size=n, max_size=n), label="gaps")
    positions = np.cumsum(gaps, dtype=np.int64) - 1
    behind = draw(st.integers(0, 2), label="evicted at the end") if n else 0
    before = int(positions[-1]) + 1 + behind if n else 0
    waiting = draw(st.lists(st.integers(0, 8), max_size=p.T_max + 2 if tail else 0), label="tail")
    norms = draw(inverse_norms(len(waiting)), label="tail norms")
    numbers = np.bincount(np.array(draw(
        st.lists(st.integers(0, 8), min_size=before, max_size=before), label="ids seen"), dtype=np.int64), minlength=9)
    table = LiveTrunks(
        positions, np.cumsum([0, *sizes]).astype(np.int64), draw(sixteenths(n, 2, 64), label="M"),
        draw(inverse_norms(n), label="norms"), draw(sixteenths(m, 2, 64), label="Mbar"),
    )
    budget = draw(st.one_of(
        st.integers(1, 14).map(lambda count: Budget(count=count)),
        st.sampled_from([parse_budget("0.5"), parse_budget("0.3"), parse_budget("1.0")]),
    ), label="budget")
    return frozen_state(DecodeState(
        budget, before + len(waiting), draw(st.integers(0, 9), label="step"), table, draw(sixteenths(m), label="D"),
        draw(graphs(m, p.tau_edge), label="W"), np.flatnonzero(numbers), numbers[numbers > 0],
        draw(st.sampled_from([0.0, 0.5, 2.0]), label="mu"), draw(st.sampled_from([1.0, 0.25]), label="sigma"),
        tuple(waiting), tuple(norms.tolist()),
    ))


def random_state(rng: np.random.Generator, p: CrystalCacheParameters) -> DecodeState:
    """Return a state from a seed with edges, active trunks, a tail, and a budget below the number of tokens."""
    sizes = rng.integers(1, 5, int(rng.integers(3, 9)))
    n, m = int(sizes.sum()), len(sizes)
    positions = np.cumsum(rng.integers(1, 3, n))
    W = np.triu(rng.random((m, m)) < 0.5, 1) * rng.uniform(p.tau_edge + 0.001, 1.4, (m, m))
    seen, waiting = int(positions[-1]) + 1, rng.integers(0, 9, int(rng.integers(1, 7)))
    ids, counts = np.unique(rng.integers(0, 9, seen), return_counts=True)
    table = LiveTrunks(
        positions, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64), rng.uniform(0.1, 15, n),
        rng.uniform(0.2, 1, n), rng.uniform(0.1, 15, m),
    )
    return frozen_state(DecodeState(
        Budget(count=int(rng.integers(n // 2, n + len(waiting) + 1))), seen + len(waiting), int(rng.integers(0, 9)),
        table, rng.random(m), csr_of_matrix(W + W.T), ids, counts, 0.5, 0.5,
        tuple(waiting.tolist()), tuple(rng.uniform(0.2, 1, len(waiting)).tolist()),
    ))


def frozen_state(state: DecodeState) -> DecodeState:
    """Make the arrays of a state read-only, so that a write raises an error, and return the state."""
    for array in (state.D, state.ids, state.counts, *state.W, *vars(state.live).values()):
        array.flags.writeable = False
    return state
