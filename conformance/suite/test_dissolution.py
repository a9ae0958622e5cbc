"""Tests of S6: which trunks are evicted, wholly or in part, and which tokens are kept."""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from conformance.checks import stage_checks
from conformance.oracles import s6
from conformance.strategies.numbers import CLOSE, close
from conformance.strategies.trunks import CORNERS, EvictionProblem, corners, evictions, random_evictions
from spec.arrays import Vector
from spec.backend import CrystalStages
from spec.parameters import PAPER, CrystalCacheParameters
from spec.records import Trunks

RANDOM_EVICTIONS = 10_000


def partitions_of(total: int) -> Iterator[list[int]]:
    """Yield every ordered way to write `total` as a sum of sizes of at least 1."""
    for cuts in itertools.product([False, True], repeat=total - 1):
        sizes = [1]
        for cut in cuts:
            if cut:
                sizes.append(1)
            else:
                sizes[-1] += 1
        yield sizes


def bare(sizes: list[int], budget: int, N_min: int = 3) -> EvictionProblem:
    """Return an eviction problem that evicts trunks from the left, without protection. M falls with the position."""
    m, n = len(sizes), sum(sizes)
    return EvictionProblem(
        np.arange(m) / 16, Trunks(np.cumsum([0, *sizes]), np.ones(m)), -np.arange(n, dtype=np.float64), np.ones(m),
        np.zeros(m, dtype=np.bool_), budget, replace(PAPER, N_min=N_min),
    )


@pytest.mark.spec("CC-DISSOLVE", "CC-CUT", "CC-ALLOCATE", "CC-KEEP-COUNT", "CC-DISSOLVE-D")
@given(problem=evictions())
def test_dissolution_equals_algorithm_1(stages: CrystalStages, problem: EvictionProblem) -> None:
    """Kept positions and r MUST be equal to Algorithm 1, ties included."""
    for corner in corners(problem, problem.expected()):
        event(corner)
    actual = problem.run(stages)
    assert not list(stage_checks.eviction(actual, problem))
    assert actual.kept.dtype == np.int64


@pytest.mark.spec("CC-DISSOLVE", "CC-ALLOCATE")
def test_ten_thousand_evictions_equal_algorithm_1_and_reach_every_corner(stages: CrystalStages, every: int) -> None:
    """Check random evictions. Each corner case occurs in at least 1 % of them, so that each rule is tested."""
    seen: Counter[str] = Counter()
    number = RANDOM_EVICTIONS // every
    for problem in random_evictions(20260, number):
        assert not list(stage_checks.eviction(problem.run(stages), problem))
        seen.update(corners(problem, problem.expected()))
    assert {corner: seen[corner] for corner in CORNERS if seen[corner] < number / 100} == {}


@pytest.mark.spec("CC-ALLOCATE", "CC-CUT")
def test_every_small_eviction_through_the_stage(stages: CrystalStages, every: int) -> None:
    """Check all partitions of totals up to 8 and all budgets against the closed form of the prefix sum."""
    cases = [case for total in range(1, 9) for case in itertools.product(partitions_of(total), range(total + 1))]
    for sizes, B in cases[::every]:
        actual = bare(sizes, B).run(stages)
        kept = s6.closed_form(sizes, sum(sizes) - B, 3)
        starts = np.cumsum([0, *sizes[:-1]]).tolist()
        assert actual.kept.tolist() == [i for a, k in zip(starts, kept, strict=True) for i in range(a, a + k)]


@pytest.mark.spec("CC-ALLOCATE")
@given(n=st.integers(1, 12), B=st.integers(0, 14), N_min=st.integers(0, 5))
def test_single_tokens_fill_the_budget(stages: CrystalStages, n: int, B: int, N_min: int) -> None:
    """Check that T_max = 1 has no partial trunk and keeps min(n, B) tokens, for any N_min."""
    actual = bare([1] * n, B, N_min).run(stages)
    assert actual.kept.tolist() == list(range(max(0, n - B), n))


@pytest.mark.spec("CC-DISSOLVE")
@given(problem=evictions())
def test_a_protected_score_is_never_read(stages: CrystalStages, problem: EvictionProblem) -> None:
    """Check that the score of a protected trunk is not read. Protection is a separate mask, not a special score."""
    a, b = (replace(problem, score=np.where(problem.protected, x, problem.score)).run(stages) for x in (-9.0, 9.0))
    assert a.kept.tolist() == b.kept.tolist() == problem.run(stages).kept.tolist()


@pytest.mark.spec("CC-ALLOCATE")
@pytest.mark.parametrize(
    ("size", "c", "N_min", "kept"), [(5, 5, 3, 0), (5, 2, 3, 3), (4, 2, 3, 0), (4, 1, 3, 3), (3, 1, 3, 0), (2, 1, 0, 1)]
)
def test_the_branches_of_the_loop(stages: CrystalStages, size: int, c: int, N_min: int, kept: int) -> None:
    """Check the boundaries of Eq. 32: |g| = c, |g| - c = N_min, N_min - 1 and N_min - 2."""
    assert len(bare([size], size - c, N_min).run(stages).kept) == kept


@pytest.mark.spec("CC-DISSOLVE")
@given(problem=evictions())
def test_positions_are_absolute(stages: CrystalStages, problem: EvictionProblem) -> None:
    """Check that trunks that begin at position 7 keep the corresponding tokens, seven positions later."""
    later = replace(problem, trunks=Trunks(problem.trunks.offsets + 7, problem.trunks.impact))
    assert later.run(stages).kept.tolist() == (problem.run(stages).kept + 7).tolist()


@pytest.mark.spec("CC-KEEP-COUNT", "CC-DISSOLVE")
def test_members_closer_than_float32_are_told_apart(stages: CrystalStages) -> None:
    """Check that the three largest of M = 1, 1 + 1e-9, 1 + 2e-9, 1 + 3e-9 are kept. In float32 they would tie."""
    impact: Vector = 1 + 1e-9 * np.arange(4, dtype=np.float64)
    problem = replace(bare([4], 3), impact=impact)
    assert problem.run(stages).kept.tolist() == [1, 2, 3]
    assert replace(problem, impact=impact[::-1].copy()).run(stages).kept.tolist() == [0, 1, 2]


@pytest.mark.spec("CC-KEEP-COUNT", "CC-ALLOCATE")
def test_a_count_of_any_ratio_is_the_count(stages: CrystalStages) -> None:
    """Check that k of s tokens are kept if k / s * s in floats is below or above k, for s up to 128."""
    pairs = [(s, k) for s in range(4, 129) for k in range(3, s) if k / s * s != k or (1 - (s - k) / s) * s != k]
    assert any(k / s * s < k for s, k in pairs if s <= 32)
    for s, k in [*[pair for pair in pairs if pair[0] <= 32], *pairs[::29]]:
        actual = bare([s], k).run(stages)
        assert actual.kept.tolist() == list(range(k))
        assert actual.ratio.tolist() == [k / s]


@pytest.mark.spec("CC-DISSOLVE", "CC-KEEP-COUNT")
@pytest.mark.parametrize("kind", CLOSE)
@pytest.mark.parametrize("size", [5, 40, 1_100])
def test_close_scores_and_members_are_told_apart(stages: CrystalStages, size: int, kind: str) -> None:
    """Check adjacent float64 numbers of any size, subnormal and huge ones included. -0.0 and 0.0 are equal."""
    score, impact = close(kind, size, size), close(kind, size + 1, size)
    order = np.argsort(score, kind="stable")
    many = replace(bare([1] * size, size // 2), score=score)
    assert many.run(stages).kept.tolist() == sorted(order[size - size // 2 :].tolist())
    strongest = sorted(range(size), key=lambda i: (-impact[i], i))[: max(3, size // 2)]
    one = replace(bare([size], max(3, size // 2)), impact=impact)
    assert one.run(stages).kept.tolist() == sorted(strongest)


def alike(B: int, p: CrystalCacheParameters) -> EvictionProblem:
    """Return an eviction problem with ten trunks of nine tokens and rising scores."""
    score, none = np.arange(10) / 16, np.zeros(10, dtype=np.bool_)
    return EvictionProblem(score, Trunks(np.arange(0, 91, 9), np.ones(10)), np.arange(90) / 8, np.ones(10), none, B, p)


@pytest.mark.spec("CC-CUT")
@pytest.mark.parametrize("B", [90, 2**31, 2**32 + 3, 2**63 - 1])
def test_a_budget_that_holds_all_keeps_all(stages: CrystalStages, B: int) -> None:
    """Check that no token is evicted if the budget is at least the number of tokens, up to the largest budget."""
    assert alike(B, PAPER).run(stages).kept.tolist() == list(range(90))


@pytest.mark.spec("CC-TIERS")
@pytest.mark.parametrize("B", [5, 10, 27, 49, 50, 51, 85])
def test_boundaries_of_tiers_shift_either_way(stages: CrystalStages, B: int) -> None:
    """Check budgets below and above 50 tokens. Tiers without shifted boundaries keep 50 of these 90 tokens."""
    problem = alike(B, replace(PAPER, allocation="tiers"))
    assert not list(stage_checks.eviction(problem.run(stages), problem))


@pytest.mark.spec("CC-TIERS", "CC-TIER-COUNT")
@pytest.mark.parametrize("less", [0, 1])
def test_a_ratio_of_tiers_that_floats_round_down(stages: CrystalStages, less: int) -> None:
    """Check rank 167 of a middle tier of 178, whose ratio is 91.5 / 177: 30.5 of 59 tokens, rounded up to 31.

    With a budget of one token less than the tiers keep, a trunk of one token is evicted, not the 31st token.
    """
    m, at = 445, 133 + 167
    sizes = np.ones(m, dtype=np.int64)
    sizes[at] = 59
    n = int(sizes.sum())
    problem = EvictionProblem(
        1 - np.arange(m) / 1024, Trunks(np.cumsum([0, *sizes.tolist()]), np.ones(m)), np.arange(n) / 8, np.ones(m),
        np.zeros(m, dtype=np.bool_), 133 + 177 + 31 - less, replace(PAPER, allocation="tiers", N_min=1),
    )
    actual = problem.run(stages)
    assert round(float(actual.ratio[at]) * 59) == 31
    assert not list(stage_checks.eviction(actual, problem))


@pytest.mark.spec("CC-TIERS", "CC-TIER-COUNT")
@pytest.mark.parametrize(("w", "j", "size"), [(3, 1, 45), (7, 3, 35), (7, 7, 5), (12, 5, 20), (12, 11, 20), (1, 1, 9)])
def test_halves_of_tiers_are_rounded_up(stages: CrystalStages, w: int, j: int, size: int) -> None:
    """Check trunk j of w + 1 middle trunks, whose number of kept tokens ends in .5 and is rounded up.

    Floating-point formulas round some of these numbers down.
    """
    m = next(m for m in range(2, 99) if 7 * m // 10 - 3 * m // 10 == w + 1)
    sizes = np.ones(m, dtype=np.int64)
    sizes[3 * m // 10 + j] = size
    n, whole = int(sizes.sum()), 3 * m // 10 + w + (size * (8 * w - 3 * j) + 5 * w) // (10 * w)
    for B in (whole, whole - 1):
        problem = EvictionProblem(
            1 - np.arange(m) / 1024, Trunks(np.cumsum([0, *sizes.tolist()]), np.ones(m)), np.arange(n) / 8, np.ones(m),
            np.zeros(m, dtype=np.bool_), B, replace(PAPER, allocation="tiers", N_min=1),
        )
        assert not list(stage_checks.eviction(problem.run(stages), problem))


@pytest.mark.spec("CC-DISSOLVE")
@pytest.mark.parametrize("start", [2**15 - 9, 2**16 - 9])
def test_positions_of_16_bits_are_too_few(stages: CrystalStages, start: int) -> None:
    problem = bare([5, 5, 5, 5], 10)
    shifted = replace(problem, trunks=Trunks(problem.trunks.offsets + start, problem.trunks.impact))
    assert shifted.run(stages).kept.tolist() == (problem.run(stages).kept + start).tolist()
