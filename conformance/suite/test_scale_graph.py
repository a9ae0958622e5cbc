"""Tests of S3, S4 and S5 at full size: ids and counts of any width, many trunks, hubs, extremes, ordered sums."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from conformance import tolerances
from conformance.checks import scale_checks as checks
from conformance.oracles.scale import stages as oracle
from conformance.strategies.numbers import Numbers
from conformance.strategies.scale_tables import Lists, blocks_of_edges, hub, lists, of_sizes, two_blocks
from spec.arrays import IntVector, Vector
from spec.backend import BreathStages, CrystalStages
from spec.parameters import PAPER, CrystalCacheParameters
from spec.records import CoAttention, TrunkGraph, Trunks

pytestmark = pytest.mark.usefixtures("compiled")

# The two ids of an entry become the same number in a type or a table of that width.
ALIKE = {
    "uint8": [3, 3 + 2**8], "table-of-1024": [5, 5 + 1_024], "uint16": [1, 65_537], "int16": [7, 7 + 2**15],
    "float32": [2**24, 2**24 + 1], "int32": [11, 11 + 2**31], "uint32": [9, 9 + 2**32], "float64": [2**53, 2**53 + 1],
    "int64": [2**62, 2**62 + 1], "a-million": [13, 1_000_013], "a-prime": [17, 17 + 2**31 - 1],
}


def right(stages: CrystalStages, ids: Any, form: str = "mixture") -> bool:
    ids = np.asarray(ids, dtype=np.int64)
    S = 0.1 + 19 * Numbers(2).fractions(len(ids))
    p = replace(PAPER, impact=form)  # type: ignore[arg-type]
    return tolerances.close("CC-IMPACT", stages.impact(S, ids, p), oracle.token_impact(S, oracle.counts(ids), p))


@pytest.mark.spec("CC-COUNT")
@pytest.mark.parametrize("width", ALIKE)
def test_ids_that_a_width_takes_for_one(stages: CrystalStages, width: str) -> None:
    a, b = ALIKE[width]
    assert right(stages, [a, b, 8, 8])
    assert right(stages, [b, a, b, b, a, 8, a, b] * 20)


@pytest.mark.spec("CC-COUNT")
@pytest.mark.parametrize("n", [
    16, 17, 32, 33, 41, 64, 65, 128, 129, 255, 256, 257, 1_024, 1_025, 65_535, 65_536, 65_537,
])
def test_one_id_so_often(stages: CrystalStages, n: int) -> None:
    """Check the count of an id that occurs n times between a first and a last token with different ids."""
    assert right(stages, [4, *[6] * n, 5])


@pytest.mark.spec("CC-COUNT")
@pytest.mark.parametrize("vocabulary", [16, 32_000, 65_536, 151_936, 2**24, 2**31, 2**33, 2**62])
def test_ids_of_a_vocabulary(stages: CrystalStages, vocabulary: int) -> None:
    """Check 100 000 tokens with frequent small ids, and ids that are spread over the vocabulary and occur once."""
    u = Numbers(vocabulary).fractions(100_000)
    assert right(stages, (vocabulary * u**6).astype(np.int64))
    assert right(stages, np.arange(0, vocabulary, max(1, vocabulary // 70_000))[:100_000])


@pytest.mark.spec("CC-IMPACT")
@pytest.mark.parametrize("form", ["mixture", "salience", "uniform"])
@pytest.mark.parametrize("n", [17, 33, 65, 129, 257, 1_025, 65_537])
def test_impact_of_every_token(stages: CrystalStages, form: str, n: int) -> None:
    assert right(stages, np.arange(n) % 700, form)


@pytest.mark.spec("CC-UNIT-IMPACT")
@pytest.mark.parametrize("n", [17, 33, 65, 129, 257, 1_025, 65_537])
def test_the_largest_salience_may_be_the_last(stages: CrystalStages, n: int) -> None:
    p, ids = replace(PAPER, impact="unit"), np.arange(n) % 97
    for at in (n - 1, n // 2, 0):
        S = Numbers(n).fractions(n)
        S[at] = 3.0
        assert tolerances.close("CC-IMPACT", stages.impact(S, ids, p), oracle.token_impact(S, oracle.counts(ids), p))


def widths() -> IntVector:
    """Return counts up to 300, and the counts around every power of two up to 2^40."""
    edges = [2**e + step for e in range(8, 41) for step in (-1, 0, 1)]
    return np.array([*range(1, 301), *edges], dtype=np.int64)


@pytest.mark.spec("CC-RARITY", "CC-COUNT")
@pytest.mark.parametrize("M_max", [20.0, 0.5])
def test_rarity_of_any_count(breath_stages: BreathStages, M_max: float) -> None:
    """Check M = M_max (S / M_max + U) / 2 for given counts, which need no tokens."""
    c, p = np.tile(widths(), 200), replace(PAPER, M_max=M_max, M_min=0.0)  # 80 000 counts
    S = np.full(len(c), 0.125)
    assert tolerances.close("CC-IMPACT", breath_stages.impact(S, c, p), oracle.token_impact(S, c, p))


@pytest.mark.spec("CC-RARITY-FORMS")
@pytest.mark.parametrize("form", ["reciprocal", "exponential"])
def test_rarity_forms_of_any_count(breath_stages: BreathStages, form: str) -> None:
    c, p = widths(), replace(PAPER, rarity=form, M_min=0.0)  # type: ignore[arg-type]
    S = np.zeros(len(c))
    actual, want = breath_stages.impact(S, c, p), oracle.token_impact(S, c, p)
    far = want < 1e-290  # Results near or below exp(-700) are rounded to fewer than 53 bits.
    assert tolerances.close("CC-IMPACT", actual[~far], want[~far])
    assert (actual[far] < 1e-280).all()


@pytest.mark.nightly
@pytest.mark.spec("CC-COUNT")
def test_more_tokens_than_float32_counts(stages: CrystalStages) -> None:
    """Check the count of 2^24 + 3 tokens of one id, which need about 2 GB."""
    assert right(stages, np.full(2**24 + 3, 7))


def trunks_of(m: int, seed: int) -> tuple[Any, Any, Any]:
    numbers = Numbers(seed)
    return numbers.fractions(m) * 0.25, 1 + 9 * numbers.fractions(m), numbers.integers(0, 9, m) == 0


def radius(M_bar: Any, alpha: float) -> float:
    return alpha * tolerances.normalised_radius(M_bar.tolist(), PAPER.epsilon)


TRUNKS = [15, 16, 17, 31, 33, 63, 65, 127, 129, 255, 257, 1_025, 65_537, 100_000]


@pytest.mark.spec("CC-NORMALISED-IMPACT")
@pytest.mark.parametrize("m", TRUNKS)
@pytest.mark.parametrize("at", ["first", "middle", "last"])
def test_extremes_anywhere(stages: CrystalStages, m: int, at: str) -> None:
    """Check that adjacent trunks with the least and the greatest impact set the scale, at any place.

    Protected trunks have a greater impact, which does not count.
    """
    D, M_bar, shut = trunks_of(m, m)
    place = {"first": 0, "middle": m // 2, "last": m - 2}[at]
    M_bar[[place, place + 1]] = 0.5, 15.0
    M_bar[shut] = 30.0
    shut[[place, place + 1]] = False
    M_bar[[place, place + 1]] = 0.5, 15.0
    p = replace(PAPER, alpha=2.0)
    actual, want = stages.score(D, M_bar, shut, p), oracle.score(D, M_bar, shut, p)
    assert np.isnan(actual[shut]).all()
    assert (np.abs(actual - want)[~shut] <= radius(M_bar[~shut], 2.0)).all()


@pytest.mark.spec("CC-SCORE")
@pytest.mark.parametrize("m", TRUNKS)
def test_the_greater_of_two_paths(stages: CrystalStages, m: int) -> None:
    """Check that the score is the greater of D and the impact, and equals D bit for bit if D is greater.

    D is larger in about half of the trunks. With alpha = 0, the score is D in all trunks.
    """
    D, M_bar, shut = trunks_of(m, m + 1)
    D[::2] += 0.75
    actual, want = stages.score(D, M_bar, shut, PAPER), oracle.score(D, M_bar, shut, PAPER)
    by_D = ~shut & (want == D)
    assert by_D.sum() > m // 8
    assert np.isnan(actual[shut]).all()
    assert (np.abs(actual - want)[~shut] <= radius(M_bar[~shut], 1.0)).all()
    assert (actual[by_D] == D[by_D]).all()
    alone = stages.score(D, M_bar, shut, replace(PAPER, alpha=0.0))
    assert np.array_equal(alone, np.where(shut, np.nan, D), equal_nan=True)


@dataclass(frozen=True)
class Case:
    """Neighbour lists, and the bound of the drawn trunk sizes. `largest` = 1 means single tokens."""

    name: str
    lists: Lists
    largest: int
    tau_edge: float = 0.05

    def __str__(self) -> str:
        return self.name


CASES = [
    Case("paper", Lists(12_000, 8, 4, 1024, near=False), 32),
    Case("pair-keys-beyond-2^31", Lists(46_400, 2, 1, 1024, near=False), 1),
    Case("pair-keys-beyond-2^32", Lists(70_000, 2, 2, 1024, near=False), 1),
    Case("long-trunks", Lists(40_000, 6, 3, 4096, near=False), 5_000, 0.0),
    Case("dense", Lists(2_500, 40, 24, 1024, near=False), 12, 0.0),
    Case("beyond-2^24", Lists(3_000, 5, 3, 256, 2**24 - 1_501, near=False), 9),
    Case("beyond-2^31", Lists(3_000, 5, 3, 256, 2**31 - 1_501, near=False), 9),
    Case("beyond-2^32", Lists(3_000, 5, 3, 256, 2**32 + 99, near=False), 9),
]


@dataclass(frozen=True)
class Judged:
    """Inputs and result of the graph stage."""

    given: CoAttention
    trunks: Trunks
    parameters: CrystalCacheParameters
    result: TrunkGraph


def judge(stages: CrystalStages, case: Case) -> Judged:
    shape = case.lists
    drawn = 1 + Numbers(4).integers(0, case.largest, shape.n)
    sizes = drawn[: int(np.searchsorted(np.cumsum(drawn), shape.n)) + 1].copy()
    sizes[-1] -= sizes.sum() - shape.n
    given, trunks = lists(shape), of_sizes(sizes, shape.start)
    p = replace(PAPER, C=shape.C, k_intra=shape.k_intra, k_cross=shape.k_cross, tau_edge=case.tau_edge)
    return Judged(given, trunks, p, stages.graph(given, trunks, p))


@pytest.fixture(scope="module", params=CASES, ids=str)
def outcome(request: pytest.FixtureRequest, stages: CrystalStages) -> Judged:
    return judge(stages, request.param)


@pytest.mark.spec("CC-TRUNK-EDGES", "CC-TRUNK-WEIGHT")
def test_the_pairs(outcome: Judged) -> None:
    assert not list(checks.pairs(outcome.result, outcome.given, outcome.trunks, outcome.parameters))


@pytest.mark.spec("CC-TRUNK-WEIGHT")
def test_the_weights(outcome: Judged) -> None:
    assert not list(checks.weights(outcome.result, outcome.given, outcome.trunks))


@pytest.mark.spec("CC-DEGREE")
def test_the_degrees(outcome: Judged) -> None:
    assert not list(checks.degrees(outcome.result))


@pytest.mark.spec("CC-CRYSTALLIZATION")
def test_D(outcome: Judged) -> None:
    assert not list(checks.D(outcome.result, outcome.parameters))


def row(result: TrunkGraph, g: int) -> Vector:
    return result.weights[result.indptr[g] : result.indptr[g + 1]]


@pytest.mark.spec("CC-DEGREE")
@pytest.mark.parametrize("n", [16, 17, 33, 65, 129, 257, 1_025, 65_537, 70_001])
@pytest.mark.parametrize("at", ["first", "last"])
def test_a_hub_of_all(stages: CrystalStages, n: int, at: str) -> None:
    """Check that the degree of a token linked to all others is the sum from left to right, bit for bit."""
    g = 0 if at == "first" else n - 1
    p = replace(PAPER, C=2**31 - 1, k_intra=1, k_cross=1)
    actual = stages.graph(hub(n, g), of_sizes([1] * n), p)
    assert actual.indptr[g + 1] - actual.indptr[g] == n - 1
    assert actual.degree[g] == oracle.in_order(row(actual, g))
    assert actual.degree.tolist() == oracle.degrees(actual.indptr, actual.weights).tolist()


@pytest.mark.spec("CC-TRUNK-EDGES")
@pytest.mark.parametrize("side", [2, 4, 8, 16, 32])
def test_weights_are_added_in_the_order_of_E(stages: CrystalStages, side: int) -> None:
    """Check that W is the mean of 4 to 1 024 edges of density 1 between two trunks, bit for bit.

    The graph has 24 pairs of trunks.
    """
    given, trunks = blocks_of_edges(side, 24)
    p = replace(PAPER, C=2**31 - 1, k_intra=side, k_cross=1)
    actual = stages.graph(given, trunks, p)
    E = oracle.edge_columns(given)
    want = [oracle.in_order(w) / side**2 for w in E.weight.reshape(24, side * side)]
    assert actual.weights[::2].tolist() == want
    assert actual.weights[1::2].tolist() == want


@pytest.mark.spec("CC-TRUNK-WEIGHT")
@pytest.mark.parametrize("size", [17, 129, 257, 1_025, 46_341, 65_537, 70_000])
def test_two_trunks_of_a_size(stages: CrystalStages, size: int) -> None:
    """Check the weight between two large trunks, which have twice as many edges as a trunk has tokens.

    The product of the sizes exceeds 2^31 from 46 341 tokens, and 2^32 from 65 537 tokens.
    """
    given, trunks = two_blocks(size)
    p = replace(PAPER, C=2**31 - 1, k_intra=1, k_cross=1, tau_edge=0.0, T_max=2**31 - 1)
    actual = stages.graph(given, trunks, p)
    mean = oracle.in_order(given.intra_weight.ravel()) / (2 * size)
    want = mean * math.sqrt(2 * size / size**2)
    assert tolerances.close("CC-TRUNK-WEIGHT", actual.weights, [want, want])


@pytest.mark.spec("CC-TRUNK-WEIGHT")
@pytest.mark.parametrize("m", [17, 33, 65, 257, 1_025, 65_537])
def test_the_prune_is_strict_everywhere(stages: CrystalStages, m: int) -> None:
    """Check that weights equal to tau_edge are removed from a chain of single tokens, at every place.

    Weights of the next float after tau_edge are kept.
    """
    n = m + 1
    index, heavy = np.arange(1, n + 1)[:, None], np.nextafter(0.25, 1)
    index[-1] = -1
    w = np.where(np.arange(n) % 3 == 0, 0.25, heavy)[:, None]
    w[-1] = 0.0
    given = CoAttention(0, np.ones(n), index, w, np.full((n, 1), -1), np.zeros((n, 1)))
    p = replace(PAPER, C=2**31 - 1, k_intra=1, k_cross=1, tau_edge=0.25)
    actual = stages.graph(given, of_sizes([1] * n), p)
    assert checks.upper(actual)[0].tolist() == [g for g in range(m) if g % 3]


def degrees_by_pairs(stages: CrystalStages, degree: Vector, p: CrystalCacheParameters) -> Vector:
    """Return D for the given degrees. Each degree occurs twice, as a pair of single tokens with one edge."""
    n = 2 * len(degree)
    index = np.where((np.arange(n) % 2 == 0) & (np.repeat(degree, 2) > 0), np.arange(n) + 1, -1)[:, None]
    w = np.where(index >= 0, np.repeat(degree, 2)[:, None], 0.0)
    given = CoAttention(0, np.ones(n), index, w, np.full((n, 1), -1), np.zeros((n, 1)))
    shape = replace(p, C=2**31 - 1, k_intra=1, k_cross=1, tau_edge=0.0)
    return stages.graph(given, of_sizes([1] * n), shape).D[::2]


@pytest.mark.spec("CC-CRYSTALLIZATION")
@pytest.mark.parametrize(("m", "rises"), [
    *((m, True) for m in (8, 9, 17, 33, 65, 129, 513, 32_769, 50_000)), *((m, False) for m in (17, 257, 65_537)),
])
def test_the_moments_are_of_all_trunks(stages: CrystalStages, m: int, rises: bool) -> None:
    """Check D for rising degrees, of which no part has the mean or the deviation of all degrees.

    In the other cases, one pair of trunks has an edge. Sigma falls with m, and the two ends have a D near 1.
    """
    degree = np.linspace(0.1, 0.9, m) ** 3 if rises else np.where(np.arange(m) == m - 1, 1.0, 0.0)
    want = oracle.crystallization(np.repeat(degree, 2), PAPER)[::2]
    radius = tolerances.crystallization_radius(np.repeat(degree, 2), PAPER.s, PAPER.epsilon)
    assert (np.abs(degrees_by_pairs(stages, degree, PAPER) - want) <= radius).all()


@pytest.mark.spec("CC-CRYSTALLIZATION")
def test_the_ablation_of_many_trunks(stages: CrystalStages) -> None:
    assert not degrees_by_pairs(stages, np.full(70_000, 0.5), replace(PAPER, graph="zero")).any()


@pytest.mark.spec("CC-TRUNK-EDGES")
def test_edges_of_far_trunks_count_in_both_directions(stages: CrystalStages) -> None:
    """Check the weight of 600 edges between two trunks of 300 tokens that chose each other, 90 000 tokens apart."""
    n, gap = 600, 90_000
    at = np.arange(n + gap)
    index = np.full((len(at), 1), -1)
    index[:300, 0], index[-300:, 0] = at[-300:], at[:300]
    w = np.where(index >= 0, 0.5, 0.0)
    given = CoAttention(0, np.ones(len(at)), index, w, np.full((len(at), 1), -1), np.zeros((len(at), 1)))
    p = replace(PAPER, C=2**31 - 1, k_intra=1, k_cross=1, tau_edge=0.0, T_max=2**31 - 1)
    sizes = [300, *[1] * gap, 300]
    actual = stages.graph(given, Trunks(np.cumsum([0, *sizes]), np.ones(len(sizes))), p)
    assert [x.tolist() for x in checks.upper(actual)[:2]] == [[0], [gap + 1]]
    assert tolerances.close("CC-TRUNK-WEIGHT", actual.weights, [0.5 * math.sqrt(600 / 90_000)] * 2)
