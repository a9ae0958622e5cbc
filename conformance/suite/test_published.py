"""Values that the paper prints, or that follow from its text."""

import math
from fractions import Fraction

import numpy as np
import pytest

from conformance import tolerances
from conformance.oracles import s6
from conformance.strategies.trunks import record
from reference.crystalcache.coattention import intra_neighbours, row_normalise
from reference.crystalcache.impact import rarity
from reference.crystalcache.protection import effective_budget, protected_trunks
from reference.crystalcache.trunks import split_sizes
from reference.memory import kv_bytes
from spec.backend import CrystalStages
from spec.budget import Budget
from spec.parameters import PAPER
from spec.records import Trunks

KIB, GIB = 2**10, 2**30


@pytest.mark.spec(id="CC-RARITY")
@pytest.mark.usefixtures("reference_items")
@pytest.mark.parametrize(("count", "U"), [(1, 0.591), (10, 0.294), (100, 0.178)])
def test_rarity_of_a_few_counts(count: int, U: float) -> None:
    """Section 3.4, with its .295 corrected: 1 / (1 + ln 11) = .2943."""
    assert round(float(rarity(np.array([count]))[0]), 3) == U


@pytest.mark.spec(id="CC-MEMORY")
def test_a_token_of_llama_3_1_8b_takes_128_kib() -> None:
    """Eq. 1: L = 32, H_kv = 8, d = 128, bf16; 16 GiB at 128K (the paper's "GB" is GiB)."""
    assert kv_bytes(L=32, H_kv=8, d=128, n=1, batch=1, b=2) == 128 * KIB
    assert kv_bytes(L=32, H_kv=8, d=128, n=128 * 1024, batch=1, b=2) == 16 * GIB


@pytest.mark.spec(id="CC-MEMORY")
@pytest.mark.parametrize("batch", [1, 2, 7])
def test_memory_is_linear_in_the_batch(batch: int) -> None:
    """Eq. 4 is Eq. 1 times the batch."""
    one = kv_bytes(L=3, H_kv=2, d=8, n=11, batch=1, b=4)
    assert kv_bytes(L=3, H_kv=2, d=8, n=11, batch=batch, b=4) == batch * one == batch * 2 * 3 * 2 * 8 * 11 * 4


@pytest.mark.spec(id="CC-SPLIT")
@pytest.mark.usefixtures("reference_items")
@pytest.mark.parametrize(
    ("size", "sizes"),
    [(67, [23, 22, 22]), (95, [32, 32, 31]), (32, [32]), (33, [17, 16]), (64, [32, 32]), (65, [22, 22, 21])],
)
def test_split_sizes(size: int, sizes: list[int]) -> None:
    """Larger pieces first, none above T_max = 32."""
    assert split_sizes(size, 32) == sizes


@pytest.mark.spec(id="CC-TRUNK-EDGES")
@pytest.mark.spec(id="CC-INTRA")
@pytest.mark.usefixtures("reference_items")
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


@pytest.mark.spec(id="CC-PROTECTED")
def test_150_tokens_can_all_be_protected(stages: CrystalStages) -> None:
    """B = 132 at beta = .5, c_0 = 18, and nothing may be evicted: all 150 stay, no error."""
    offsets = np.array([0, 18, 50, 75, 100, 125, 150])
    protected = protected_trunks(offsets, 150, PAPER.N_sink, PAPER.W_recent)
    trunks = Trunks(offsets, np.ones(6))
    score = stages.score(np.ones(6), trunks.impact, protected, PAPER)
    found = stages.dissolve(score, trunks, np.ones(150), np.ones(6), protected, 132, PAPER)
    assert protected.all()
    assert np.isnan(score).all()
    assert found.kept.tolist() == list(range(150))
    assert found.ratio.tolist() == [1.0] * 6


@pytest.mark.spec(id="CC-PROTECTED")
def test_protected_trunks_hold_at_most_194_tokens() -> None:
    """N_sink + W_recent + 2 (T_max - 1), and the bound is attained."""
    n, T = 1000, PAPER.T_max
    last = n - PAPER.W_recent + 1
    sizes = np.diff([0, 3, 3 + T, last - T, last, n])
    offsets = np.array([0, 3, 3 + T, last - T, *range(last, n, T), n])
    found = protected_trunks(offsets, n, PAPER.N_sink, PAPER.W_recent)
    assert sizes[1] == sizes[3] == T
    assert int(np.diff(offsets)[found].sum()) == 194 == PAPER.N_sink + PAPER.W_recent + 2 * (T - 1)


@pytest.mark.spec(id="CC-BUDGET")
@pytest.mark.parametrize(
    ("beta", "n", "B"), [("3/10", 100, 132), ("3/10", 200, 132), ("1/2", 1001, 501), ("7/25", 25, 132)]
)
def test_budgets_have_a_floor(beta: str, n: int, B: int) -> None:
    """Eq. 30 at its floor: n = 100 and 200 at .3 both give 132."""
    share = Fraction(beta)
    assert effective_budget(Budget(fraction=share), n, PAPER.N_sink, PAPER.W_recent) == B
    assert s6.effective_budget(share, n, PAPER.N_sink, PAPER.W_recent) == B


@pytest.mark.spec(id="CC-IMPACT")
def test_a_token_that_occurs_once_has_an_impact_of_5_956_or_more(stages: CrystalStages) -> None:
    """[5.956, 15.906] for c = 1, between the least and the greatest salience."""
    M = stages.impact(np.array([PAPER.M_min, PAPER.M_max]), np.array([1, 2]), PAPER)
    assert np.round(M, 3).tolist() == [5.956, 15.906]


@pytest.mark.spec(id="CC-TRUNK-WEIGHT")
@pytest.mark.parametrize(("edges", "w", "W"), [(64, 0.31, 0.248), (4, 0.9, 0.18)])
def test_many_weak_edges_outweigh_a_few_strong_ones(stages: CrystalStages, edges: int, w: float, W: float) -> None:
    """B.1.10: 10 x 10 tokens, 64 edges at .31 against 4 at .9: the paper's prose says the contrary."""
    intra: list[list[tuple[int, float]]] = [[] for _ in range(20)]
    for edge in range(edges):
        intra[edge % 10].append((10 + edge // 10, w))
    found = record([1.0] * 20, intra, [[] for _ in range(20)], 8, 4)
    graph = stages.graph(found, Trunks(np.array([0, 10, 20]), np.ones(2)), PAPER)
    assert tolerances.close("CC-TRUNK-WEIGHT", graph.weights, [w * math.sqrt(edges / 100)] * 2)
    assert round(float(graph.weights[0]), 3) == W
