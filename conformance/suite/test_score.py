"""Tests of S5: the two-path score."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.checks import stage_checks
from conformance.oracles import s5
from conformance.strategies.numbers import small_parameters
from conformance.tolerances import normalised_radius
from spec.arrays import BoolVector, Vector
from spec.backend import CrystalStages
from spec.parameters import PAPER, CrystalCacheParameters
from spec.records import Trunks


@dataclass(frozen=True)
class Case:
    D: Vector
    impact: Vector
    protected: BoolVector
    parameters: CrystalCacheParameters


IMPACTS = (
    st.one_of(st.integers(0, 5).map(float), st.floats(0.05, 20)),
    st.integers(0, 5).map(lambda x: 1 + x * 2.0**-32), st.integers(0, 5).map(lambda x: 1 + x * 2.0**-45),
)
"""Strategies for the impacts of a case: any size, or so close that their range is below epsilon and not 0."""


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw D and trunk impacts with ties, and any set of protected trunks, also all trunks."""
    m = draw(st.integers(1, 9), label="m")
    def vector(values: st.SearchStrategy[float], label: str) -> list[float]:
        return draw(st.lists(values, min_size=m, max_size=m), label=label)

    return Case(
        np.array(vector(st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(0, 1)), "D")),
        np.array(vector(draw(st.sampled_from(IMPACTS), label="kind"), "trunk impact")),
        np.array(draw(st.lists(st.booleans(), min_size=m, max_size=m), label="protected")),
        draw(small_parameters(), label="parameters"),
    )


def run(stages: CrystalStages, case: Case) -> Vector:
    return stages.score(case.D, case.impact, case.protected, case.parameters)


@pytest.mark.spec("CC-SCORE", "CC-DISSOLVE")
@pytest.mark.parametrize("changes", [{}, {"allocation": "tiers"}, {"coverage": 0.25}], ids=str)
def test_no_trunks(stages: CrystalStages, changes: dict[str, Any]) -> None:
    """Check S5 and S6 of a state without trunks, whose tokens are all in the tail."""
    empty, no_members, p = np.empty(0), np.empty(0, dtype=np.bool_), replace(PAPER, **changes)
    assert stages.score(empty, empty, no_members, p).shape == (0,)
    none = stages.dissolve(empty, Trunks(np.array([0]), empty), empty, empty, no_members, 3, p)
    assert (len(none.kept), len(none.ratio), len(none.D)) == (0, 0, 0)


@pytest.mark.spec("CC-SCORE", "CC-NORMALISED-IMPACT")
@given(case=cases())
def test_the_score_equals_the_brute_force(stages: CrystalStages, case: Case) -> None:
    """S5 MUST compute Eq. 28 and 29 over the unprotected trunks, and NaN for protected trunks."""
    actual = run(stages, case)
    assert not list(stage_checks.score(actual, case.D, case.impact, case.protected, case.parameters))


@pytest.mark.spec("CC-SCORE")
@given(case=cases())
def test_the_score_is_bounded_and_at_least_D(stages: CrystalStages, case: Case) -> None:
    """Check D <= score <= max(1, alpha)."""
    alive = ~case.protected
    actual = run(stages, case)[alive]
    assert (actual >= case.D[alive]).all()
    assert (actual <= max(1, case.parameters.alpha)).all()


@pytest.mark.spec("CC-SCORE", "CC-NORMALISED-IMPACT")
@given(case=cases())
def test_uniform_impact_equals_alpha_0(stages: CrystalStages, case: Case) -> None:
    """Check that equal impacts have M~ = 0, so that the scores equal those of alpha = 0, bit for bit."""
    uniform = replace(case, impact=np.ones(len(case.D)))
    no_M = replace(case, parameters=replace(case.parameters, alpha=0.0))
    assert np.array_equal(run(stages, uniform), run(stages, no_M), equal_nan=True)


@pytest.mark.spec("CC-NORMALISED-IMPACT")
@given(case=cases())
def test_normalised_impact_orders_trunks_as_impact_does(stages: CrystalStages, case: Case) -> None:
    """Check that M~ is in [0, 1], that the least is exactly 0, and that the order is that of the impacts."""
    p = replace(case.parameters, alpha=1.0)
    alive = ~case.protected
    actual = run(stages, replace(case, D=np.zeros(len(case.D)), parameters=p))[alive]
    order = np.argsort(case.impact[alive], kind="stable")
    assert (np.diff(actual[order]) >= 0).all()
    assert actual.min(initial=0.0) == 0
    assert actual.max(initial=0.0) <= 1
    assert not alive.any() or actual[order[0]] == 0


@pytest.mark.spec("CC-NORMALISED-IMPACT")
@given(case=cases(), data=st.data())
def test_raising_one_impact_never_raises_another_trunk(
    stages: CrystalStages, case: Case, data: st.DataObject,
) -> None:
    """Check raises of the impact of one trunk that float64 resolves."""
    at = data.draw(st.integers(0, len(case.D) - 1), label="trunk")
    raised = case.impact.copy()
    raised[at] += data.draw(st.integers(1, 8), label="raise")
    a, b = run(stages, case), run(stages, replace(case, impact=raised))
    alive = ~case.protected
    others = alive & (np.arange(len(case.D)) != at)
    slack = case.parameters.alpha * radius(case, raised)
    assert (b[others] <= a[others] + slack).all()


def radius(case: Case, raised: Vector) -> float:
    alive = np.flatnonzero(~case.protected)
    return max((normalised_radius(M[alive].tolist(), case.parameters.epsilon) for M in (case.impact, raised)
                if len(alive)), default=0.0)


@pytest.mark.spec("CC-NORMALISED-IMPACT")
@given(case=cases(), data=st.data())
def test_protected_trunks_do_not_enter_the_range(
    stages: CrystalStages, case: Case, data: st.DataObject,
) -> None:
    """Check that the impact of protected trunks does not change scores, because Eq. 28 is over unprotected trunks."""
    other = np.where(case.protected, data.draw(st.floats(0, 1000), label="protected impact"), case.impact)
    assert np.array_equal(run(stages, case), run(stages, replace(case, impact=other)), equal_nan=True)


@pytest.mark.spec("CC-SCORE")
@pytest.mark.parametrize("protected", [True, False])
def test_one_trunk(stages: CrystalStages, protected: bool) -> None:
    """Check that a protected trunk has no score and raises no error, and that a single trunk has the score D."""
    actual = stages.score(np.array([0.25]), np.array([7.0]), np.array([protected]), PAPER)
    assert np.array_equal(actual, [np.nan if protected else 0.25], equal_nan=True)


@pytest.mark.spec("CC-NORMALISED-IMPACT")
def test_the_logarithm_comes_before_the_range(stages: CrystalStages) -> None:
    """Check Eq. 28 for impacts 0, 1, 3 (ln 1, ln 2, ln 4): M~ is 0, 1/2, 1, up to epsilon."""
    actual = stages.score(np.zeros(3), np.array([0.0, 1.0, 3.0]), np.zeros(3, dtype=np.bool_), PAPER)
    want = s5.normalised_impact([0.0, 1.0, 3.0], range(3), PAPER.epsilon)
    assert np.round(actual, 7).tolist() == [0, 0.5, 1]
    assert actual[2] < 1
    assert round(want[1], 7) == 0.5


@pytest.mark.spec("CC-NORMALISED-IMPACT")
def test_small_impacts_have_logarithms(stages: CrystalStages) -> None:
    """Check Mbar = 1e-9, 3e-9 and 1e-8, for which log(1 + x) with a rounded 1 + x has an error of 4e-9.

    This error is far above the bound.
    """
    M_bar, alive, D = np.array([1e-9, 3e-9, 1e-8]), np.zeros(3, dtype=np.bool_), np.zeros(3)
    assert normalised_radius(M_bar.tolist(), PAPER.epsilon) < 2e-14
    assert not list(stage_checks.score(stages.score(D, M_bar, alive, PAPER), D, M_bar, alive, PAPER))
