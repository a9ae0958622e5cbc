"""States of decode, graphs between trunks, and trunk tables with gaps."""

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from conformance.strategies.numbers import LIVE_SIZE, LIVE_TRUNKS, small_parameters
from spec.arrays import BoolVector, Matrix, Vector
from spec.budget import Budget, parse_budget
from spec.decode import DecodeState, LiveTrunks, TrunkWeights
from spec.parameters import CrystalCacheParameters

ENDS = frozenset({2, 7})


def ends() -> frozenset[int]:
    """Ids that end a sentence, of an alphabet of nine."""
    return ENDS


def sixteenths(m: int, low: int = 0, high: int = 16) -> st.SearchStrategy[Vector]:
    """m dyadic numbers, so that products and sums are often exact and ties are common."""
    return st.lists(st.integers(low, high), min_size=m, max_size=m).map(lambda found: np.array(found) / 16)


def flags(m: int) -> st.SearchStrategy[BoolVector]:
    return st.lists(st.booleans(), min_size=m, max_size=m).map(lambda found: np.array(found, dtype=np.bool_))


@st.composite
def graphs(draw: st.DrawFn, m: int, tau_edge: float = 0.05) -> TrunkWeights:
    """A symmetric graph of m trunks: chains, cliques, isolated trunks; weights up to 1.375, all above tau_edge."""
    W = np.zeros((m, m))
    for a in range(m):
        for b in range(a):
            if draw(st.sampled_from([True, False, False]), label="edge"):
                W[a, b] = W[b, a] = draw(st.integers(int(tau_edge * 16) + 1, 22), label="sixteenths") / 16
    return csr_of_matrix(W)


def csr_of_matrix(W: Matrix) -> TrunkWeights:
    """The entries above 0, row by row."""
    row, column = np.nonzero(W)
    indptr = np.concatenate([[0], np.cumsum((W > 0).sum(axis=1))]).astype(np.int64)
    return TrunkWeights(indptr, column.astype(np.int64), W[row, column])


def inverse_norms(n: int) -> st.SearchStrategy[Vector]:
    """Positive values in eighths, and now and then a zero key's infinity."""
    value = st.one_of(st.integers(1, 16).map(lambda x: x / 8), st.just(float("inf")))
    return st.lists(value, min_size=n, max_size=n).map(lambda found: np.array(found, dtype=np.float64))


@st.composite
def decode_parameters(draw: st.DrawFn) -> CrystalCacheParameters:
    """Small values of everything, with every constant of decode at its ends too."""
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
    """Any state that decode could have made: trunks with gaps, dead ones gone, a tail or none."""
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
    """A state from a seed in which everything is there: edges, active trunks, a tail, and a budget that binds."""
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
    """The same state with read-only arrays: whatever writes into one fails."""
    for array in (state.D, state.ids, state.counts, *state.W, *vars(state.live).values()):
        array.flags.writeable = False
    return state
