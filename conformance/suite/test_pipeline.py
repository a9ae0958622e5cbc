"""Tests of the whole prefill: comparison with the brute force, ablations, and the policy made of five parts."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from conformance import tolerances
from conformance.checks import stage_checks
from conformance.checks.prefill_checks import prefill_complaints
from conformance.oracles import pipeline
from conformance.plugin import fewer_examples
from conformance.strategies.prompts import Prompt, prompts, random_prompt
from conformance.strategies.trunks import record
from reference.crystalcache import prefill
from reference.policies import crystalcache, retain
from reference.policies.selectors import fill_units
from spec.backend import Backend, CrystalStages
from spec.budget import parse_budget
from spec.parameters import PAPER, TINY
from spec.policy import LayerView, Needs, Observation
from spec.records import CrystalRetention, Trunks


def run(backend: Backend, prompt: Prompt, **changes: Any) -> CrystalRetention:
    return prefill(**{**prompt.arguments, "backend": backend, **changes})


def varied(backend: Backend, prompt: Prompt, **parameters: Any) -> CrystalRetention:
    return run(backend, prompt, parameters=replace(prompt.inputs.parameters, **parameters))


def brute_force(prompt: Prompt) -> pipeline.Prefill:
    inputs = prompt.inputs
    return pipeline.prefill(
        inputs.q.tolist(), inputs.k.tolist(), prompt.token_ids.tolist(), prompt.sentence_ends, prompt.share,
        inputs.parameters, inputs.scaling, inputs.softcap, inputs.sinks,
    )


def same_records(a: CrystalRetention, b: CrystalRetention) -> bool:
    """Return True if all records are equal bit for bit."""
    def arrays(result: CrystalRetention) -> list[np.ndarray[Any, Any]]:
        S1, S4 = result.coattention, result.graph
        return [
            result.kept, result.offsets, result.ratio, result.scores, result.D, result.protected, result.impact,
            S1.salience, S1.intra, S1.intra_weight, S1.cross, S1.cross_weight, result.trunks.offsets,
            result.trunks.impact, S4.indptr, S4.indices, S4.weights, S4.degree, S4.D,
        ]

    return (a.budget, a.over_budget) == (b.budget, b.over_budget) and all(
        x.dtype == y.dtype and np.array_equal(x, y, equal_nan=x.dtype.kind == "f")
        for x, y in zip(arrays(a), arrays(b), strict=True)
    )


@pytest.mark.spec("CC-PREFILL")
@given(prompt=prompts())
def test_a_prefill_equals_algorithm_2(backend: Backend, precision: str, prompt: Prompt) -> None:
    """Kept positions MUST be those of Algorithm 2, or follow from results of S1 inside the certified box."""
    actual, want = run(backend, prompt), brute_force(prompt)
    same = actual.kept.tolist() == want.eviction.kept
    event("kept as the brute force" if same else "kept as a near tie allows")
    assert not (wrong := prefill_complaints(actual, prompt, backend, precision)), wrong[0]


@pytest.mark.spec("CC-PREFILL")
@given(prompt=prompts())
def test_a_prefill_is_a_function_of_its_arguments(backend: Backend, prompt: Prompt) -> None:
    """Equal arguments MUST have equal results, bit for bit. Read-only inputs are accepted, and no input is changed."""
    ids = prompt.token_ids.copy()
    ids.flags.writeable = False
    before = [prompt.inputs.q.copy(), prompt.inputs.k.copy(), ids.copy()]
    a, b = run(backend, prompt, token_ids=ids), run(backend, prompt, token_ids=ids)
    assert same_records(a, b)
    for array, copy in zip([prompt.inputs.q, prompt.inputs.k, ids], before, strict=True):
        assert np.array_equal(array, copy)


@pytest.mark.spec("CC-PREFILL")
@given(prompt=prompts())
def test_strides_say_nothing(backend: Backend, precision: str, prompt: Prompt) -> None:
    """Check that the strides of views do not change the result."""
    q, k = prompt.inputs.q, prompt.inputs.k
    strided = run(
        backend, prompt, q=np.asfortranarray(q), k=np.repeat(k, 2, axis=1)[:, ::2],
        token_ids=np.repeat(prompt.token_ids, 2)[::2],
    )
    assert not (wrong := prefill_complaints(strided, prompt, backend, precision)), wrong[0]


@pytest.mark.spec("CC-PREFILL")
@given(prompt=prompts(), data=st.data())
def test_ids_are_names(backend: Backend, prompt: Prompt, data: st.DataObject) -> None:
    """Check that a bijection of ids, applied also to the sentence ends, does not change the result."""
    values = sorted({*prompt.token_ids.tolist(), *prompt.sentence_ends})
    names = dict(zip(values, data.draw(st.permutations(range(5, 5 + len(values))), label="names"), strict=True))
    renamed = run(
        backend, prompt, token_ids=np.array([names[i] for i in prompt.token_ids.tolist()]),
        sentence_ends=frozenset(names[i] for i in prompt.sentence_ends),
    )
    assert same_records(renamed, run(backend, prompt))


@pytest.mark.spec("CC-BUDGET", "CC-PROTECTED")
@given(prompt=prompts())
def test_the_result_says_how_far_it_is_over_budget(backend: Backend, prompt: Prompt) -> None:
    """Check B_prot <= |R| <= max(B, B_prot), and that over_budget is the excess. Sink and window are kept."""
    actual, p, n = run(backend, prompt), prompt.inputs.parameters, len(prompt.token_ids)
    B_prot = int(actual.trunks.sizes[actual.protected].sum())
    assert B_prot <= len(actual.kept) <= max(actual.budget, B_prot)
    assert actual.over_budget == max(0, len(actual.kept) - actual.budget) == max(0, min(B_prot, n) - actual.budget)
    assert {*range(min(n, p.N_sink)), *range(max(0, n - p.W_recent), n)} <= set(actual.kept.tolist())


@pytest.mark.spec("CC-SCORE", "CC-NORMALISED-IMPACT", "CC-IMPACT")
@given(prompt=prompts())
def test_uniform_impact_equals_alpha_0(backend: Backend, prompt: Prompt) -> None:
    """Check the ablation of Table 10: equal scores and r, bit for bit, and equal R except in the partial trunk.

    Trunks and the graph do not change.
    """
    uniform, D_only = varied(backend, prompt, impact="uniform"), varied(backend, prompt, alpha=0.0)
    assert np.array_equal(uniform.scores, D_only.scores, equal_nan=True)
    assert uniform.ratio.tolist() == D_only.ratio.tolist()
    for g, members in enumerate(stage_checks.trunk_lists(uniform.trunks)):
        a, b = (np.intersect1d(members, actual.kept).tolist() for actual in (uniform, D_only))
        partial = 0 < uniform.ratio[g] < 1
        assert a == (members[: len(b)] if partial else b)
    assert uniform.trunks.offsets.tolist() == D_only.trunks.offsets.tolist()
    assert uniform.graph.weights.tolist() == D_only.graph.weights.tolist()


@pytest.mark.spec("CC-IMPACT")
@given(prompt=prompts())
def test_no_von_restorff_changes_the_impact_alone(backend: Backend, prompt: Prompt) -> None:
    """Check the ablation of Table 10: M_i = clip(S_i). Trunks and D equal the default, bit for bit."""
    a, b = varied(backend, prompt, impact="mixture"), varied(backend, prompt, impact="salience")
    assert b.impact.tolist() == b.coattention.salience.tolist() == a.coattention.salience.tolist()
    assert a.trunks.offsets.tolist() == b.trunks.offsets.tolist()
    assert a.graph.D.tolist() == b.graph.D.tolist()


@pytest.mark.spec("CC-SCORE", "CC-CRYSTALLIZATION")
@given(prompt=prompts(), alpha=st.sampled_from([0.25, 2.0]))
def test_without_D_alpha_says_nothing(backend: Backend, prompt: Prompt, alpha: float) -> None:
    """Check the ablation of Table 10, M only: score = alpha M~, so R does not depend on alpha > 0."""
    a, b = varied(backend, prompt, graph="zero", alpha=1.0), varied(backend, prompt, graph="zero", alpha=alpha)
    assert np.array_equal(a.scores * alpha, b.scores, equal_nan=True)
    assert a.kept.tolist() == b.kept.tolist()


@pytest.mark.spec("CC-SCORE")
@given(prompt=prompts())
def test_without_edges_D_is_a_half(backend: Backend, prompt: Prompt) -> None:
    """Check that D = 1/2 and score = max(1/2, alpha M~), if E is empty or tau_edge >= sqrt 2."""
    bare = varied(backend, prompt, k_intra=0, k_cross=0, graph="degree")
    pruned = varied(backend, prompt, tau_edge=1.5, graph="degree")
    for actual in (bare, pruned):
        assert actual.graph.D.tolist() == [0.5] * len(actual.trunks.sizes)
        assert (actual.scores[~actual.protected] >= 0.5).all()


@pytest.mark.spec("CC-PROTECTED")
@given(prompt=prompts())
def test_no_sink_and_no_window_protect_nothing(backend: Backend, prompt: Prompt) -> None:
    """Check that N_sink = W_recent = 0 protects no trunk, and that B is then only the ceiling."""
    actual = varied(backend, prompt, N_sink=0, W_recent=0)
    assert not actual.protected.any()
    assert actual.budget == -(-prompt.share.numerator * len(prompt.token_ids) // prompt.share.denominator)


@pytest.mark.spec("CC-PREFILL")
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("group", [1, 2, 4, 7, 8])
def test_two_tokens_and_every_head_group(backend: Backend, dtype: type, group: int) -> None:
    """Check the shortest segment in each floating type."""
    actual = prefill(
        np.ones((group, 2, 3), dtype), np.ones((1, 2, 3), dtype), np.array([1, 2]), frozenset({2}), 0.5, TINY, backend
    )
    assert actual.kept.tolist() == [0, 1]
    assert actual.kept.dtype == np.int64


@pytest.mark.spec("CC-PREFILL", "CC-ATTENTION")
@fewer_examples
@given(prompt=prompts())
def test_the_default_scaling_is_one_over_the_root_of_d(backend: Backend, prompt: Prompt) -> None:
    d = prompt.inputs.q.shape[2]
    assert same_records(run(backend, prompt, scaling=None), run(backend, prompt, scaling=d**-0.5))


@pytest.mark.spec("CC-BUDGET-FORMS")
@fewer_examples
@given(prompt=prompts(), tokens=st.integers(1, 30))
def test_every_form_of_a_budget(backend: Backend, prompt: Prompt, tokens: int) -> None:
    """Check that a float, a decimal, a percentage and a Budget mean the same share. An int is a number of tokens."""
    forms = [float(prompt.budget), prompt.budget, f"{float(prompt.share) * 100:g}%", parse_budget(prompt.budget)]
    actual = [run(backend, prompt, budget=form) for form in forms]
    assert all(same_records(actual[0], other) for other in actual[1:])
    p = prompt.inputs.parameters
    assert run(backend, prompt, budget=tokens).budget == max(p.N_sink + p.W_recent, tokens)


def observation(prompt: Prompt, groups: int = 1) -> Observation:
    inputs = prompt.inputs
    view = LayerView(inputs.q, inputs.k, None, inputs.scaling, inputs.softcap, sinks=inputs.sinks)
    return Observation(len(prompt.token_ids), groups, prompt.token_ids, {0: view})


@pytest.mark.spec("CC-PREFILL")
@fewer_examples
@given(prompt=prompts())
def test_the_default_is_half_of_the_tokens(backend: Backend, prompt: Prompt) -> None:
    asked = {name: value for name, value in prompt.arguments.items() if name != "budget"}
    assert same_records(prefill(**asked, backend=backend), run(backend, prompt, budget=0.5))


@pytest.mark.spec("CC-PREFILL", "PO-RETAIN")
@given(prompt=prompts())
def test_five_parts_compose_to_the_prefill(backend: Backend, prompt: Prompt) -> None:
    """The scorer, budgets, selector and protection of the policy MUST have the result of `prefill`, bit for bit."""
    policy = crystalcache(prompt.sentence_ends, prompt.inputs.parameters, backend)
    assert policy.name == "crystalcache"
    assert policy.scorer.needs == Needs("observed", None, token_ids=True, accepts_tensor=backend.accepts_tensor)
    actual = retain(policy, parse_budget(prompt.budget), observation(prompt))
    assert isinstance(actual, CrystalRetention)
    assert same_records(actual, run(backend, prompt))


@pytest.mark.spec("PO-RETAIN")
@given(prompt=prompts())
def test_its_scores_serve_another_selector(backend: Backend, prompt: Prompt) -> None:
    """Check a selector of whole trunks instead of the dissolution: it keeps B tokens and returns no records."""
    policy = crystalcache(prompt.sentence_ends, prompt.inputs.parameters, backend)
    budget, shown = parse_budget(prompt.budget), observation(prompt)
    retention = retain(replace(policy, selector=fill_units), budget, shown)
    assert not isinstance(retention, CrystalRetention)
    assert len(retention.positions) == min(shown.seen, max(policy.floor, budget.tokens(shown.seen)))


@pytest.mark.spec("CC-PREFILL")
def test_paper_parameters_on_a_prompt_longer_than_the_floor(backend: Backend, precision: str) -> None:
    """Check PAPER with 240 tokens: B = max(132, 168), and tokens are evicted."""
    prompt = replace(random_prompt(np.random.default_rng(7), PAPER, 240), budget="0.7")
    actual = run(backend, prompt)
    assert actual.budget == 168
    assert 166 <= len(actual.kept) <= 168
    assert not (wrong := prefill_complaints(actual, prompt, backend, precision)), wrong[0]


@pytest.mark.spec("CC-IMPACT")
def test_a_token_that_occurs_once_has_an_impact_of_5_956_or_more(stages: CrystalStages) -> None:
    """Check the impact for c = 1: 5.956 at the least salience, and 15.906 at the greatest."""
    M = stages.impact(np.array([PAPER.M_min, PAPER.M_max]), np.array([1, 2]), PAPER)
    assert np.round(M, 3).tolist() == [5.956, 15.906]


@pytest.mark.spec("CC-TRUNK-WEIGHT")
@pytest.mark.parametrize(("edges", "w", "W"), [(64, 0.31, 0.248), (4, 0.9, 0.18)])
def test_many_weak_edges_outweigh_a_few_strong_ones(stages: CrystalStages, edges: int, w: float, W: float) -> None:
    """Check the example of B.1.10: 64 edges of .31 between 10 x 10 tokens weigh more than 4 edges of .9.

    The prose of the paper has the opposite order.
    """
    intra: list[list[tuple[int, float]]] = [[] for _ in range(20)]
    for edge in range(edges):
        intra[edge % 10].append((10 + edge // 10, w))
    actual = record([1.0] * 20, intra, [[] for _ in range(20)], 8, 4)
    graph = stages.graph(actual, Trunks(np.array([0, 10, 20]), np.ones(2)), PAPER)
    assert tolerances.close("CC-TRUNK-WEIGHT", graph.weights, [w * math.sqrt(edges / 100)] * 2)
    assert round(float(graph.weights[0]), 3) == W
