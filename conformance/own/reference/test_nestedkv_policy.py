"""NestedKV as a policy: kept sets against brute force, budgets and quotas, and what is refused."""

from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.assurance.oracles import nestedkv as oracle
from conformance.assurance.policy_cases import CASES
from conformance.strategies.numbers import keys, seeds
from conformance.strategies.policy_inputs import decided, drawn
from reference import policies
from spec.backend import Backend, resolve
from spec.budget import Budget
from spec.errors import BackendUnavailable, SpecError
from spec.parameters import NESTEDKV
from spec.policy import LayerView, Observation


@pytest.mark.usefixtures("reference_items")
@pytest.mark.spec("NK-NESTEDKV")
@given(seed=seeds, B=st.integers(1, 30))
def test_nestedkv(seed: int, B: int) -> None:
    case, inputs = CASES["nestedkv"], drawn(seed)
    assert decided(case.policy(inputs), inputs, B) == case.expected(inputs, max(B, case.floor))


@pytest.mark.usefixtures("reference_items")
@pytest.mark.spec("NK-ABLATIONS")
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("nestedkv-")])
@given(seed=seeds, n=st.integers(3, 26), B=st.integers(1, 30))
def test_ablations(name: str, seed: int, n: int, B: int) -> None:
    """Three tokens or more: two are as far from their mean as each other, and rounding decides."""
    case, inputs = CASES[name], drawn(seed, n)
    assert decided(case.policy(inputs), inputs, B) == case.expected(inputs, max(B, case.floor))


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
        assert oracle.tokens(written, N) == kept
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
    want = oracle.kept(rows.tolist(), 10, NESTEDKV)
    assert decided(policies.nestedkv(backend="numba"), inputs, 10) == want
