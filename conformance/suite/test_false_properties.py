"""Counterexamples to claims of the paper's prose, and to properties that are plausible but false.

None of these claims may become a property. A change that makes one of these tests fail has changed the method.
"""

from dataclasses import replace

import numpy as np
import pytest

from conformance.strategies.trunks import record
from reference.crystalcache.protection import protected_trunks
from spec.backend import BreathStages, CrystalStages
from spec.decode import TrunkWeights
from spec.parameters import PAPER, TINY, CrystalCacheParameters
from spec.records import Dissolution, Trunks

OPEN = replace(PAPER, N_sink=0, W_recent=0)


def evict(
    stages: CrystalStages, sizes: list[int], score: list[float], B: int, p: CrystalCacheParameters = OPEN,
) -> Dissolution:
    trunks = Trunks(np.cumsum([0, *sizes]), np.ones(len(sizes)))
    n = sum(sizes)
    free = np.zeros(len(sizes), dtype=np.bool_)
    return stages.dissolve(np.array(score), trunks, np.ones(n), np.ones(len(sizes)), free, B, p)


def score(stages: CrystalStages, D: list[float], M_bar: list[float]) -> list[float]:
    return stages.score(np.array(D), np.array(M_bar), np.zeros(len(D), dtype=np.bool_), PAPER).tolist()


@pytest.mark.spec("CC-ALLOCATE")
def test_loss_is_not_proportional_to_the_score(stages: CrystalStages) -> None:
    """Check FC1: ten trunks of ten tokens at B = 45. Five are evicted wholly, one in part, and four are kept."""
    actual = evict(stages, [10] * 10, [g / 16 for g in range(10)], 45)
    assert actual.ratio.tolist() == [0.0] * 5 + [0.5] + [1.0] * 4


@pytest.mark.spec("CC-ALLOCATE")
def test_a_kept_trunk_may_hold_fewer_than_N_min_tokens(stages: CrystalStages) -> None:
    """Check FC2: trunks of one or two tokens are kept whole."""
    assert evict(stages, [4, 2], [0.0, 1.0], 2).kept.tolist() == [4, 5]


@pytest.mark.spec("CC-PROTECTED")
def test_the_protected_set_may_exceed_the_budget(stages: CrystalStages) -> None:
    """Check FC4: protection counts all tokens of the protected trunks, which can be more than 132.

    Here 8 of 10 are protected at B = 5.
    """
    p = replace(TINY, N_sink=1, W_recent=1)
    offsets = np.array([0, 4, 6, 10])
    protected = protected_trunks(offsets, 10, p.N_sink, p.W_recent)
    actual = stages.dissolve(
        np.array([np.nan, 0.5, np.nan]), Trunks(offsets, np.ones(3)), np.ones(10), np.ones(3), protected, 5, p
    )
    assert actual.kept.tolist() == [0, 1, 2, 3, 6, 7, 8, 9]


@pytest.mark.spec("CC-SPLIT")
def test_the_split_does_not_bound_the_number_of_trunks(stages: CrystalStages) -> None:
    """Check FC5: a text of full stops has one trunk for each token."""
    n = 50
    actual = record([1.0] * n, [[] for _ in range(n)], [[] for _ in range(n)], 8, 4)
    assert len(stages.trunks(actual, np.ones(n), np.ones(n, dtype=np.bool_), PAPER).impact) == n


@pytest.mark.spec("CC-NORMALISED-IMPACT")
def test_two_evictions_are_not_one(stages: CrystalStages) -> None:
    """Check FC9: eviction from 12 to 8 to 4 tokens keeps trunk 0, and eviction from 12 to 4 keeps trunk 2.

    The range of M~ changes after the first eviction.
    """
    D, M_bar = [0.82, 0.74, 0.45], [5.3, 1.4, 5.3]
    direct = evict(stages, [4] * 3, score(stages, D, M_bar), 4)
    first = evict(stages, [4] * 3, score(stages, D, M_bar), 8)
    alive = np.flatnonzero(first.ratio).tolist()
    second = evict(stages, [4] * 2, score(stages, [D[g] for g in alive], [M_bar[g] for g in alive]), 4)
    assert direct.ratio.tolist() == [0, 0, 1]
    assert [alive[g] for g in np.flatnonzero(second.ratio)] == [0]


@pytest.mark.spec("CC-NORMALISED-IMPACT")
def test_a_low_outlier_squashes_the_rest_towards_one(stages: CrystalStages) -> None:
    """Check FC10: impacts (1, 8 .. 12) have M~ (0, .80 .. 1). Without the outlier, the other trunks have 0 .. 1."""
    rest = [8.0, 9.0, 10.0, 11.0, 12.0]
    with_outlier = score(stages, [0.0] * 6, [1.0, *rest])
    assert round(with_outlier[1], 2) == 0.80
    assert score(stages, [0.0] * 5, rest)[0] == 0


@pytest.mark.spec("CC-TRUNK-WEIGHT")
@pytest.mark.parametrize(("size", "weight", "edges"), [(15, 0.74, 0), (15, 0.76, 2), (20, 1.0, 0)])
def test_a_single_cross_chunk_edge_does_not_link_two_trunks(
    stages: CrystalStages, size: int, weight: float, edges: int,
) -> None:
    """Check FC12: a single edge between trunks of 15 tokens needs a mean weight over heads above .75.

    For trunks of 20 tokens, no weight suffices.
    """
    n = 2 * size
    cross: list[list[tuple[int, float]]] = [[] for _ in range(n)]
    cross[size] = [(0, weight)]
    actual = record([1.0] * n, [[] for _ in range(n)], cross, 8, 4)
    graph = stages.graph(actual, Trunks(np.array([0, size, n]), np.ones(2)), PAPER)
    assert len(graph.weights) == edges


@pytest.mark.spec("CC-SCORE")
def test_uniform_impact_adds_no_constant(stages: CrystalStages) -> None:
    """Check FC13: the constant is 0, so the score is D."""
    assert score(stages, [0.25, 0.0, 1.0], [1.0, 1.0, 1.0]) == [0.25, 0.0, 1.0]


@pytest.mark.spec("CC-EDGES")
def test_a_token_may_stand_in_every_edge(stages: CrystalStages) -> None:
    """Check FC16: k_intra + k_cross bounds the edges that a token owns, not the edges to the token."""
    p = replace(TINY, C=1, tau_cross=0.0, k_cross=1)
    q, k = np.zeros((1, 9, 2)), np.ones((1, 9, 2))
    k[0, 0] = 9
    q[:] = 1
    actual = stages.coattention(q, k, np.arange(9), p, 1.0, None)
    assert actual.edges().first.tolist() == [0] * 8


@pytest.mark.spec("CC-ALLOCATE")
def test_half_of_the_tokens_need_not_remain(stages: CrystalStages) -> None:
    """Check FC17: at B = 501 of 1001 tokens, a remnant of two tokens is evicted, and 499 tokens are kept."""
    sizes = [502, *[31] * 16, 3]
    actual = evict(stages, sizes, [0.0, *[1.0] * 17], 501)
    assert (sum(sizes), len(actual.kept)) == (1001, 499)


@pytest.mark.spec("CC-ALLOCATE")
def test_a_small_trunk_goes_whole_for_one_token(stages: CrystalStages) -> None:
    """Check FC18: for |g| = 3 and c = 1, three tokens are evicted."""
    assert evict(stages, [3, 4], [0.0, 1.0], 6).kept.tolist() == [3, 4, 5, 6]


@pytest.mark.spec("CC-COUNT")
def test_more_mentions_make_a_fact_less_rare(stages: CrystalStages) -> None:
    """Check FC20: two mentions have the impact 1/2 + 10 U(2), and six have 1/2 + 10 U(6)."""
    S = np.full(7, 1.0)
    sparse = stages.impact(S, np.array([5, 5, 1, 2, 3, 4, 6]), PAPER)[0]
    dense = stages.impact(S, np.array([5, 5, 5, 5, 5, 5, 6]), PAPER)[0]
    assert np.round([sparse, dense], 2).tolist() == [5.27, 3.89]


def after_breaths(stages: BreathStages, D: float, M_bar: float, breaths: int) -> float:
    """Return D of an isolated trunk that is active at every breath: T_breath decays, then its own pulse."""
    alone = TrunkWeights(np.zeros(2, dtype=np.int64), np.empty(0, dtype=np.int64), np.empty(0))
    now, impact, active = np.array([D]), np.array([M_bar]), np.ones(1, dtype=np.bool_)
    for _ in range(breaths):
        for _ in range(PAPER.T_breath):
            now = stages.decay(now, impact, PAPER)
        now = stages.resonance(now, alone, active, PAPER)
    return float(now[0])


@pytest.mark.spec("CC-RESONANCE", "CC-DECAY")
def test_resonance_does_not_hold_a_trunk_up(breath_stages: BreathStages) -> None:
    """Check FC15: a trunk of impact 10.75 that is active at every breath falls from D = 1 to 0.17.

    With an impact of 11, D can stay above 0.83.
    """
    assert 0.15 < after_breaths(breath_stages, 1.0, 4.0, 100) < 0.17
    assert 0.15 < after_breaths(breath_stages, 1.0, 10.75, 300) < 0.175
    assert after_breaths(breath_stages, 1.0, 11.0, 100) > 0.83
    assert after_breaths(breath_stages, 0.5, 11.0, 100) < 0.2


@pytest.mark.spec("CC-HEBB")
def test_edges_between_active_trunks_may_weaken(breath_stages: BreathStages) -> None:
    """Check FC19: the additive multiset makes weights above 1, which min(1, W + eta) reduces to 1."""
    W = TrunkWeights(np.array([0, 1, 2]), np.array([1, 0]), np.full(2, 2**0.5))
    both = np.ones(2, dtype=np.bool_)
    assert breath_stages.hebbian(W, both, PAPER).weights.tolist() == [1.0, 1.0]
    still = replace(PAPER, eta_Hebb=0.0, gamma_decay=1.0)
    assert breath_stages.hebbian(W, both, still).weights.tolist() != W.weights.tolist()
