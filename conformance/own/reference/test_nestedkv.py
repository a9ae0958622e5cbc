"""NestedKV: memories and anomalies against brute force, budgets and quotas, and what is refused."""

from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.methods import nestedkv as policy_oracle
from conformance.oracles import nestedkv as oracle
from conformance.strategies.numbers import NESTED, keys, seeds
from conformance.strategies.policy_inputs import decided, drawn
from conformance.suite.test_nestedkv import lengths
from conformance.tolerances import scores_agree
from reference import nestedkv as nk
from reference import policies
from reference.directions import unit_keys
from spec.backend import Backend, resolve
from spec.budget import Budget
from spec.errors import BackendUnavailable, SpecError
from spec.parameters import NESTEDKV
from spec.policy import LayerView, Observation


@pytest.mark.usefixtures('reference_items')
@pytest.mark.spec("NK-STABLE", "NK-EPISODIC", "NK-CURRENT")
@given(seed=seeds, n=lengths, W=st.integers(1, 9), b=st.integers(1, 9))
def test_the_three_memories(seed: int, n: int, W: int, b: int) -> None:
    unit = unit_keys(keys(seed, 1, n).astype(np.float64))
    p = replace(NESTED, W=W, b_min=b, b_max=b + 2)
    stable, episodic, current = zip(*(oracle.memories(unit[0].tolist(), i, p) for i in range(n)), strict=True)
    assert scores_agree(nk.stable_memory(unit)[0, 0], stable[0])
    found = nk.episodic_memory(unit, nk.block_size(n, p))[0], nk.current_memory(unit, W)[0]
    for got, want in zip(found, (episodic, current), strict=True):
        assert scores_agree(got.ravel(), [x for row in want for x in row])


@pytest.mark.usefixtures('reference_items')
@pytest.mark.spec("NK-EPISODIC")
def test_blocks_of_the_papers_lengths() -> None:
    sizes = {1: 128, 4127: 128, 4128: 129, 6400: 200, 8191: 255, 8192: 256, 32768: 256}
    assert {N: nk.block_size(N, NESTEDKV) for N in sizes} == sizes


@pytest.mark.usefixtures('reference_items')
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
    assert scores_agree(got, [oracle.anomaly(key, mu) for key, mu in pairs])


@pytest.mark.usefixtures("reference_items")
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


@pytest.mark.usefixtures("reference_items")
@pytest.mark.spec("NK-NESTEDKV")
@given(seed=seeds, r=st.sampled_from(["0.25", "0.5", "0.75", "0.8", "0.9"]), n=st.integers(60, 90))
def test_a_layer_keeps_its_budget_exactly_and_every_head_its_quota(seed: int, r: str, n: int) -> None:
    inputs = drawn(seed, n, L=2, heads=(3, 1))
    B = policies.eviction_budget(r, n)
    kept = decided(policies.nestedkv(), inputs, B)
    assert [sum(map(len, kept[layer:][:3])) for layer in (0, 3)] == [3 * B, 3 * B]
    assert min(map(len, kept)) >= max(4, int(Fraction(1, 5) * B))
    assert all(group[:4] == [0, 1, 2, 3] for group in kept)


@pytest.mark.usefixtures("reference_items")
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


@pytest.mark.usefixtures("reference_items")
@pytest.mark.spec("NK-TOKENS")
@pytest.mark.parametrize("r", [1, 1.5, -0.1, float("nan"), float("inf"), "many"])
def test_a_share_out_of_range_is_refused(r: Any) -> None:
    with pytest.raises(SpecError) as caught:
        policies.eviction_budget(r, 100)
    assert caught.value.argument == "r"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("w0", (0.5, 0.5, 0.0)), ("w0", (1.0, 1.0)), ("blocks", 0), ("b_min", 0), ("b_max", 127), ("W", 0),
        ("W", 2.0), ("p", Fraction(0)), ("p", Fraction(3, 2)), ("beta", -1.0), ("tau", float("nan")),
        ("kappa", float("inf")), ("N_sink", -1), ("alpha_s", Fraction(6, 5)),
    ],
)
def test_a_parameter_out_of_range_is_refused(name: str, value: Any) -> None:
    with pytest.raises(SpecError) as caught:
        replace(NESTEDKV, **{name: value})
    assert caught.value.argument == name


@pytest.mark.usefixtures("reference_items")
def test_a_backend_without_the_family_is_named() -> None:
    with pytest.raises(BackendUnavailable, match="no stage family 'nestedkv'; it has: none"):
        policies.nestedkv(backend=Backend("bare"))


@pytest.mark.usefixtures("reference_items")
def test_a_policy_takes_its_score_from_a_backend() -> None:
    """Numba's kept sets are those of its own scores."""
    pytest.importorskip("numba", reason="pip install 'kvspec[numba]'")
    inputs = drawn(3, 40, L=1, heads=(2, 1))
    view = inputs.layers[0]
    rows = resolve("numba").require_nestedkv().anomaly_score(view.k, NESTEDKV)
    want = policy_oracle.kept(rows.tolist(), 10, NESTEDKV)
    assert decided(policies.nestedkv(backend="numba"), inputs, 10) == want
