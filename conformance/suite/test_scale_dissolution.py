"""Tests of S6 at full size: thousands of ties, partial trunks of any length, budgets above 2^24."""

from dataclasses import replace

import numpy as np
import pytest

from conformance import tolerances
from conformance.checks import stage_checks
from conformance.oracles.scale import stages as oracle
from conformance.strategies.numbers import Numbers
from conformance.strategies.scale_tables import Eviction, eviction, of_sizes
from conformance.strategies.trunks import EvictionProblem
from spec.backend import CrystalStages
from spec.parameters import PAPER
from spec.records import Dissolution

pytestmark = pytest.mark.usefixtures("compiled")

CASES = [
    Eviction("all-scores-tie", 5_000, 20, 0.5, 1, 3),
    Eviction("few-scores", 3_000, 32, 0.3, 7, 5, protected=11),
    Eviction("paper-at-32k", 2_100, 31, 0.5, 1_000, 40, protected=20),
    Eviction("single-tokens", 70_000, 1, 0.4, 3, 2),
    Eviction("more-trunks-than-2^16", 66_000, 6, 0.7, 65_000, 9, protected=300),
    Eviction("long-trunks", 60, 4_000, 0.45, 5, 3, protected=9),
    Eviction("wide-N_min", 900, 300, 0.6, 4, 6, N_min=150),
    Eviction("little-stays", 4_000, 25, 0.01, 2, 2),
    Eviction("little-goes", 4_000, 25, 0.99, 2, 2),
    Eviction("protected-above-budget", 3_000, 20, 0.2, 5, 5, protected=2),
    Eviction("nothing-goes", 3_000, 20, 1.0, 5, 5),
    Eviction("beyond-2^24", 700, 20, 0.5, 4, 3, start=2**24 - 3_001),
    Eviction("beyond-2^31", 700, 20, 0.5, 4, 3, start=2**31 - 3_001),
    Eviction("beyond-2^32", 700, 20, 0.5, 4, 3, start=2**32 + 5),
]
SIZES = [15, 16, 17, 31, 32, 33, 40, 41, 63, 65, 127, 129, 255, 257, 1_023, 1_025, 65_535, 65_537, 100_000]


def expected(p: EvictionProblem) -> oracle.Dissolved:
    return oracle.dissolve(p.score, p.trunks.offsets, p.impact, p.D, p.protected, p.budget, p.parameters.N_min)


def judge(stages: CrystalStages, case: Eviction) -> tuple[EvictionProblem, Dissolution, oracle.Dissolved]:
    problem = eviction(case, replace(PAPER, N_min=case.N_min))
    return problem, problem.run(stages), expected(problem)


Judged = tuple[EvictionProblem, Dissolution, oracle.Dissolved]


@pytest.fixture(scope="module", params=CASES, ids=str)
def outcome(request: pytest.FixtureRequest, stages: CrystalStages) -> Judged:
    return judge(stages, request.param)


@pytest.mark.spec("CC-DISSOLVE")
def test_the_kept_positions(outcome: Judged) -> None:
    """Check the kept positions. Ties of trunks go by the trunk index, ties in the partial trunk by the position."""
    problem, actual, want = outcome
    assert np.array_equal(actual.kept, want.kept + int(problem.trunks.offsets[0]))


@pytest.mark.spec("CC-ALLOCATE")
def test_the_ratios(outcome: Judged) -> None:
    _, actual, want = outcome
    assert np.array_equal(actual.ratio, want.ratio)


@pytest.mark.spec("CC-DISSOLVE-D")
def test_D_after(outcome: Judged) -> None:
    _, actual, want = outcome
    assert tolerances.close("CC-DISSOLVE-D", actual.D, want.D)


def equal_trunks(m: int, size: int, B: int) -> EvictionProblem:
    """Return an eviction problem with m trunks of equal size, score and impact."""
    n = m * size
    return EvictionProblem(
        np.full(m, 0.5), of_sizes([size] * m), np.ones(n), np.full(m, 0.5), np.zeros(m, dtype=np.bool_), B, PAPER
    )


@pytest.mark.spec("CC-DISSOLVE")
@pytest.mark.parametrize("m", SIZES)
def test_of_tied_trunks_the_first_go(stages: CrystalStages, m: int) -> None:
    """Check that the first third is evicted, if a third of m tied trunks must be evicted."""
    actual = equal_trunks(m, 2, 2 * (m - m // 3)).run(stages)
    assert np.array_equal(actual.kept, np.arange(2 * (m // 3), 2 * m))


@pytest.mark.spec("CC-DISSOLVE")
@pytest.mark.parametrize("size", SIZES)
def test_of_tied_members_the_first_stay(stages: CrystalStages, size: int) -> None:
    """Check a partial trunk whose members have equal impacts, or of which every third has a larger impact."""
    problem = equal_trunks(3, size, 2 * size - 4)
    stays = size - 4
    assert np.array_equal(problem.run(stages).kept, np.arange(size, 3 * size)[np.r_[:stays, size : 2 * size]])
    M = np.where(np.arange(3 * size) % 3 == 0, 2.0, 1.0)
    few = replace(problem, impact=M, budget=size + size // 2)
    assert np.array_equal(few.run(stages).kept, expected(few).kept)


@pytest.mark.spec("CC-KEEP-COUNT")
@pytest.mark.parametrize("size", SIZES)
def test_a_partial_trunk_keeps_what_the_cut_leaves(stages: CrystalStages, size: int) -> None:
    """Check that |g| - c members are kept for small and large c, down to N_min, and that r is (|g| - c) / |g|."""
    for c in sorted({1, 2, size // 3, size // 2, size - 4, size - 3}):
        problem = replace(equal_trunks(1, size, size - c), impact=-np.arange(size, dtype=np.float64) % 7)
        actual = problem.run(stages)
        assert len(actual.kept) == size - c
        assert actual.ratio.tolist() == [(size - c) / size]
        assert np.array_equal(actual.kept, expected(problem).kept)


@pytest.mark.spec("CC-DISSOLVE")
@pytest.mark.parametrize("m", [40, 300, 5_000, 66_000])
@pytest.mark.parametrize("step", [2.0**-30, 2.0**-45, 2.0**-52])
def test_scores_that_float32_takes_for_one(stages: CrystalStages, m: int, step: float) -> None:
    """Check that the last trunks are evicted, if scores fall with the index by less than float32 resolves."""
    scores = np.array([1 - g * step for g in range(m)])
    problem = replace(equal_trunks(m, 2, 2 * (m - m // 3)), score=scores)
    assert np.array_equal(problem.run(stages).kept, np.arange(2 * (m - m // 3)))


@pytest.mark.spec("CC-DISSOLVE")
@pytest.mark.parametrize("size", [40, 300, 5_000, 66_000])
def test_impacts_that_float32_takes_for_one(stages: CrystalStages, size: int) -> None:
    """Check that the last tokens are kept, if M_i rises with the position by less than float32 resolves."""
    M = np.array([1 + i * 2.0**-45 for i in range(size)])
    problem = replace(equal_trunks(1, size, size // 2), impact=M)
    assert np.array_equal(problem.run(stages).kept, np.arange(size - size // 2, size))


@pytest.mark.spec("CC-CUT", "CC-ALLOCATE")
def test_a_budget_beyond_2_to_24(stages: CrystalStages) -> None:
    """Check B = 2^24 + 1, which float32 cannot hold, for 2^24 + 999 tokens in 1 000 trunks.

    998 tokens of one trunk are evicted.
    """
    n, B = 2**24 + 999, 2**24 + 1
    sizes = np.full(1_000, n // 1_000)
    sizes[: n % 1_000] += 1
    problem = EvictionProblem(
        Numbers(1).permutation(1_000) / 1_000, of_sizes(sizes), np.ones(n), np.full(1_000, 0.5),
        np.zeros(1_000, dtype=np.bool_), B, PAPER,
    )
    actual = problem.run(stages)
    assert len(actual.kept) == B
    g = int(np.argmin(problem.score))
    assert np.flatnonzero(actual.ratio < 1).tolist() == [g]
    assert actual.ratio[g] == (sizes[g] - 998) / sizes[g]
    assert actual.kept[-1] == n - 1


@pytest.mark.spec("CC-CUT")
@pytest.mark.parametrize("B", [2**16 + 1, 2**24 + 1, 2**31 - 1, 2**31 + 5, 2**32, 2**32 + 7, 2**53 + 1])
def test_a_budget_far_above_the_prompt(stages: CrystalStages, B: int) -> None:
    """Check that no token is evicted, for budgets of any width."""
    problem = replace(eviction(Eviction("some", 300, 20, 1.0, 4, 3, protected=9), PAPER), budget=B)
    actual = problem.run(stages)
    assert np.array_equal(actual.kept, np.arange(len(problem.impact)))
    assert actual.D.tolist() == problem.D.tolist()


@pytest.mark.spec("CC-ALLOCATE")
@pytest.mark.parametrize("N_min", [17, 33, 65, 129, 257, 1_025, 65_537, 2**24 + 1, 2**31 - 1])
def test_fewest_tokens_of_a_partial_trunk(stages: CrystalStages, N_min: int) -> None:
    """Check that a partial trunk keeps at least N_min tokens or is evicted as a whole. Trunks have at most 300."""
    for share in (0.35, 0.5, 0.65):
        problem = eviction(Eviction("some", 200, 300, share, 50, 3), replace(PAPER, N_min=N_min))
        actual, want = problem.run(stages), expected(problem)
        assert np.array_equal(actual.kept, want.kept)
        assert np.array_equal(actual.ratio, want.ratio)


@pytest.mark.spec("CC-TIERS", "CC-TIER-COUNT")
@pytest.mark.parametrize("case", [
    Eviction("tiers", 230, 12, 0.5, 6, 4), Eviction("tiers-of-all-ties", 130, 20, 0.4, 1, 3, protected=15),
    Eviction("tiers-of-long-trunks", 45, 90, 0.6, 9, 5, N_min=20),
    Eviction("tiers-of-which-little-stays", 300, 9, 0.08, 30, 4),
    Eviction("tiers-of-which-little-goes", 300, 9, 0.95, 30, 4),
], ids=str)
def test_tiers_of_hundreds_of_trunks(stages: CrystalStages, case: Eviction) -> None:
    """Check hundreds of trunks for which the boundaries of tiers move by few ranks, and by most ranks."""
    problem = eviction(case, replace(PAPER, N_min=case.N_min, allocation="tiers"))
    assert not list(stage_checks.eviction(problem.run(stages), problem))


@pytest.mark.spec("CC-COVERAGE")
@pytest.mark.parametrize("share", [0.05, 0.29, 1.0])
@pytest.mark.parametrize("case", [
    Eviction("cut", 260, 14, 0.4, 5, 4, protected=15), Eviction("long", 40, 120, 0.3, 5, 4),
], ids=str)
def test_coverage_of_hundreds_of_trunks(stages: CrystalStages, case: Eviction, share: float) -> None:
    problem = eviction(case, replace(PAPER, coverage=share))
    assert not list(stage_checks.eviction(problem.run(stages), problem))


@pytest.mark.spec("CC-COVERAGE")
@pytest.mark.parametrize("quarter", [8, 65, 1_025, 16_385, 30_000])
def test_coverage_of_a_long_text(stages: CrystalStages, quarter: int) -> None:
    """Check that a quarter of single tokens comes back, evenly spaced, after the first three quarters are evicted."""
    n, k, e = 4 * quarter, quarter, 3 * quarter
    problem = replace(
        equal_trunks(n, 1, 2 * quarter), score=np.arange(n) / n, parameters=replace(PAPER, coverage=0.5)
    )
    actual = problem.run(stages)
    assert actual.kept.tolist() == [*((2 * i + 1) * e // (2 * k) for i in range(k)), *range(e, n)]
    assert np.flatnonzero(actual.ratio).tolist() == actual.kept.tolist()
