"""The essay's profile and the paper's future work: their functions, item by item."""

import itertools
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance import tolerances
from conformance.checks import stage_checks
from conformance.checks.refusals import refused
from conformance.oracles import s2, s3, s6
from conformance.strategies.numbers import token_ids
from conformance.strategies.trunks import Text, dyadic_impacts, texts
from conformance.suite.test_dissolution import partitions_of
from conformance.suite.test_extensions import RARITIES, salient_tokens
from reference.crystalcache import coverage, impact, renewal, tiers
from reference.crystalcache.impact import unit_impact, unit_trunk_impact
from reference.crystalcache.trunks import median_strength
from spec.arrays import IntVector, Vector
from spec.parameters import ESSAY, PAPER

pytestmark = pytest.mark.usefixtures("reference_items")

SIZES = st.lists(st.integers(1, 12), min_size=1, max_size=12)
N_MIN = st.sampled_from([3, 0, 1, 2, 4, 12])


def test_the_profile_is_the_paper_but_for_what_the_essay_says() -> None:
    """Every value of the page's table, and no other difference."""
    paper, essay = asdict(PAPER), asdict(ESSAY)
    wanted = {
        "C": 128, "k_cross": 0, "s": 2.0, "M_min": 0.0, "M_max": 128.0, "heads": "mean", "impact": "unit",
        "trunk_impact": "unit", "allocation": "tiers", "renewal": 0.3, "breath_protection": "sink+recent",
    }
    assert {name: value for name, value in essay.items() if value != paper[name]} == wanted


@pytest.mark.parametrize(
    "change",
    [{"heads": "max"}, {"impact": "essay"}, {"trunk_impact": "sum"}, {"allocation": "tier"}, {"renewal": 1.5},
     {"renewal": -0.1}, {"coverage": 1.01}, {"coverage": float("nan")}, {"rarity": "none"}, {"merge": "mean"}],
)
def test_a_form_that_is_not_there_is_refused(change: dict[str, Any]) -> None:
    ((name, value),) = change.items()
    with refused(name, value):
        replace(PAPER, **change)


@pytest.mark.spec("CC-UNIT-IMPACT")
@given(tokens=salient_tokens(), U=st.floats(0.05, 0.6))
def test_unit_impact_is_computed_in_its_stated_order(tokens: tuple[Vector, IntVector], U: float) -> None:
    """Quotient, half, half of U, sum: the same bits."""
    S = tokens[0]
    want = [0.5 * (x / max(S) if max(S) else 0.0) + 0.5 * U for x in S.tolist()]
    assert unit_impact(S, np.full(len(S), U), PAPER).tolist() == want


@pytest.mark.spec("CC-UNIT-TRUNK-IMPACT")
@given(M_bar=dyadic_impacts(6), up=st.integers(0, 64))
def test_a_shift_of_all_trunks_says_nothing(M_bar: Vector, up: int) -> None:
    """Least and greatest are both measured from the trunks; the order stays."""
    unit = unit_trunk_impact(M_bar, 1e-8)
    assert unit_trunk_impact(M_bar + up, 1e-8).tolist() == unit.tolist()
    assert np.argsort(unit, kind="stable").tolist() == np.argsort(M_bar, kind="stable").tolist()


@pytest.mark.spec("CC-TIER-COUNT")
@given(sizes=SIZES, N_min=N_MIN, t=st.integers(-13, 13))
def test_tier_counts_equal_the_fractions(sizes: list[int], N_min: int, t: int) -> None:
    """What each rank keeps MUST be the rule in exact fractions."""
    assert tiers.tier_counts(np.array(sizes), t, N_min).tolist() == s6.tier_counts(sizes, t, N_min)


@pytest.mark.spec("CC-TIER-COUNT")
@given(size=st.integers(1, 64), m=st.integers(1, 40), N_min=N_MIN, t=st.integers(-41, 41))
def test_before_the_removal_a_better_rank_keeps_no_less(size: int, m: int, N_min: int, t: int) -> None:
    """With equal sizes the counts fall with the rank, and a further shift takes nothing away from any rank."""
    kept = tiers.tier_counts(np.full(m, size), t, N_min)
    assert (np.diff(kept) <= 0).all()
    assert (tiers.tier_counts(np.full(m, size), t + 1, N_min) >= kept).all()


@pytest.mark.spec("CC-TIER-COUNT")
def test_a_half_is_rounded_up() -> None:
    """The essay keeps 5 of 9 at ratio 1/2; floats miss the half at rank 167 of 178."""
    assert tiers.tier_counts(np.full(10, 9), 0, 3)[6] == 5
    assert tiers.tier_counts(np.full(445, 59), 0, 3)[133 + 167] == 31


@pytest.mark.spec("CC-TIERS")
@pytest.mark.parametrize("N_min", [0, 1, 3, 4])
def test_every_small_allocation_in_tiers(N_min: int) -> None:
    """All partitions of totals up to 9 and all cuts: every shift is tried from below, and the loop cuts the rest."""
    for total in range(1, 10):
        for sizes, c_0 in itertools.product(partitions_of(total), range(total + 1)):
            want, _ = s6.tier_allocate(sizes, c_0, N_min)
            assert tiers.tier_allocate(np.array(sizes), c_0, N_min).tolist() == [float(r) for r in want]


@pytest.mark.spec("CC-TIERS")
@given(sizes=SIZES, N_min=N_MIN, data=st.data())
def test_the_shift_is_the_least(sizes: list[int], N_min: int, data: st.DataObject) -> None:
    """It keeps enough, and one less does not: over all integers, since the total never falls with t."""
    B_avail = data.draw(st.integers(0, sum(sizes)), label="B_avail")
    totals = {t: sum(s6.tier_counts(sizes, t, N_min)) for t in range(-20, 21)}
    found = tiers.least_shift(np.array(sizes), B_avail, N_min)
    assert totals[found] >= B_avail
    assert all(totals[t] < B_avail for t in range(-len(sizes), found))
    assert all(totals[t] <= totals[t + 1] for t in range(-20, 20))


D_VALUES = st.lists(st.floats(0, 1), min_size=1, max_size=8)


@pytest.mark.spec("CC-RENEWAL")
@given(D=D_VALUES, share=st.floats(0, 1), data=st.data())
def test_renewal_moves_active_trunks_towards_1(D: list[float], share: float, data: st.DataObject) -> None:
    """D + renewal (1 - D) in this order where active; nothing else moves; D stays in [D, 1]."""
    active = data.draw(st.lists(st.booleans(), min_size=len(D), max_size=len(D)), label="active")
    found = renewal.renewed_D(np.array(D), np.array(active), share)
    assert found.tolist() == [d + share * (1.0 - d) if on else d for d, on in zip(D, active, strict=True)]
    assert ((found >= np.array(D)) & (found <= 1)).all()


@pytest.mark.spec("CC-RENEWAL")
@given(D=D_VALUES)
def test_no_renewal_is_the_paper(D: list[float]) -> None:
    """With renewal 0, or nothing active, D is the same to the bit."""
    all_on, none_on = np.ones(len(D), dtype=np.bool_), np.zeros(len(D), dtype=np.bool_)
    assert renewal.renewed_D(np.array(D), all_on, 0.0).tolist() == D
    assert renewal.renewed_D(np.array(D), none_on, 0.3).tolist() == D


@pytest.mark.spec("CC-RARITY-FORMS")
@pytest.mark.parametrize("form", RARITIES)
@given(ids=st.integers(1, 30).flatmap(token_ids))
def test_a_rarity_form_equals_its_formula(form: str, ids: IntVector) -> None:
    """U_i within the bound, and in (0, 1/2]."""
    c = impact.token_counts(ids)
    p = replace(PAPER, rarity=form)  # type: ignore[arg-type]
    U = RARITIES[form](c)
    assert tolerances.close("CC-RARITY-FORMS", U, [s3.rarity_of(x, p) for x in c.tolist()])
    assert ((U > 0) & (U <= 0.5)).all()


@pytest.mark.spec("CC-ADAPTIVE-MERGE")
@given(text=texts())
def test_at_most_half_of_the_interfaces_exceed_the_median(text: Text) -> None:
    """Among the sentences' interfaces, as CC-MERGE decides; and the threshold is one of their strengths."""
    pieces = s2.sentences(text.ends.tolist())
    E = stage_checks.edges_of(text.coattention)
    weights = [s2.interface_weights(a, b, E) for a, b in itertools.pairwise(pieces)]
    bounds = np.array([piece[0] for piece in pieces] + [len(text.ends)])
    tau = median_strength(bounds, {(a, b): w for a, b, w in E}, 0.3)
    p = replace(PAPER, tau_merge=tau)
    assert sum(s2.merges(w, 1, 1, p) for w in weights) <= len(weights) // 2
    if weights:
        strengths = [sum(w) / len(w) if w else 0.0 for w in weights]
        assert min(strengths) <= tau <= np.nextafter(max(strengths), 2)
    else:
        assert tau == 0.3


@pytest.mark.spec("CC-COVERAGE")
@given(e=st.integers(0, 60), k=st.integers(0, 60))
def test_evenly_spaced_tokens_stand_in_the_middle(e: int, k: int) -> None:
    """min(e, k) distinct ones, mirrored about the middle up to one token."""
    found = coverage.evenly_spaced(np.arange(e), k)
    assert len(set(found.tolist())) == len(found) == min(e, k)
    if 0 < k < e:
        assert (np.abs(found + found[::-1] - (e - 1)) <= 1).all()


@pytest.mark.spec("CC-COVERAGE")
def test_the_reserve_is_an_exact_share_of_what_is_not_protected() -> None:
    """0.29 of 100 are 29 (28 in binary); half of 100 less 40; nothing where all fits or nothing is left."""
    free, shut = np.array([False, False]), np.array([True, False])
    assert coverage.coverage_reserve(np.array([40, 90]), free, 100, 0.29) == 29
    assert coverage.coverage_reserve(np.array([40, 90]), shut, 100, 0.5) == 30
    assert coverage.coverage_reserve(np.array([40, 60]), free, 100, 0.5) == 0
    assert coverage.coverage_reserve(np.array([140, 60]), shut, 100, 1.0) == 0
