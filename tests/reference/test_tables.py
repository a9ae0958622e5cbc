"""Budgets by a table of weights, and lazy layers (SimLayerKV)."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.methods import brutes
from conformance.methods.method import method_of
from conformance.methods.tables import table_shares
from conformance.oracles.choices import fits
from conformance.plugin import sparingly
from conformance.strategies.policy_inputs import decided, drawn
from conformance.tolerances import scores_agree
from reference.policies import policy_from_text, simlayerkv
from reference.policies.layers import is_layerwise, policy_of_layer
from reference.policies.names import make_policy
from reference.policies.parts import equal_parts
from reference.policies.simlayerkv import lazy_mass
from reference.policies.tables import Table
from reference.policies.texts import text_of
from spec.errors import SpecError
from spec.policy import Scores

pytestmark = pytest.mark.usefixtures("reference_items")

TABLE = "snapkv:W=3/layers=table:shares=3_2_1"


@pytest.mark.spec("PO-TABLE-BUDGET")
@sparingly
@given(
    weights=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any), heads=st.integers(1, 3),
    n=st.integers(1, 30), W=st.integers(0, 5), B=st.integers(0, 40), per_head=st.booleans(),
)
def test_shares_are_those_of_the_oracle(
    weights: list[int], heads: int, n: int, W: int, B: int, per_head: bool,
) -> None:
    L, words = len(weights), [str(w) for w in weights for _ in range(heads if per_head else 1)]
    scores = Scores(np.zeros((L * heads, 1)), np.array([0, n]), heads=heads)
    total, W = max(B, W) * L * heads, min(W, n)
    found = Table(W, "_".join(words))(total, scores)
    assert found.tolist() == table_shares("_".join(words), total, W, L, heads, n)
    assert found.sum() == min(total, n * L * heads)
    assert W <= found.min() <= found.max() <= n


@pytest.mark.spec("PO-TABLE-BUDGET", "PO-COMPOSE")
@pytest.mark.parametrize("text", [
    TABLE, f"{TABLE}/heads=adaptive:safeguard=0.2", "knorm/layers=table:shares=0.5_0_0.25",
    "keydiff/recent=2/layers=table:shares=1_2_3_4_5_6",
    f"{TABLE}/block=4",
])
def test_kept_sets_of_a_text_are_those_of_the_oracle_of_parts(text: str) -> None:
    method = method_of(text)
    for seed in range(4):
        inputs = drawn(seed, 20, 3, (2, 2))
        policy = method.reference(inputs)
        found = decided(policy, inputs, 8)
        wanted = method.brute.kept(inputs, 8, **method.constants, **method.readings)
        assert all(fits(*pair) for pair in zip(found, wanted, strict=True)), seed
    assert is_layerwise(policy)
    assert equal_parts(policy_from_text(text_of(policy)), policy)


@pytest.mark.spec("PO-TABLE-BUDGET")
def test_a_layer_alone_has_the_share_of_the_table() -> None:
    policy = make_policy(TABLE, {})
    alone = [policy_of_layer(policy, at, 3).budgets(16, Scores(np.zeros((2, 20)), np.arange(21), heads=2))
             for at in range(3)]
    whole = policy.budgets(48, Scores(np.zeros((6, 20)), np.arange(21), heads=2))
    assert np.concatenate(alone).tolist() == whole.tolist() == [11, 11, 8, 8, 5, 5]


@pytest.mark.spec("PO-TABLE-BUDGET")
@pytest.mark.parametrize("shares", ["x", "1__2", "-1_2", "0_0", "1of0"])
def test_wrong_weights_are_refused_when_the_policy_is_made(shares: str) -> None:
    with pytest.raises(SpecError, match=r"/layers=table:shares=.*must be weights of at least 0"):
        make_policy(f"knorm/layers=table:shares={shares}", {})


@pytest.mark.spec("PO-TABLE-BUDGET")
def test_a_table_for_a_different_model_is_refused() -> None:
    with pytest.raises(SpecError, match="shares = '2 weights': must be 3, one for each layer, or 6, one for each kept"):
        decided(make_policy("knorm/layers=table:shares=1_2", {}), drawn(0, 9, 3, (2, 1)), 4)


@pytest.mark.spec("PO-SIMLAYERKV")
@pytest.mark.parametrize("threshold", [0.2, 0.4, 0.6, 2.0])
def test_lazy_layers_are_those_of_the_brute_force(threshold: float) -> None:
    (brute,) = (one for one in brutes() if one.name == "simlayerkv")
    lazy = 0
    for seed in range(8):
        inputs = drawn(seed, 8 + seed, 3, (1 + seed % 2, 1 + seed // 2 % 2))
        for B in (6, inputs.n):
            found = decided(simlayerkv(threshold, 1, 3), inputs, B)
            assert [sorted(own) for own in found] == brute.kept(inputs, B, threshold, 1, 3)
        lazy += sum(len(own) == 4 for own in found)
    assert (lazy > 0) == (threshold < 1)


@pytest.mark.spec("PO-SIMLAYERKV")
def test_the_mass_is_the_attention_of_the_last_query() -> None:
    (view,) = drawn(3, 10, 1, (1, 2)).layers
    masses = lazy_mass(replace(view, q=np.zeros_like(view.q)), 1, 2), lazy_mass(view, 0, 10)
    assert scores_agree(masses, [0.3, 1.0])
    for wrong, argument in (((float("nan"),), "threshold"), ((0.9, -1), "N_sink"), ((0.9, 4, 0), "N_recent")):
        with pytest.raises(SpecError, match=argument):
            simlayerkv(*wrong)
