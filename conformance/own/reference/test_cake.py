"""CAKE: preferences, shares by them, and scores of mean and variance, against brute force."""

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.assurance.brute import KERNEL, plain
from conformance.assurance.oracles import cake as oracle
from conformance.plugin import sparingly
from conformance.strategies.numbers import Numbers
from conformance.strategies.policy_inputs import drawn, observation
from conformance.tolerances import scores_agree
from reference import policies
from reference.policies.attention import observed_attention
from reference.policies.cake import Preferred, cake_score, layer_preference, preferred_targets
from spec.errors import SpecError
from spec.policy import Scores

pytestmark = pytest.mark.usefixtures("reference_items")

seeds = st.integers(0, 2**32 - 1)


@pytest.mark.spec("PO-CAKE")
@sparingly
@given(seed=seeds, window=st.integers(1, 9), tau1=st.sampled_from([0.5, 1.0, 1.6]), tau2=st.sampled_from([0.4, 2.0]))
def test_scores_and_preferences_lie_within_their_bound(seed: int, window: int, tau1: float, tau2: float) -> None:
    """A window of one query has no variance, and so no preference."""
    inputs = drawn(seed)
    policy = policies.cake(window, KERNEL, 8.0, tau1, tau2)
    found = policy.scorer(observation(policy, inputs), policy.protection(inputs.n))
    rows = iter(found.values)
    for view in inputs.layers:
        assert all(scores_agree(next(rows), want) for want in oracle.scores(plain(view), window, KERNEL, 8.0))
    assert found.preferences is not None
    want = [oracle.preference(plain(view), window, tau1, tau2) for view in inputs.layers]
    assert scores_agree(found.preferences, want)


@pytest.mark.spec("PO-CAKE")
def test_a_key_that_nobody_sees_adds_nothing() -> None:
    """0 log 0 MUST be 0: a weight of 0 beside one of 1 has entropy 0, and no variance."""
    A = np.array([[[1.0, 0.0], [1.0, 0.0]]])
    assert layer_preference(A, 1.0, 1.0) == 0.0
    assert cake_score(A, 8.0, 1, 1).tolist() == [[1.0, 0.0]]


def shares(preferences: list[float], B: int, window: int, n: int, heads: int = 1) -> list[int]:
    L = len(preferences)
    given = Scores(np.zeros((L * heads, n)), np.arange(n + 1), heads=heads, preferences=np.array(preferences))
    return [int(share) for share in Preferred(window)(B * L * heads, given)]


@pytest.mark.spec("PO-PREFERENCE-BUDGET")
@given(
    preferences=st.lists(st.one_of(st.integers(0, 4).map(float), st.floats(0, 1e6)), min_size=1, max_size=6),
    window=st.integers(0, 3), B=st.integers(3, 14), n=st.integers(3, 12), heads=st.integers(1, 2),
)
def test_shares_are_those_of_brute_force(preferences: list[float], window: int, B: int, n: int, heads: int) -> None:
    """Equal preferences tie; the mean over layers is B exactly, and no layer has more than all tokens."""
    found = shares(preferences, B, window, n, heads)
    assert found == [x for x in oracle.preferred_shares(preferences, B, window, n) for _ in range(heads)]
    assert sum(found) == len(preferences) * heads * min(B, n)
    assert max(found) <= n


@pytest.mark.spec("PO-PREFERENCE-BUDGET")
@pytest.mark.parametrize("L", [33, 80, 126])
def test_shares_of_many_layers(L: int) -> None:
    """Some layers are full, and preferences differ by thousands."""
    preferences = (Numbers(L).fractions(L) ** 8).tolist()
    found = shares(preferences, 300, 32, 1_000)
    assert found == oracle.preferred_shares(preferences, 300, 32, 1_000)
    assert max(found) == 1_000


@pytest.mark.spec("PO-CAKE")
@pytest.mark.parametrize("W_now", [33, 65, 129])
def test_preferences_of_wide_windows(W_now: int) -> None:
    """Hundreds of queries and keys: entropy and variance of all of them."""
    view = drawn(3, n=300, L=1, heads=(2, 2)).layers[0]
    A = observed_attention(view, W_now)[:, :, : 300 - W_now]
    assert scores_agree([layer_preference(A, 1.0, 1.0)], [oracle.preference(plain(view), W_now, 1.0, 1.0)])
    for got, want in zip(cake_score(A, 200.0, 5, 2), oracle.scores(plain(view), W_now, 5, 200.0), strict=True):
        assert scores_agree(got, want[: 300 - W_now])


@pytest.mark.spec("PO-PREFERENCE-BUDGET")
def test_a_total_below_the_windows_is_refused() -> None:
    with pytest.raises(SpecError, match="its window of 4 tokens"):
        shares([1.0, 2.0], 3, 4, 10)
    assert preferred_targets([Fraction(1)], Fraction(0), 5) == [0]


@pytest.mark.spec("PO-CAKE")
@pytest.mark.parametrize(("make", "argument"), [
    (lambda: policies.cake(0), "W"), (lambda: policies.cake(kernel=4), "kernel"),
    (lambda: policies.cake(gamma=-1.0), "gamma"), (lambda: policies.cake(tau1=0.0), "tau1"),
    (lambda: policies.cake(tau2=float("nan")), "tau2"),
])
def test_a_constant_out_of_range_is_refused(make: Callable[[], object], argument: str) -> None:
    with pytest.raises(SpecError) as caught:
        make()
    assert caught.value.argument == argument
