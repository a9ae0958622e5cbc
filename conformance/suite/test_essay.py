"""The essay's forms: mean salience, unit impact, tiers, renewal, and the profile itself."""

import itertools
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.checks import stage_checks
from conformance.checks.refusals import refused
from conformance.oracles import s1, s6
from conformance.strategies.attention import AttentionInputs, attention_inputs, hot_sets
from conformance.strategies.eviction import EvictionProblem, evictions
from conformance.strategies.parameters import forms
from conformance.strategies.prompts import Prompt, prompts
from conformance.strategies.text import token_ids
from conformance.strategies.trunks import Text, dyadic_impacts, texts
from reference.crystalcache import prefill, renewal, tiers
from reference.crystalcache.impact import unit_impact, unit_trunk_impact
from spec.arrays import IntVector, Vector
from spec.backend import Backend, CrystalStages
from spec.parameters import ESSAY, PAPER, TINY
from spec.records import Dissolution

SIZES = st.lists(st.integers(1, 12), min_size=1, max_size=12)
N_MIN = st.sampled_from([3, 0, 1, 2, 4, 12])


def in_tiers(problem: EvictionProblem) -> EvictionProblem:
    return replace(problem, parameters=replace(problem.parameters, allocation="tiers"))


def run(stages: CrystalStages, p: EvictionProblem) -> Dissolution:
    return stages.dissolve(p.score, p.trunks, p.impact, p.D, p.protected, p.budget, p.parameters)


def partitions_of(total: int) -> Iterator[list[int]]:
    """Every ordered way to write `total` as sizes of at least 1."""
    for cuts in itertools.product([False, True], repeat=total - 1):
        bounds = [0, *(i for i, cut in enumerate(cuts, 1) if cut), total]
        yield [stop - start for start, stop in itertools.pairwise(bounds)]


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


@pytest.mark.spec(id="CC-MEAN-SALIENCE")
@pytest.mark.spec(id="CC-COATTENTION")
@given(inputs=attention_inputs())
def test_mean_salience_equals_the_brute_force(stages: CrystalStages, inputs: AttentionInputs, precision: str) -> None:
    """S1 with `heads="mean"`, inside the certified box."""
    mean = replace(inputs, parameters=replace(inputs.parameters, heads="mean"))
    found = stages.coattention(mean.q, mean.k, mean.positions, mean.parameters, mean.scaling, mean.softcap)
    assert not list(stage_checks.coattention(found, mean, precision))


@pytest.mark.spec(id="CC-MEAN-SALIENCE")
@given(inputs=hot_sets(heads=(4,)), k_heads=st.sampled_from([1, 2, 4]), M_max=st.sampled_from([1.0, 2.0, 20.0]))
def test_mean_salience_is_exact_where_attention_is_dyadic(
    stages: CrystalStages, inputs: AttentionInputs, k_heads: int, M_max: float,
) -> None:
    """The mean of 1, 2 or 4 heads of dyadic columns, clipped after the division, to the bit."""
    p = replace(inputs.parameters, heads="mean", k_heads=k_heads, M_min=0.0, M_max=M_max)
    found = stages.coattention(inputs.q, inputs.k, inputs.positions, p, 1.0, None)
    want = s1.coattention(inputs.q.tolist(), inputs.k.tolist(), inputs.positions.tolist(), p, 1.0, None)
    assert found.salience.tolist() == want.salience


@st.composite
def salient_tokens(draw: st.DrawFn) -> tuple[Vector, IntVector]:
    n = draw(st.integers(1, 16), label="n")
    S = draw(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, 3.0, 0.3]), min_size=n, max_size=n), label="salience")
    return np.array(S), draw(token_ids(n), label="ids")


@pytest.mark.spec(id="CC-UNIT-IMPACT")
@given(tokens=salient_tokens(), rarity=st.sampled_from(["logarithm", "reciprocal", "exponential"]))
def test_unit_impact_equals_the_brute_force(
    stages: CrystalStages, tokens: tuple[Vector, IntVector], rarity: str,
) -> None:
    """M_i MUST be half the share of the largest salience and half the rarity; it lies in [0, 0.8)."""
    p = replace(PAPER, impact="unit", rarity=rarity)  # type: ignore[arg-type]
    M = stages.impact(*tokens, p)
    assert not list(stage_checks.impact(M, *tokens, p))
    assert ((M >= 0) & (M < 0.8)).all()


@pytest.mark.spec(id="CC-UNIT-IMPACT")
@given(tokens=salient_tokens(), factor=st.sampled_from([0.25, 2.0, 16.0]))
def test_a_scale_of_salience_says_nothing(
    stages: CrystalStages, tokens: tuple[Vector, IntVector], factor: float,
) -> None:
    """A power of two on all salience leaves M to the bit: nothing constant is compared with it."""
    S, ids = tokens
    p = replace(PAPER, impact="unit")
    assert stages.impact(factor * S, ids, p).tolist() == stages.impact(S, ids, p).tolist()


@pytest.mark.spec(id="CC-UNIT-IMPACT")
@pytest.mark.usefixtures("reference_items")
@given(tokens=salient_tokens(), U=st.floats(0.05, 0.6))
def test_unit_impact_is_computed_in_its_stated_order(tokens: tuple[Vector, IntVector], U: float) -> None:
    """Quotient, half, half of U, sum: the same bits."""
    S = tokens[0]
    want = [0.5 * (x / max(S) if max(S) else 0.0) + 0.5 * U for x in S.tolist()]
    assert unit_impact(S, np.full(len(S), U), PAPER).tolist() == want


@pytest.mark.spec(id="CC-UNIT-TRUNK-IMPACT")
@given(text=texts())
def test_unit_trunk_impact_equals_the_brute_force(stages: CrystalStages, text: Text) -> None:
    """The trunks are those of the paper; their impact lies in [0, 1), the least at 0."""
    p = replace(text.parameters, trunk_impact="unit")
    found = stages.trunks(text.coattention, text.impact, text.ends, p)
    assert not list(stage_checks.trunks(found, text.coattention, text.impact, text.ends, p))
    assert found.impact.min() == 0
    assert found.impact.max() < 1


@pytest.mark.spec(id="CC-UNIT-TRUNK-IMPACT")
@pytest.mark.usefixtures("reference_items")
@given(M_bar=dyadic_impacts(6), up=st.integers(0, 64))
def test_a_shift_of_all_trunks_says_nothing(M_bar: Vector, up: int) -> None:
    """Least and greatest are both measured from the trunks; the order stays."""
    unit = unit_trunk_impact(M_bar, 1e-8)
    assert unit_trunk_impact(M_bar + up, 1e-8).tolist() == unit.tolist()
    assert np.argsort(unit, kind="stable").tolist() == np.argsort(M_bar, kind="stable").tolist()


@pytest.mark.spec(id="CC-TIER-COUNT")
@pytest.mark.usefixtures("reference_items")
@given(sizes=SIZES, N_min=N_MIN, t=st.integers(-13, 13))
def test_tier_counts_equal_the_fractions(sizes: list[int], N_min: int, t: int) -> None:
    """What each rank keeps MUST be the rule in exact fractions."""
    assert tiers.tier_counts(np.array(sizes), t, N_min).tolist() == s6.tier_counts(sizes, t, N_min)


@pytest.mark.spec(id="CC-TIER-COUNT")
@pytest.mark.usefixtures("reference_items")
@given(size=st.integers(1, 64), m=st.integers(1, 40), N_min=N_MIN, t=st.integers(-41, 41))
def test_before_the_removal_a_better_rank_keeps_no_less(size: int, m: int, N_min: int, t: int) -> None:
    """With equal sizes the counts fall with the rank, and a further shift takes nothing away from any rank."""
    kept = tiers.tier_counts(np.full(m, size), t, N_min)
    assert (np.diff(kept) <= 0).all()
    assert (tiers.tier_counts(np.full(m, size), t + 1, N_min) >= kept).all()


@pytest.mark.spec(id="CC-TIER-COUNT")
@pytest.mark.usefixtures("reference_items")
def test_a_half_is_rounded_up() -> None:
    """The essay keeps 5 of 9 at ratio 1/2; floats miss the half at rank 167 of 178."""
    assert tiers.tier_counts(np.full(10, 9), 0, 3)[6] == 5
    assert tiers.tier_counts(np.full(445, 59), 0, 3)[133 + 167] == 31


@pytest.mark.spec(id="CC-TIERS")
@pytest.mark.usefixtures("reference_items")
@pytest.mark.parametrize("N_min", [0, 1, 3, 4])
def test_every_small_allocation_in_tiers(N_min: int) -> None:
    """All partitions of totals up to 9 and all cuts: every shift is tried from below, and the loop cuts the rest."""
    for total in range(1, 10):
        for sizes, c_0 in itertools.product(partitions_of(total), range(total + 1)):
            want, _ = s6.tier_allocate(sizes, c_0, N_min)
            assert tiers.tier_allocate(np.array(sizes), c_0, N_min).tolist() == [float(r) for r in want]


@pytest.mark.spec(id="CC-TIERS")
@pytest.mark.usefixtures("reference_items")
@given(sizes=SIZES, N_min=N_MIN, data=st.data())
def test_the_shift_is_the_least(sizes: list[int], N_min: int, data: st.DataObject) -> None:
    """It keeps enough, and one less does not: over all integers, since the total never falls with t."""
    B_avail = data.draw(st.integers(0, sum(sizes)), label="B_avail")
    totals = {t: sum(s6.tier_counts(sizes, t, N_min)) for t in range(-20, 21)}
    found = tiers.least_shift(np.array(sizes), B_avail, N_min)
    assert totals[found] >= B_avail
    assert all(totals[t] < B_avail for t in range(-len(sizes), found))
    assert all(totals[t] <= totals[t + 1] for t in range(-20, 20))


@pytest.mark.spec(id="CC-TIER-COUNT")
@pytest.mark.spec(id="CC-TIERS")
@given(problem=evictions())
def test_dissolution_in_tiers_equals_the_brute_force(stages: CrystalStages, problem: EvictionProblem) -> None:
    """Kept positions, r and D MUST be equal, ties included."""
    p = in_tiers(problem)
    found = run(stages, p)
    assert not list(stage_checks.dissolution(
        found, p.score, p.trunks, p.impact, p.D, p.protected, p.budget, p.parameters
    ))


@pytest.mark.spec(id="CC-TIERS")
@given(problem=evictions())
def test_tiers_keep_the_size_bounds(stages: CrystalStages, problem: EvictionProblem) -> None:
    """n if n <= B; B_prot if that exceeds B; else between B - max(0, N_min - 1) and B. Protected trunks stay whole."""
    found = run(stages, in_tiers(problem))
    n, B, sizes = len(problem.impact), problem.budget, problem.trunks.sizes
    B_prot = int(sizes[problem.protected].sum())
    if n <= B:
        assert len(found.kept) == n
        assert found.D.tolist() == problem.D.tolist()
    elif B_prot > B:
        assert len(found.kept) == B_prot
    else:
        assert max(B_prot, B - max(0, problem.parameters.N_min - 1)) <= len(found.kept) <= B
    assert (found.ratio[problem.protected] == 1).all()
    assert np.diff(np.searchsorted(found.kept, problem.trunks.offsets)).tolist() == np.round(
        found.ratio * sizes
    ).tolist()


@pytest.mark.spec(id="CC-TIERS")
@given(problem=evictions())
def test_tiers_and_the_cut_agree_where_nothing_or_everything_goes(
    stages: CrystalStages, problem: EvictionProblem,
) -> None:
    """The forms differ only in Stage 1."""
    n, B_prot = len(problem.impact), int(problem.trunks.sizes[problem.protected].sum())
    for B in (n, n + 1, B_prot):
        a, b = run(stages, replace(problem, budget=B)), run(stages, in_tiers(replace(problem, budget=B)))
        assert (a.kept.tolist(), a.ratio.tolist(), a.D.tolist()) == (b.kept.tolist(), b.ratio.tolist(), b.D.tolist())


D_VALUES = st.lists(st.floats(0, 1), min_size=1, max_size=8)


@pytest.mark.spec(id="CC-RENEWAL")
@pytest.mark.usefixtures("reference_items")
@given(D=D_VALUES, share=st.floats(0, 1), data=st.data())
def test_renewal_moves_active_trunks_towards_1(D: list[float], share: float, data: st.DataObject) -> None:
    """D + renewal (1 - D) in this order where active; nothing else moves; D stays in [D, 1]."""
    active = data.draw(st.lists(st.booleans(), min_size=len(D), max_size=len(D)), label="active")
    found = renewal.renewed_D(np.array(D), np.array(active), share)
    assert found.tolist() == [d + share * (1.0 - d) if on else d for d, on in zip(D, active, strict=True)]
    assert ((found >= np.array(D)) & (found <= 1)).all()


@pytest.mark.spec(id="CC-RENEWAL")
@pytest.mark.usefixtures("reference_items")
@given(D=D_VALUES)
def test_no_renewal_is_the_paper(D: list[float]) -> None:
    """With renewal 0, or nothing active, D is the same to the bit."""
    all_on, none_on = np.ones(len(D), dtype=np.bool_), np.zeros(len(D), dtype=np.bool_)
    assert renewal.renewed_D(np.array(D), all_on, 0.0).tolist() == D
    assert renewal.renewed_D(np.array(D), none_on, 0.3).tolist() == D


@pytest.mark.spec(id="CC-TIERS")
@pytest.mark.spec(id="CC-UNIT-IMPACT")
@pytest.mark.spec(id="CC-UNIT-TRUNK-IMPACT")
@pytest.mark.spec(id="CC-MEAN-SALIENCE")
@pytest.mark.spec(id="CC-RARITY-FORMS")
@pytest.mark.spec(id="CC-ADAPTIVE-MERGE")
@pytest.mark.spec(id="CC-COVERAGE")
@given(prompt=prompts(), p=forms())
def test_a_prefill_in_any_form_equals_its_chain(backend: Backend, prompt: Prompt, p: Any, precision: str) -> None:
    """End to end, every stage judged from the one before it."""
    formed = replace(prompt, inputs=replace(prompt.inputs, parameters=p))
    found = prefill(backend=backend, **formed.arguments)
    assert not list(stage_checks.retention(found, formed, precision))


@pytest.mark.spec(id="CC-TIERS")
def test_the_essay_runs_end_to_end(backend: Backend) -> None:
    """300 tokens under ESSAY: many partial trunks, where the paper has one at most."""
    rng = np.random.default_rng(7)
    q, k = (rng.standard_normal((h, 300, 8)).astype(np.float32) for h in (4, 2))
    ids = rng.zipf(1.5, 300).clip(0, 40).astype(np.int64)
    found = {
        name: prefill(q, k, ids, frozenset({2, 7}), 0.7, p, backend) for name, p in (("e", ESSAY), ("p", PAPER))
    }
    partial = {name: int(((x.ratio > 0) & (x.ratio < 1)).sum()) for name, x in found.items()}
    assert partial["p"] <= 1 < partial["e"]
    assert all(x.budget - 2 <= len(x.kept) <= x.budget == 210 for x in found.values())
    assert found["e"].trunks.impact.max() < 1


@pytest.mark.spec(id="CC-TIERS")
@given(prompt=prompts())
def test_the_paper_has_no_forms(backend: Backend, prompt: Prompt) -> None:
    """Named default values change nothing."""
    p = replace(
        TINY, heads="sum", impact="mixture", trunk_impact="mean", allocation="cut", renewal=0.3, rarity="logarithm",
        merge="fixed", coverage=0.0,
    )
    plain = replace(prompt, inputs=replace(prompt.inputs, parameters=TINY))
    named = replace(prompt, inputs=replace(prompt.inputs, parameters=p))
    a, b = (prefill(backend=backend, **x.arguments) for x in (plain, named))
    assert a.kept.tolist() == b.kept.tolist()
    assert a.D.tolist() == b.D.tolist()
