"""The essay's forms: mean salience, unit impact, tiers, renewal, and the profile itself."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.checks import stage_checks
from conformance.oracles import s1
from conformance.strategies.attention import AttentionInputs, attention_inputs, hot_sets
from conformance.strategies.eviction import EvictionProblem, evictions
from conformance.strategies.parameters import forms
from conformance.strategies.prompts import Prompt, prompts
from conformance.strategies.text import token_ids
from conformance.strategies.trunks import Text, texts
from reference.crystalcache import prefill
from spec.arrays import IntVector, Vector
from spec.backend import Backend, CrystalStages
from spec.parameters import ESSAY, PAPER, TINY


def in_tiers(problem: EvictionProblem) -> EvictionProblem:
    return replace(problem, parameters=replace(problem.parameters, allocation="tiers"))


@pytest.mark.spec("CC-MEAN-SALIENCE", "CC-COATTENTION")
@given(inputs=attention_inputs())
def test_mean_salience_equals_the_brute_force(stages: CrystalStages, inputs: AttentionInputs, precision: str) -> None:
    """S1 with `heads="mean"`, inside the certified box."""
    mean = replace(inputs, parameters=replace(inputs.parameters, heads="mean"))
    assert not list(stage_checks.coattention(mean.run(stages), mean, precision))


@pytest.mark.spec("CC-MEAN-SALIENCE")
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


@pytest.mark.spec("CC-UNIT-IMPACT")
@given(tokens=salient_tokens(), rarity=st.sampled_from(["logarithm", "reciprocal", "exponential"]))
def test_unit_impact_equals_the_brute_force(
    stages: CrystalStages, tokens: tuple[Vector, IntVector], rarity: str,
) -> None:
    """M_i MUST be half the share of the largest salience and half the rarity; it lies in [0, 0.8)."""
    p = replace(PAPER, impact="unit", rarity=rarity)  # type: ignore[arg-type]
    M = stages.impact(*tokens, p)
    assert not list(stage_checks.impact(M, *tokens, p))
    assert ((M >= 0) & (M < 0.8)).all()


@pytest.mark.spec("CC-UNIT-IMPACT")
@given(tokens=salient_tokens(), factor=st.sampled_from([0.25, 2.0, 16.0]))
def test_a_scale_of_salience_says_nothing(
    stages: CrystalStages, tokens: tuple[Vector, IntVector], factor: float,
) -> None:
    """A power of two on all salience leaves M to the bit: nothing constant is compared with it."""
    S, ids = tokens
    p = replace(PAPER, impact="unit")
    assert stages.impact(factor * S, ids, p).tolist() == stages.impact(S, ids, p).tolist()


@pytest.mark.spec("CC-UNIT-TRUNK-IMPACT")
@given(text=texts())
def test_unit_trunk_impact_equals_the_brute_force(stages: CrystalStages, text: Text) -> None:
    """The trunks are those of the paper; their impact lies in [0, 1), the least at 0."""
    p = replace(text.parameters, trunk_impact="unit")
    found = stages.trunks(text.coattention, text.impact, text.ends, p)
    assert not list(stage_checks.trunks(found, text.coattention, text.impact, text.ends, p))
    assert found.impact.min() == 0
    assert found.impact.max() < 1


@pytest.mark.spec("CC-TIER-COUNT", "CC-TIERS")
@given(problem=evictions())
def test_dissolution_in_tiers_equals_the_brute_force(stages: CrystalStages, problem: EvictionProblem) -> None:
    """Kept positions, r and D MUST be equal, ties included."""
    p = in_tiers(problem)
    assert not list(stage_checks.eviction(p.run(stages), p))


@pytest.mark.spec("CC-TIERS")
@given(problem=evictions())
def test_tiers_keep_the_size_bounds(stages: CrystalStages, problem: EvictionProblem) -> None:
    """n if n <= B; B_prot if that exceeds B; else between B - max(0, N_min - 1) and B. Protected trunks stay whole."""
    found = in_tiers(problem).run(stages)
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


@pytest.mark.spec("CC-TIERS")
@given(problem=evictions())
def test_tiers_and_the_cut_agree_where_nothing_or_everything_goes(
    stages: CrystalStages, problem: EvictionProblem,
) -> None:
    """The forms differ only in Stage 1."""
    n, B_prot = len(problem.impact), int(problem.trunks.sizes[problem.protected].sum())
    for B in (n, n + 1, B_prot):
        a, b = replace(problem, budget=B).run(stages), in_tiers(replace(problem, budget=B)).run(stages)
        assert (a.kept.tolist(), a.ratio.tolist(), a.D.tolist()) == (b.kept.tolist(), b.ratio.tolist(), b.D.tolist())


@pytest.mark.spec(
    "CC-TIERS", "CC-UNIT-IMPACT", "CC-UNIT-TRUNK-IMPACT", "CC-MEAN-SALIENCE", "CC-RARITY-FORMS", "CC-ADAPTIVE-MERGE",
    "CC-COVERAGE",
)
@given(prompt=prompts(), p=forms())
def test_a_prefill_in_any_form_equals_its_chain(backend: Backend, prompt: Prompt, p: Any, precision: str) -> None:
    """End to end, every stage judged from the one before it."""
    formed = replace(prompt, inputs=replace(prompt.inputs, parameters=p))
    found = prefill(backend=backend, **formed.arguments)
    assert not list(stage_checks.retention(found, formed, precision))


@pytest.mark.spec("CC-TIERS")
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


@pytest.mark.spec("CC-TIERS")
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
