"""Values that the paper prints, or that follow from its text."""

import math

import numpy as np
import pytest

from conformance import tolerances
from conformance.strategies.trunks import record
from reference.crystalcache.protection import protected_trunks
from spec.backend import CrystalStages
from spec.parameters import PAPER
from spec.records import Trunks


@pytest.mark.spec("CC-PROTECTED")
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


@pytest.mark.spec("CC-IMPACT")
def test_a_token_that_occurs_once_has_an_impact_of_5_956_or_more(stages: CrystalStages) -> None:
    """[5.956, 15.906] for c = 1, between the least and the greatest salience."""
    M = stages.impact(np.array([PAPER.M_min, PAPER.M_max]), np.array([1, 2]), PAPER)
    assert np.round(M, 3).tolist() == [5.956, 15.906]


@pytest.mark.spec("CC-TRUNK-WEIGHT")
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
