"""Figures that the papers print, and properties that do not hold, on the reference's functions."""

import math
from fractions import Fraction

import numpy as np
import pytest

from conformance.oracles import s6
from conformance.strategies.trunks import record
from conformance.suite.test_false_properties import evict
from reference.crystalcache.coattention import intra_neighbours, row_normalise
from reference.crystalcache.crystallization import crystallization
from reference.crystalcache.impact import rarity
from reference.crystalcache.protection import effective_budget, protected_trunks
from reference.crystalcache.trunks import split_sizes
from reference.memory import kv_bytes
from spec.backend import CrystalStages
from spec.budget import Budget, parse_budget
from spec.parameters import PAPER
from spec.records import Trunks

pytestmark = pytest.mark.usefixtures("reference_items")

KIB, GIB = 2**10, 2**30


@pytest.mark.spec("CC-RARITY")
@pytest.mark.parametrize(("count", "U"), [(1, 0.591), (10, 0.294), (100, 0.178)])
def test_rarity_of_a_few_counts(count: int, U: float) -> None:
    """Section 3.4, with its .295 corrected: 1 / (1 + ln 11) = .2943."""
    assert round(float(rarity(np.array([count]))[0]), 3) == U


@pytest.mark.spec("CC-MEMORY")
def test_a_token_of_llama_3_1_8b_takes_128_kib() -> None:
    """Eq. 1: L = 32, H_kv = 8, d = 128, bf16; 16 GiB at 128K (the paper's "GB" is GiB)."""
    assert kv_bytes(L=32, H_kv=8, d=128, n=1, batch=1, b=2) == 128 * KIB
    assert kv_bytes(L=32, H_kv=8, d=128, n=128 * 1024, batch=1, b=2) == 16 * GIB


@pytest.mark.spec("CC-MEMORY")
@pytest.mark.parametrize("batch", [1, 2, 7])
def test_memory_is_linear_in_the_batch(batch: int) -> None:
    """Eq. 4 is Eq. 1 times the batch."""
    one = kv_bytes(L=3, H_kv=2, d=8, n=11, batch=1, b=4)
    assert kv_bytes(L=3, H_kv=2, d=8, n=11, batch=batch, b=4) == batch * one == batch * 2 * 3 * 2 * 8 * 11 * 4


@pytest.mark.spec("CC-SPLIT")
@pytest.mark.parametrize(
    ("size", "sizes"),
    [(67, [23, 22, 22]), (95, [32, 32, 31]), (32, [32]), (33, [17, 16]), (64, [32, 32]), (65, [22, 22, 21])],
)
def test_split_sizes(size: int, sizes: list[int]) -> None:
    """Larger pieces first, none above T_max = 32."""
    assert split_sizes(size, 32) == sizes


@pytest.mark.spec("CC-TRUNK-EDGES", "CC-INTRA")
def test_a_trunk_weight_can_reach_the_root_of_2(stages: CrystalStages) -> None:
    """Rows (1, 0, 0), (.5, .5, 0), (.5, .5, 0): the last two are mutual neighbours with cosine 1."""
    rows = np.array([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.5, 0.5, 0.0]])
    index, weight = intra_neighbours(row_normalise(rows, PAPER.epsilon), PAPER)
    intra = [[(j, w) for j, w in zip(*row, strict=True) if j >= 0]
             for row in zip(index.tolist(), weight.tolist(), strict=True)]
    graph = stages.graph(
        record([1.0] * 3, intra, [[], [], []], 8, 4), Trunks(np.arange(4), np.ones(3)), PAPER
    )
    W = dict(zip(graph.indices[graph.indptr[1] : graph.indptr[2]].tolist(),
                 graph.weights[graph.indptr[1] : graph.indptr[2]].tolist(), strict=True))
    assert round(W[2], 5) == round(math.sqrt(2), 5)


@pytest.mark.spec("CC-PROTECTED")
def test_protected_trunks_hold_at_most_194_tokens() -> None:
    """N_sink + W_recent + 2 (T_max - 1), and the bound is attained."""
    n, T = 1000, PAPER.T_max
    last = n - PAPER.W_recent + 1
    sizes = np.diff([0, 3, 3 + T, last - T, last, n])
    offsets = np.array([0, 3, 3 + T, last - T, *range(last, n, T), n])
    found = protected_trunks(offsets, n, PAPER.N_sink, PAPER.W_recent)
    assert sizes[1] == sizes[3] == T
    assert int(np.diff(offsets)[found].sum()) == 194 == PAPER.N_sink + PAPER.W_recent + 2 * (T - 1)


@pytest.mark.spec("CC-BUDGET")
@pytest.mark.parametrize(
    ("beta", "n", "B"), [("3/10", 100, 132), ("3/10", 200, 132), ("1/2", 1001, 501), ("7/25", 25, 132)]
)
def test_budgets_have_a_floor(beta: str, n: int, B: int) -> None:
    """Eq. 30 at its floor: n = 100 and 200 at .3 both give 132."""
    share = Fraction(beta)
    assert effective_budget(Budget(fraction=share), n, PAPER.N_sink, PAPER.W_recent) == B
    assert s6.effective_budget(share, n, PAPER.N_sink, PAPER.W_recent) == B


@pytest.mark.spec("CC-BUDGET")
@pytest.mark.parametrize(("n", "B"), [(100, 132), (200, 132)])
def test_the_budget_is_not_beta_n_on_short_prompts(n: int, B: int) -> None:
    """FC3: beta = .3 keeps all of 100 tokens, and 132 of 200 rather than 60."""
    assert effective_budget(parse_budget(0.3), n, PAPER.N_sink, PAPER.W_recent) == B


@pytest.mark.spec("CC-CRYSTALLIZATION")
def test_the_highest_degree_is_no_guarantee() -> None:
    """FC6: 99 trunks share the top degree and have D = .623; an isolated one among a hub's peers has .461."""
    assert np.round(crystallization(np.array([1.0] * 99 + [0.0]), 5.0, 1e-8)[0], 3) == 0.623
    assert np.round(crystallization(np.array([1.0] + [0.0] * 1000), 5.0, 1e-8)[1], 3) == 0.461


@pytest.mark.spec("CC-CRYSTALLIZATION")
def test_raising_a_degree_may_evict_its_trunk(stages: CrystalStages) -> None:
    """FC8: from 1.3 to 1.7 the spread shrinks and the others rise from D = .972 to .995; M~ = .984 is overtaken."""
    others = [1.9, 1.8, 1.9, 1.8]
    before, after = (crystallization(np.array([own, *others]), 5.0, 1e-8) for own in (1.3, 1.7))
    ratios = []
    for D in (before, after):
        scores = [max(float(D[0]), 0.984), *D[1:].tolist()]
        ratios.append(evict(stages, [4] * 5, scores, 8).ratio[0])
    assert ratios == [1.0, 0.0]
