"""Set-conditioned selection: signatures, hosts, while tokens are decoded, and what the paper rejected."""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.assurance.policy_cases import CASES, LAM, alpha_kept, plain_values
from conformance.assurance.policy_steps import PROMPT, decoded, long
from conformance.methods import policies as oracle
from conformance.methods import signatures as signed
from conformance.methods.brute import KERNEL, W, plain
from conformance.methods.knorm import knorm as brute_knorm
from conformance.oracles import diversity as brute
from conformance.plugin import sparingly
from conformance.strategies.numbers import seeds
from conformance.strategies.policy_inputs import Inputs, decided, drawn, observation
from reference import diversity, policies
from reference.policies.diversity import Diverse
from reference.policies.knorm import knorm_score
from reference.policies.scorers import LayerScorer
from spec.backend import Backend
from spec.budget import Budget
from spec.errors import BackendUnavailable, SpecError
from spec.policy import Cadence, Needs, Policy, Scores

reference_items = pytest.mark.usefixtures("reference_items")


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


@pytest.mark.usefixtures('reference_items')
@pytest.mark.spec("DV-COSINE")
@given(seed=seeds, d=st.integers(1, 40))
def test_sums_go_from_the_first_channel_to_the_last(seed: int, d: int) -> None:
    """The same bits as a loop over numbers."""
    u = np.random.default_rng(seed).standard_normal((5, d)) * 3
    V = diversity.unit_rows(u)
    assert V.tolist() == [signed.unit(row) for row in u.tolist()]
    assert diversity.cosines(V).tolist() == [[brute.cosine(a, b) for b in V.tolist()] for a in V.tolist()]


@pytest.mark.usefixtures('reference_items')
@pytest.mark.spec("DV-SIGNATURE")
@pytest.mark.parametrize("mode", ["flat", "layer", "head"])
@sparingly
@given(seed=seeds)
def test_signatures_have_the_bits_of_brute_force(mode: diversity.Signature, seed: int) -> None:
    inputs = drawn(seed)
    found = diversity.signatures([np.asarray(view.v) for view in inputs.layers], mode)
    assert found.tolist() == signed.signatures(plain_values(inputs), mode)
