"""Set-conditioned selection over any host, while tokens are decoded, and what the paper rejected."""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from conformance.assurance.brute import KERNEL, W, plain
from conformance.assurance.oracles import policies as oracle
from conformance.assurance.oracles import signatures as signed
from conformance.assurance.oracles.knorm import knorm as brute_knorm
from conformance.assurance.oracles.snapkv import snapkv as brute_snapkv
from conformance.assurance.oracles.triattention import rows as tri_rows
from conformance.assurance.policy_cases import CASES, LAM, alpha_kept, plain_values, triattention
from conformance.assurance.policy_steps import PROMPT, STEPS, decoded, long, shown
from conformance.plugin import sparingly
from conformance.strategies.policy_inputs import Inputs, decided, drawn, observation
from reference import diversity, policies
from reference.policies.diversity import Diverse
from reference.policies.knorm import knorm_score
from reference.policies.scorers import LayerScorer
from spec.backend import Backend
from spec.budget import Budget
from spec.errors import BackendUnavailable, SpecError
from spec.policy import Cadence, Needs, Policy, Scores

seeds = st.integers(0, 2**32 - 1)
reference_items = pytest.mark.usefixtures("reference_items")


@reference_items
@pytest.mark.spec("DV-POLICY")
@pytest.mark.parametrize("name", ["diversity", "diversity-in-adakv"])
@sparingly
@given(seed=seeds, B=st.integers(1, 24))
def test_kept_sets_are_those_of_brute_force(name: str, seed: int, B: int) -> None:
    case, inputs = CASES[name], drawn(seed, n=3 + seed % 20)
    assert decided(case.policy(inputs), inputs, B) == case.expected(inputs, max(B, case.floor))


Host = Callable[[Inputs], Policy]
HOSTS: dict[str, Host] = {
    "tova": lambda i: policies.tova(), "knorm": lambda i: policies.knorm(),
    "pyramidkv": lambda i: policies.pyramidkv(W, KERNEL), "streamingllm": lambda i: policies.streaming_llm(2),
    "adakv": lambda i: policies.adakv(W, KERNEL), "defensivekv": CASES["defensivekv"].policy,
    "triattention": CASES["triattention"].policy, "rkv": lambda i: policies.rkv(W, KERNEL),
    "adakv(keydiff)": lambda i: policies.with_adaptive_budgets(policies.keydiff(), Fraction(1, 5)),
}


@reference_items
@pytest.mark.spec("DV-POLICY")
@pytest.mark.parametrize("name", HOSTS)
@sparingly
@given(seed=seeds, B=st.integers(1, 24))
def test_without_penalty_the_hosts_set_stays(name: str, seed: int, B: int) -> None:
    """At lambda = 0 MUST be the host's own set, ties and protection included."""
    inputs = drawn(seed)
    host = HOSTS[name](inputs)
    assert decided(policies.diverse(host, 0.0), inputs, B) == decided(host, inputs, B)


@reference_items
@pytest.mark.spec("DV-POLICY")
@pytest.mark.parametrize("lam", [0.0, LAM])
def test_a_host_sees_what_it_sees_alone(lam: float) -> None:
    """Signatures need every layer's values; a host that scores by one layer MUST still be shown that one."""
    inputs = drawn(21, n=20, L=3, heads=(2, 1))
    scorer = LayerScorer(Needs("observed", 0), lambda view: knorm_score(view).mean(axis=0, keepdims=True))
    knorm = policies.knorm()
    host = Policy("first-layer", scorer, knorm.budgets, knorm.selector, knorm.protection)
    rows = [brute_knorm(plain(view)) for view in inputs.layers]
    first = [sum(x or 0.0 for x in column) / 2 for column in zip(*rows[0], strict=True)]
    (V,) = signed.signatures(plain_values(inputs), "flat")
    want = alpha_kept(list(first), V, 7, lam) if lam else oracle.top(first, 7)
    assert decided(policies.diverse(host, lam), inputs, 7) == [want]


@reference_items
@pytest.mark.spec("DV-POLICY")
@sparingly
@given(seed=seeds, B=st.integers(3, 20), mode=st.sampled_from(["flat", "layer", "head"]))
def test_alpha_inside_a_pyramid_is_one_line(seed: int, B: int, mode: diversity.Signature) -> None:
    """Which the paper leaves untested: budgets are the pyramid's, choices alpha's, in each signature mode."""
    inputs = drawn(seed, n=4 + seed % 20)
    kept = decided(policies.diverse(policies.pyramidkv(W, KERNEL), 2.0, mode), inputs, B)
    shares = oracle.pyramid_shares(Fraction(B), min(W, inputs.n), len(inputs.layers), inputs.n, 20)
    V, found = signed.signatures(plain_values(inputs), mode), list[list[int]]()
    per = len(inputs.layers) * inputs.H_kv // len(V)
    for view, share in zip(inputs.layers, shares, strict=True):
        for row in brute_snapkv(plain(view), W, KERNEL):
            found.append(alpha_kept(row, V[len(found) // per], share, 2.0))
    assert kept == found


@reference_items
@pytest.mark.spec("DV-POLICY")
def test_alpha_inside_ada_kv_is_one_line() -> None:
    """Heads differ in their number of tokens, the layer's total is exact, and the choice is another than Ada-KV's."""
    inputs = drawn(5, n=24, L=2, heads=(3, 1))
    kept = decided(policies.diverse(policies.adakv(W, KERNEL), 0.5), inputs, 8)
    base = decided(policies.adakv(W, KERNEL), inputs, 8)
    assert [len(group) for group in kept] == [len(group) for group in base]
    assert [sum(map(len, kept[at : at + 3])) for at in (0, 3)] == [24, 24]
    assert len({len(group) for group in kept}) > 1
    assert kept != base


@reference_items
@pytest.mark.spec("DV-POLICY")
@sparingly
@example(seed=3, B=5)
@given(seed=seeds, B=st.integers(4, 8))
def test_alpha_goes_on_while_tokens_are_decoded(seed: int, B: int) -> None:
    """The paper's policy: TriAttention decides when the slack is full, alpha chooses."""
    inputs, slack = long(seed), 3
    policy = policies.diverse(triattention(inputs, "global", slack=slack), LAM)
    (V,), live = signed.signatures(plain_values(inputs), "flat"), list(range(PROMPT))
    for seen, found in enumerate(decoded(policy, inputs, B), PROMPT):
        live = live if seen == PROMPT else [*live, seen - 1]
        if seen == PROMPT or len(live) >= B + slack:
            at = live
            (row,) = tri_rows(inputs, "global", lambda g, at=at: at, seen, 0)  # type: ignore[misc]
            live = [live[i] for i in alpha_kept(row, [V[p] for p in live], B, LAM)]
        assert found == [live]


@reference_items
@pytest.mark.spec("DV-POLICY")
@sparingly
@given(seed=seeds, B=st.integers(2, 7), mode=st.sampled_from(["flat", "layer", "head"]))
def test_a_signature_outlives_its_tokens_in_other_heads(seed: int, B: int, mode: diversity.Signature) -> None:
    """Each head drops tokens of its own; a signature of the whole cache is still the one of its first day."""
    inputs = long(seed)
    host = policies.knorm()
    running = Policy(
        host.name, host.scorer, host.budgets, host.selector, host.protection, Cadence(every=2), host.granularity
    )
    V = signed.signatures(plain_values(inputs), mode)
    norms = [row for view in inputs.layers for row in brute_knorm(plain(view))]
    part, live = len(norms) // len(V), [list(range(PROMPT)) for _ in norms]
    for seen, found in enumerate(decoded(policies.diverse(running, LAM, mode), inputs, B), PROMPT):
        for g, row in enumerate(norms):
            at = live[g] if seen == PROMPT else [*live[g], seen - 1]
            if seen == PROMPT or (seen % 2 == 0 and len(at) > B):
                at = [at[i] for i in alpha_kept([row[p] for p in at], [V[g // part][p] for p in at], B, LAM)]
            live[g] = at
        assert found == live


@reference_items
@pytest.mark.spec("DV-POLICY", "DV-VARIANT-B")
@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: policies.diverse(policies.knorm(), -0.1), "lam"),
        (lambda: policies.diverse(policies.knorm(), float("nan")), "lam"),
        (lambda: policies.diverse(policies.knorm(), float("inf")), "lam"),
        (lambda: policies.toward_mean_values(policies.knorm(), -0.1), "lam"),
        (lambda: policies.diverse(policies.h2o()), "host"), (lambda: policies.diverse(policies.chunkkv()), "host"),
        (lambda: policies.diverse(policies.diverse(policies.knorm())), "host"),
        (lambda: policies.diverse(policies.tova(), mode="head"), "mode"),
        (lambda: policies.diverse(policies.streaming_llm(), mode="layer"), "mode"),
        (lambda: policies.diverse(policies.knorm(), mode="learned"), "mode"),
        (lambda: Diverse(policies.diverse(policies.knorm()).selector.stages, -1.0), "lam"),  # type: ignore[attr-defined]
    ],
)
def test_a_composition_that_is_not_defined_is_refused(make: Callable[[], object], argument: str) -> None:
    """Lambda below 0 or NaN, a host that keeps more than single tokens, a signature finer than the kept sets."""
    with pytest.raises(SpecError) as caught:
        make()
    assert caught.value.argument == argument


@reference_items
@pytest.mark.spec("DV-POLICY")
def test_scores_without_signatures_are_refused() -> None:
    selector = policies.diverse(policies.knorm()).selector
    with pytest.raises(SpecError, match=r"scores\.signatures"):
        selector(Scores(np.zeros((1, 2)), np.arange(3)), np.array([1]), np.zeros(2, dtype=np.bool_))


@reference_items
@pytest.mark.spec("DV-POLICY")
@pytest.mark.parametrize("blind_layers", [{0, 1}, {1}])
def test_values_that_were_not_captured_are_missed(blind_layers: set[int]) -> None:
    inputs = drawn(9, n=12, L=2, heads=(1, 1))
    policy = policies.diverse(policies.knorm())
    assert policy.scorer.needs.values
    seen = observation(policy, inputs)
    blind = {at: replace(x, v=None if at in blind_layers else x.v) for at, x in seen.layers.items()}
    with pytest.raises(SpecError, match="v = None"):
        policies.retain(policy, Budget(count=6), type(seen)(seen.seen, seen.groups, None, blind))


@reference_items
def test_a_backend_without_the_stage_says_so() -> None:
    with pytest.raises(BackendUnavailable, match="no stage family 'diversity'"):
        policies.diverse(policies.knorm(), backend=Backend("mine"))


@reference_items
@pytest.mark.spec("DV-VARIANT-B")
@sparingly
@given(seed=seeds, B=st.integers(1, 20), lam=st.sampled_from([0.0, 0.5, 2.0]))
def test_variant_b_adds_a_cosine_to_the_score(seed: int, B: int, lam: float) -> None:
    inputs = drawn(seed)
    (V,), found = signed.signatures(plain_values(inputs), "flat"), []
    prior = signed.toward_mean(V)
    for view in inputs.layers:
        for row in brute_knorm(plain(view)):
            found.append(oracle.top([(x or 0.0) + lam * p for x, p in zip(row, prior, strict=True)], B))
    assert decided(policies.toward_mean_values(policies.knorm(), lam), inputs, B) == found


@reference_items
@pytest.mark.spec("DV-VARIANT-B")
def test_variant_b_keeps_copies_where_alpha_keeps_one() -> None:
    """What the paper blames: no kept token takes part."""
    assert policies.toward_mean_values(policies.knorm()).name == "toward-mean(knorm)"
    inputs = drawn(6, n=10, L=1, heads=(1, 1))
    view = inputs.layers[0]
    for array in (view.k, np.asarray(view.v)):
        array[0, 3] = array[0, 7]
    view.k[0, [3, 7]] *= 0.1
    (modular,) = decided(policies.toward_mean_values(policies.knorm()), inputs, 3)
    (conditioned,) = decided(policies.diverse(policies.knorm(), 9.0), inputs, 3)
    assert {3, 7} <= set(modular)
    assert len({3, 7} & set(conditioned)) == 1


@reference_items
@pytest.mark.spec("DV-SCHEDULE")
@given(B=st.integers(2, 200), rounds=st.integers(2, 30), share=st.floats(-1, 1))
def test_a_schedule_is_a_line_whose_mean_is_the_budget(B: int, rounds: int, share: float) -> None:
    tilt = round(share * (B - 1))
    found = policies.scheduled(B, rounds, tilt)
    assert found.sum() == B * rounds
    assert (found[0], found[-1]) == (B + tilt, B - tilt)
    assert found.tolist() == signed.schedule(B, rounds, tilt)


@reference_items
@pytest.mark.spec("DV-SCHEDULE")
@pytest.mark.parametrize(
    ("arguments", "argument"), [((8, 1, 0), "rounds"), ((8, 4, 8), "tilt"), ((8, 4, -8), "tilt")]
)
def test_a_schedule_that_is_none_is_refused(arguments: tuple[int, int, int], argument: str) -> None:
    """One round, or a round without a token."""
    with pytest.raises(SpecError) as caught:
        policies.scheduled(*arguments)
    assert caught.value.argument == argument


@reference_items
@pytest.mark.spec("DV-SCHEDULE")
@pytest.mark.parametrize("tilt", [3, -3])
def test_a_driver_gives_each_round_its_budget(tilt: int) -> None:
    """A decision in every step: what is held after each is the schedule's, where there are as many tokens."""
    inputs = long(4)
    policy = policies.tova()
    budgets = policies.scheduled(5, STEPS, tilt)
    prompt = shown(policy, inputs, [range(PROMPT)] * 2, PROMPT, PROMPT - 1)
    _, running = policies.start(policy, Budget(count=PROMPT), prompt)
    before = PROMPT
    for seen, B in enumerate(budgets.tolist(), PROMPT + 1):
        live = [[*row, seen - 1] for row in running.live.tolist()]
        now = shown(policy, inputs, live, seen, seen - 1)
        _, running = policies.advance(policy, Budget(count=B), running, now)
        assert running.live.shape[1] == min(before + 1, B)
        before = running.live.shape[1]
