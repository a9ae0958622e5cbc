"""Diversity and NestedKV: policies whose stages a backend may bring."""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.assurance.policy_cases import CASES, LAM, alpha_kept, plain_values
from conformance.assurance.policy_steps import PROMPT, decoded, long
from conformance.methods import nestedkv as policy_oracle
from conformance.methods import policies as oracle
from conformance.methods import signatures as signed
from conformance.methods.brute import KERNEL, W, plain
from conformance.methods.knorm import knorm as brute_knorm
from conformance.oracles import diversity as brute
from conformance.oracles import nestedkv as stages
from conformance.plugin import sparingly
from conformance.strategies.numbers import NESTED, keys, seeds
from conformance.strategies.policy_inputs import Inputs, decided, drawn
from conformance.suite.test_nestedkv import lengths
from conformance.tolerances import scores_agree
from reference import diversity, policies
from reference import nestedkv as nk
from reference.directions import unit_keys
from reference.policies.knorm import knorm_score
from reference.policies.names import make_policy
from reference.policies.scorers import LayerScorer
from spec.backend import resolve
from spec.budget import Budget
from spec.errors import SpecError
from spec.parameters import NESTEDKV
from spec.policy import Cadence, LayerView, Needs, Observation, Policy

pytestmark = pytest.mark.usefixtures("reference_items")

Host = Callable[[Inputs], Policy]
HOSTS: dict[str, Host] = {
    "tova": lambda i: policies.tova(), "knorm": lambda i: policies.knorm(),
    "pyramidkv": lambda i: policies.pyramidkv(W, KERNEL), "streamingllm": lambda i: policies.streaming_llm(2),
    "adakv": lambda i: policies.adakv(W, KERNEL), "defensivekv": CASES["defensivekv"].policy,
    "triattention": CASES["triattention"].policy, "rkv": lambda i: policies.rkv(W, KERNEL),
    "adakv(keydiff)": lambda i: policies.with_adaptive_budgets(policies.keydiff(), Fraction(1, 5)),
}


@pytest.mark.spec("DV-POLICY")
@pytest.mark.parametrize("name", HOSTS)
@sparingly
@given(seed=seeds, B=st.integers(1, 24))
def test_without_penalty_the_hosts_set_stays(name: str, seed: int, B: int) -> None:
    """At lambda = 0 MUST be the host's own set, ties and protection included."""
    inputs = drawn(seed)
    host = HOSTS[name](inputs)
    assert decided(policies.diverse(host, 0.0), inputs, B) == decided(host, inputs, B)


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
    assert decided(make_policy("diverse-knorm", {"diversity": lam, "rule": "variant_b"}), inputs, B) == found


@pytest.mark.spec("DV-SCHEDULE")
@given(B=st.integers(2, 200), rounds=st.integers(2, 30), share=st.floats(-1, 1))
def test_a_schedule_is_a_line_whose_mean_is_the_budget(B: int, rounds: int, share: float) -> None:
    tilt = round(share * (B - 1))
    found = policies.scheduled(B, rounds, tilt)
    assert found.sum() == B * rounds
    assert (found[0], found[-1]) == (B + tilt, B - tilt)
    assert found.tolist() == signed.schedule(B, rounds, tilt)


@pytest.mark.spec("DV-COSINE")
@given(seed=seeds, d=st.integers(1, 40))
def test_sums_go_from_the_first_channel_to_the_last(seed: int, d: int) -> None:
    """The same bits as a loop over numbers."""
    u = np.random.default_rng(seed).standard_normal((5, d)) * 3
    V = diversity.unit_rows(u)
    assert V.tolist() == [signed.unit(row) for row in u.tolist()]
    assert diversity.cosines(V).tolist() == [[brute.cosine(a, b) for b in V.tolist()] for a in V.tolist()]


@pytest.mark.spec("DV-SIGNATURE")
@pytest.mark.parametrize("mode", ["flat", "layer", "head"])
@sparingly
@given(seed=seeds)
def test_signatures_have_the_bits_of_brute_force(mode: diversity.Signature, seed: int) -> None:
    inputs = drawn(seed)
    found = diversity.signatures([np.asarray(view.v) for view in inputs.layers], mode)
    assert found.tolist() == signed.signatures(plain_values(inputs), mode)


@pytest.mark.spec("NK-STABLE", "NK-EPISODIC", "NK-CURRENT")
@given(seed=seeds, n=lengths, W=st.integers(1, 9), b=st.integers(1, 9))
def test_the_three_memories(seed: int, n: int, W: int, b: int) -> None:
    unit = unit_keys(keys(seed, 1, n).astype(np.float64))
    p = replace(NESTED, W=W, b_min=b, b_max=b + 2)
    stable, episodic, current = zip(*(stages.memories(unit[0].tolist(), i, p) for i in range(n)), strict=True)
    assert scores_agree(nk.stable_memory(unit)[0, 0], stable[0])
    found = nk.episodic_memory(unit, nk.block_size(n, p))[0], nk.current_memory(unit, W)[0]
    for got, want in zip(found, (episodic, current), strict=True):
        assert scores_agree(got.ravel(), [x for row in want for x in row])


@pytest.mark.spec("NK-EPISODIC")
def test_blocks_of_the_papers_lengths() -> None:
    sizes = {1: 128, 4127: 128, 4128: 129, 6400: 200, 8191: 255, 8192: 256, 32768: 256}
    assert {N: nk.block_size(N, NESTEDKV) for N in sizes} == sizes


@pytest.mark.spec("NK-ANOMALY")
@given(seed=seeds, n=lengths)
def test_anomalies_are_negative_cosines(seed: int, n: int) -> None:
    """A memory longer than 2^-16 has a direction, one of 2^-16 has none."""
    unit = unit_keys(keys(seed, 1, n).astype(np.float64))
    memory = keys(seed + 1, 1, n).astype(np.float64)
    memory[0, 0] = 0.0
    memory[0, 0, 1] = 2.0**-16 * (1 + seed % 2)
    got = nk.anomalies(unit, memory)[0]
    assert (got[0] == 0) == (seed % 2 == 0 or unit[0, 0, 1] == 0)
    pairs = zip(unit[0].tolist(), memory[0].tolist(), strict=True)
    assert scores_agree(got, [stages.anomaly(key, mu) for key, mu in pairs])


@pytest.mark.spec("NK-NESTEDKV")
def test_a_budget_below_the_sinks_is_refused() -> None:
    """Heads that cannot get their safeguard: four sinks each, three tokens of budget."""
    k = keys(1, 2, 20).astype(np.float64)
    seen = Observation(20, 2, None, {0: LayerView(k[:, :0], k, None, 1.0, None)})
    with pytest.raises(SpecError, match="protected") as caught:
        policies.retain(policies.nestedkv(), Budget(count=3), seen)
    assert caught.value.argument == "budget"
    kept, _ = policies.retain(policies.nestedkv(), Budget(count=4), seen)
    assert [kept.group(h).tolist() for h in range(2)] == [[0, 1, 2, 3]] * 2


@pytest.mark.spec("NK-NESTEDKV")
@given(seed=seeds, r=st.sampled_from(["0.25", "0.5", "0.75", "0.8", "0.9"]), n=st.integers(60, 90))
def test_a_layer_keeps_its_budget_exactly_and_every_head_its_quota(seed: int, r: str, n: int) -> None:
    inputs = drawn(seed, n, L=2, heads=(3, 1))
    B = policies.eviction_budget(r, n)
    kept = decided(policies.nestedkv(), inputs, B)
    assert [sum(map(len, kept[layer:][:3])) for layer in (0, 3)] == [3 * B, 3 * B]
    assert min(map(len, kept)) >= max(4, int(Fraction(1, 5) * B))
    assert all(group[:4] == [0, 1, 2, 3] for group in kept)


@pytest.mark.spec("NK-TOKENS")
@given(percent=st.integers(0, 99), N=st.integers(1, 5000))
def test_the_budget_is_the_exact_floor(percent: int, N: int) -> None:
    kept = (100 - percent) * N // 100
    written = f"0.{percent:02d}"
    if kept:
        assert policies.eviction_budget(written, N) == policies.eviction_budget(percent / 100, N) == kept
        assert policy_oracle.tokens(written, N) == kept
    else:
        with pytest.raises(SpecError):
            policies.eviction_budget(written, N)


def test_a_policy_takes_its_score_from_a_backend() -> None:
    """Numba's kept sets are those of its own scores."""
    pytest.importorskip("numba", reason="pip install 'kvspec[numba]'")
    inputs = drawn(3, 40, L=1, heads=(2, 1))
    view = inputs.layers[0]
    rows = resolve("numba").require_nestedkv().anomaly_score(view.k, NESTEDKV)
    want = policy_oracle.kept(rows.tolist(), 10, NESTEDKV)
    assert decided(policies.nestedkv(backend="numba"), inputs, 10) == want
