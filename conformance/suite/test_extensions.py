"""Tests of the forms of the essay, and of the extensions that the paper does not have."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.checks import stage_checks
from conformance.checks.prefill_checks import prefill_complaints
from conformance.oracles import s1
from conformance.plugin import fewer_examples
from conformance.strategies.numbers import forms, token_ids
from conformance.strategies.prompts import AttentionInputs, Prompt, attention_inputs, hot_sets, prompts
from conformance.strategies.trunks import EvictionProblem, Text, evictions, record, texts
from reference.crystalcache import impact, prefill
from spec.arrays import IntVector, Vector
from spec.backend import Backend, CrystalStages
from spec.parameters import ESSAY, PAPER, TINY
from spec.records import CoAttention, Trunks


def in_tiers(problem: EvictionProblem) -> EvictionProblem:
    return replace(problem, parameters=replace(problem.parameters, allocation="tiers"))


@pytest.mark.spec("CC-MEAN-SALIENCE", "CC-COATTENTION")
@given(inputs=attention_inputs())
def test_mean_salience_equals_the_brute_force(stages: CrystalStages, inputs: AttentionInputs, precision: str) -> None:
    """Check that S1 with `heads="mean"` is inside the certified box."""
    mean = replace(inputs, parameters=replace(inputs.parameters, heads="mean"))
    assert not list(stage_checks.coattention(mean.run(stages), mean, precision))


@pytest.mark.spec("CC-MEAN-SALIENCE")
@given(inputs=hot_sets(heads=(4,)), k_heads=st.sampled_from([1, 2, 4]), M_max=st.sampled_from([1.0, 2.0, 20.0]))
def test_mean_salience_is_exact_where_attention_is_dyadic(
    stages: CrystalStages, inputs: AttentionInputs, k_heads: int, M_max: float,
) -> None:
    """Check that the mean of 1, 2 or 4 heads is exact and clipped after the division, if attention is dyadic."""
    p = replace(inputs.parameters, heads="mean", k_heads=k_heads, M_min=0.0, M_max=M_max)
    actual = stages.coattention(inputs.q, inputs.k, inputs.positions, p, 1.0, None)
    want = s1.coattention(inputs.q.tolist(), inputs.k.tolist(), inputs.positions.tolist(), p, 1.0, None)
    assert actual.salience.tolist() == want.salience


@st.composite
def salient_tokens(draw: st.DrawFn) -> tuple[Vector, IntVector]:
    n = draw(st.integers(1, 16), label="n")
    S = draw(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, 3.0, 0.3]), min_size=n, max_size=n), label="salience")
    return np.array(S), draw(token_ids(n), label="ids")


@pytest.mark.spec("CC-UNIT-IMPACT")
@given(
    tokens=salient_tokens(), rarity=st.sampled_from(["logarithm", "reciprocal", "exponential"]),
    size=st.sampled_from([1.0, 2.0**-1060]),
)
def test_unit_impact_equals_the_brute_force(
    stages: CrystalStages, tokens: tuple[Vector, IntVector], rarity: str, size: float,
) -> None:
    """M_i MUST be half of the salience relative to the largest, plus half of the rarity. M_i is in [0, 0.8).

    Float64 cannot hold the reciprocal of a salience of 2^-1060.
    """
    p, (S, ids) = replace(PAPER, impact="unit", rarity=rarity), tokens  # type: ignore[arg-type]
    M = stages.impact(size * S, ids, p)
    assert not list(stage_checks.impact(M, size * S, ids, p))
    assert ((M >= 0) & (M < 0.8)).all()


@pytest.mark.spec("CC-UNIT-IMPACT")
@given(tokens=salient_tokens(), factor=st.sampled_from([0.25, 2.0, 16.0]))
def test_a_scale_of_salience_says_nothing(
    stages: CrystalStages, tokens: tuple[Vector, IntVector], factor: float,
) -> None:
    """Check that a power of two as a factor of all salience does not change M, bit for bit."""
    S, ids = tokens
    p = replace(PAPER, impact="unit")
    assert stages.impact(factor * S, ids, p).tolist() == stages.impact(S, ids, p).tolist()


@pytest.mark.spec("CC-UNIT-TRUNK-IMPACT")
@given(text=texts())
def test_unit_trunk_impact_equals_the_brute_force(stages: CrystalStages, text: Text) -> None:
    """Check that the trunks equal the trunks of the paper. Their impact is in [0, 1), and the least is 0."""
    p = replace(text.parameters, trunk_impact="unit")
    actual = stages.trunks(text.coattention, text.impact, text.ends, p)
    assert not list(stage_checks.trunks(actual, text.coattention, text.impact, text.ends, p))
    assert actual.impact.min() == 0
    assert actual.impact.max() < 1


@pytest.mark.spec("CC-TIERS", "CC-TIER-COUNT")
@given(problem=evictions())
def test_dissolution_in_tiers_equals_the_brute_force(stages: CrystalStages, problem: EvictionProblem) -> None:
    """Kept positions, r and D MUST be equal, ties included."""
    p = in_tiers(problem)
    assert not list(stage_checks.eviction(p.run(stages), p))


@pytest.mark.spec(
    "CC-TIERS", "CC-UNIT-IMPACT", "CC-UNIT-TRUNK-IMPACT", "CC-MEAN-SALIENCE", "CC-RARITY-FORMS", "CC-ADAPTIVE-MERGE",
    "CC-COVERAGE",
)
@fewer_examples
@given(prompt=prompts(), p=forms())
def test_a_prefill_in_any_form_equals_its_chain(backend: Backend, prompt: Prompt, p: Any, precision: str) -> None:
    """Check a whole prefill. Each stage is tested against the result of the stage before it."""
    formed = replace(prompt, inputs=replace(prompt.inputs, parameters=p))
    actual = prefill(backend=backend, **formed.arguments)
    assert not (wrong := prefill_complaints(actual, formed, backend, precision)), wrong[0]


@pytest.mark.spec("CC-TIERS")
def test_the_essay_runs_end_to_end(backend: Backend) -> None:
    """Check that 300 tokens under ESSAY have many partial trunks, and at most one under PAPER."""
    rng = np.random.default_rng(7)
    q, k = (rng.standard_normal((h, 300, 8)).astype(np.float32) for h in (4, 2))
    ids = rng.zipf(1.5, 300).clip(0, 40).astype(np.int64)
    actual = {
        name: prefill(q, k, ids, frozenset({2, 7}), 0.7, p, backend) for name, p in (("e", ESSAY), ("p", PAPER))
    }
    partial = {name: int(((x.ratio > 0) & (x.ratio < 1)).sum()) for name, x in actual.items()}
    assert partial["p"] <= 1 < partial["e"]
    assert all(x.budget - 2 <= len(x.kept) <= x.budget == 210 for x in actual.values())
    assert actual["e"].trunks.impact.max() < 1


@pytest.mark.spec("CC-TIERS")
@given(prompt=prompts())
def test_the_paper_has_no_forms(backend: Backend, prompt: Prompt) -> None:
    """Check that default values, given explicitly, do not change the result."""
    p = replace(
        TINY, heads="sum", impact="mixture", trunk_impact="mean", allocation="cut", renewal=0.3, rarity="logarithm",
        merge="fixed", coverage=0.0,
    )
    plain = replace(prompt, inputs=replace(prompt.inputs, parameters=TINY))
    named = replace(prompt, inputs=replace(prompt.inputs, parameters=p))
    a, b = (prefill(backend=backend, **x.arguments) for x in (plain, named))
    assert a.kept.tolist() == b.kept.tolist()
    assert a.D.tolist() == b.D.tolist()


RARITIES = {"reciprocal": impact.reciprocal_rarity, "exponential": impact.exponential_rarity}
COVERAGES = st.sampled_from([0.1, 0.25, 0.29, 0.5, 1.0])
# For these numbers of evicted tokens e and places k, a formula in floats is wrong at one place: (i + 1/2) e / k, or
# a step of e / k.
PLACES = [(30, 11), (52, 23), (60, 13), (90, 35), (110, 33)]


def covered(p: EvictionProblem, share: float, allocation: str = "cut") -> EvictionProblem:
    return replace(
        p, parameters=replace(p.parameters, coverage=share, allocation=allocation)  # type: ignore[arg-type]
    )


def trunks_of(stages: CrystalStages, text: Text, merge: str, S1: CoAttention | None = None) -> Trunks:
    p = replace(text.parameters, merge=merge)  # type: ignore[arg-type]
    return stages.trunks(S1 or text.coattention, text.impact, text.ends, p)


@pytest.mark.spec("CC-RARITY-FORMS")
@given(ids=st.integers(1, 20).flatmap(token_ids), S=st.floats(0.1, 20))
def test_all_forms_order_alike(stages: CrystalStages, ids: IntVector, S: float) -> None:
    """Check that, at equal salience, a rarer token never has less impact, in each of the three forms."""
    salience, c = np.full(len(ids), S), impact.token_counts(ids)
    actual = {
        form: stages.impact(salience, ids, replace(PAPER, rarity=form))  # type: ignore[arg-type]
        for form in ("logarithm", *RARITIES)
    }
    for form, M in actual.items():
        p = replace(PAPER, rarity=form)  # type: ignore[arg-type]
        assert not list(stage_checks.impact(M, salience, ids, p))
        assert (M[np.argsort(-c, kind="stable")] == np.sort(M)).all()


@pytest.mark.spec("CC-IMPACT", "CC-RARITY-FORMS")
def test_impact_of_an_exact_rarity_is_exact(stages: CrystalStages) -> None:
    """Check that M is computed in the specified order, whose result differs from 0.5 S + 10 U in the last bits.

    S is 0.11 to 0.16. The counts are 6, so U is 1/7.
    """
    S, ids = np.arange(11, 17) / 100, np.zeros(6, dtype=np.int64)
    want = 20.0 * (0.5 * (S / 20.0) + 0.5 * (1 / 7))
    assert (want != 0.5 * S + 10 * (1 / 7)).any()
    assert stages.impact(S, ids, replace(PAPER, rarity="reciprocal")).tolist() == want.tolist()


@pytest.mark.spec("CC-TRUNKS", "CC-ADAPTIVE-MERGE")
@given(text=texts())
def test_the_adaptive_merge_equals_the_brute_force(stages: CrystalStages, text: Text) -> None:
    """Check that S2 with the threshold of the segment equals the brute force exactly."""
    p = replace(text.parameters, merge="median")
    actual = trunks_of(stages, text, "median")
    assert not list(stage_checks.trunks(actual, text.coattention, text.impact, text.ends, p))


@pytest.mark.spec("CC-ADAPTIVE-MERGE")
@given(text=texts(), start=st.integers(1, 99))
def test_where_a_segment_begins_says_nothing(stages: CrystalStages, text: Text, start: int) -> None:
    """Check that a shift of all positions shifts the trunks, and does not change them otherwise."""
    S1 = text.coattention
    later = replace(
        S1, start=start, intra=np.where(S1.intra < 0, -1, S1.intra + start),
        cross=np.where(S1.cross < 0, -1, S1.cross + start),
    )
    a, b = trunks_of(stages, text, "median"), trunks_of(stages, text, "median", later)
    assert (a.offsets + start).tolist() == b.offsets.tolist()


@pytest.mark.spec("CC-ADAPTIVE-MERGE")
def test_the_next_float_exceeds_the_median(stages: CrystalStages) -> None:
    """Check three interfaces with one edge each, of weights 1/2, 1/2 and the next float after 1/2.

    tau is exactly 1/2, so only the last interface merges.
    """
    heavier = float(np.nextafter(0.5, 1))
    rows: list[list[tuple[int, float]]] = [[] for _ in range(12)]
    rows[2], rows[5], rows[8] = [(3, 0.5)], [(6, 0.5)], [(9, heavier)]
    S1 = record([1.0] * 12, rows, [[]] * 12, 1, 0)
    text = Text(S1, np.ones(12), np.arange(12) % 3 == 2, PAPER)
    assert trunks_of(stages, text, "median").offsets.tolist() == [0, 3, 6, 12]


@pytest.mark.spec("CC-ADAPTIVE-MERGE")
def test_an_interface_does_not_exceed_its_own_strength(stages: CrystalStages) -> None:
    """tau MUST be the next float if three times a third of 0.1 + 0.2 + 0.6 is less than the sum in floats."""
    assert (0.1 + 0.2 + 0.6) / 3 * 3 < 0.1 + 0.2 + 0.6
    S1 = record([1.0] * 6, [[(3, 0.1)], [(3, 0.2)], [(3, 0.6)], [], [], []], [[]] * 6, 1, 0)
    text = Text(S1, np.ones(6), np.arange(6) == 2, PAPER)
    assert trunks_of(stages, text, "median").offsets.tolist() == [0, 3, 6]
    assert PAPER.tau_merge == (0.1 + 0.2 + 0.6) / 3
    assert trunks_of(stages, text, "fixed").offsets.tolist() == [0, 6]


@pytest.mark.spec("CC-COVERAGE")
@given(problem=evictions(), share=COVERAGES, allocation=st.sampled_from(["cut", "tiers"]))
def test_coverage_equals_the_brute_force(
    stages: CrystalStages, problem: EvictionProblem, share: float, allocation: str,
) -> None:
    """Kept positions, r and D MUST be equal for both allocations."""
    problem = covered(problem, share, allocation)
    assert not list(stage_checks.eviction(problem.run(stages), problem))


def of_sizes(sizes: list[int], budget: int, share: float) -> EvictionProblem:
    """Return an eviction problem that evicts trunks from the left and protects no trunk."""
    m, n = len(sizes), sum(sizes)
    return EvictionProblem(
        np.arange(m) / 1024, Trunks(np.cumsum([0, *sizes]), np.ones(m)), np.arange(n) / 8, np.ones(m),
        np.zeros(m, dtype=np.bool_), budget, replace(PAPER, coverage=share),
    )


@pytest.mark.spec("CC-COVERAGE")
@pytest.mark.parametrize(("share", "budget", "k"), [
    (0.29, 100, 29), (0.57, 100, 57), (0.58, 100, 58), (0.07, 300, 21),
    *[(1 - 10.0**-digits, 100, 99) for digits in (3, 5, 7, 10, 15)], (float(np.nextafter(1, 0)), 100, 99),
    *[(0.29 - 10.0**-digits, 100, 28) for digits in (3, 5, 7, 10, 15)], (float(np.nextafter(0.29, 0)), 100, 28),
    *[(10.0**-digits, 100, 0) for digits in (3, 5, 10, 300)], (0.010001, 100, 1), (0.01, 100, 1),
])
def test_a_share_is_the_decimal_that_is_written(stages: CrystalStages, share: float, budget: int, k: int) -> None:
    """Check that a share is the exact decimal number that is written: 0.29 of 100 tokens is 29 tokens.

    The product of floats is 28.999999999999996, which would be 28 tokens.
    """
    problem = of_sizes([5] * (budget // 5 + 30), budget, share)
    actual, bare = problem.run(stages), covered(replace(problem, budget=budget - k), 0.0).run(stages)
    assert len(actual.kept) - len(bare.kept) == k
    assert not list(stage_checks.eviction(actual, problem))


@pytest.mark.spec("CC-COVERAGE")
@pytest.mark.parametrize(("gone", "k"), PLACES)
def test_spacing_is_counted_in_whole_tokens(stages: CrystalStages, gone: int, k: int) -> None:
    """Divide the `gone` evicted tokens into k equal parts, and check that the middle token of each part comes back.

    A step in floats misses one token.
    """
    actual = of_sizes([1] * (gone + k), 2 * k, 0.5).run(stages)
    assert actual.kept.tolist() == [(2 * i + 1) * gone // (2 * k) for i in range(k)] + list(range(gone, gone + k))
