"""Scores weighed by values (VATP, CriticalKV) or by variance (CAKE), scores from repeats (KVzip), and hosts."""

from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.methods import cake as cake_oracle
from conformance.methods import kvzip, weighed
from conformance.methods.brute import KERNEL, REHEARSED, SINK, W, plain, rehearsed
from conformance.methods.snapkv import snapkv as brute_snapkv
from conformance.plugin import fewer_examples
from conformance.strategies.numbers import Numbers, seeds
from conformance.strategies.policy_inputs import Inputs, drawn, observation
from conformance.tolerances import scores_agree
from lab.item_vectors import ITEMS
from lab.policy_cases import decoded, long
from reference import policies
from reference.policies.attention import observed_attention
from reference.policies.cake import cake_score, layer_preference, preferred_targets
from reference.policies.defensivekv import output_size
from reference.policies.kvzip import kvzip_plus_score, kvzip_score
from reference.policies.kvzip_heads import FullHeads
from reference.policies.vatp import value_norms
from spec.budget import Budget
from spec.errors import SpecError
from spec.parameters import PAPER
from spec.policy import LayerView, Observation, Policy, Scores
from tests.reference.test_decoding import by_head, h2o

pytestmark = pytest.mark.usefixtures("reference_items")


HALF = Fraction(1, 2)


@pytest.mark.spec("PO-VATP")
@fewer_examples
@given(seed=seeds, B=st.integers(2 * SINK, 12))
def test_sums_are_weighed_in_each_step_and_kept_without(seed: int, B: int) -> None:
    expected = by_head(long(seed), B, partial(h2o, sinks=SINK, weigh=True))
    assert decoded(policies.vatp(SINK), long(seed), B) == expected


@pytest.mark.spec("PO-CRITICALKV")
@fewer_examples
@given(seed=seeds)
def test_the_second_score_lies_within_its_bound(seed: int) -> None:
    inputs = drawn(seed)
    policy = policies.criticalkv(dict(enumerate(inputs.W_o)), W, KERNEL)
    scores = policy.scorer(observation(policy, inputs), policy.protection(inputs.n))
    assert scores.second is not None
    rows = iter(scores.second)
    for view, W_o in zip(inputs.layers, inputs.W_o, strict=True):
        layer = plain(view)
        for first, size in zip(brute_snapkv(layer, W, KERNEL), weighed.output_sizes(layer, W_o.tolist()), strict=True):
            brute = [None if a is None else (a + 1e-4) * b for a, b in zip(first, size, strict=True)]
            assert scores_agree(next(rows), brute)


@pytest.mark.spec("PO-CRITICALKV")
def test_values_decide_among_keys_that_nobody_attends_to() -> None:
    """Check weights far below 1e-4: the largest outputs are kept, whatever the tiny weights are.

    One place belongs to the attention.
    """
    n = 8
    k = np.zeros((1, n, 2))
    k[0, :, 0] = [0.0, -16.0, -17.0, -18.0, -19.0, -20.0, -21.0, 0.0]
    v = np.zeros((1, n, 2))
    v[0, :, 0] = [0.1, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 1.0]
    view = LayerView(np.ones((1, n, 2)), k, v, 1.0, None)
    policy = policies.criticalkv({0: np.ones((1, 2, 1))}, 1, 1)
    seen = Observation(n, 1, None, {0: view})
    assert policies.retain(policy, Budget(count=4), seen).positions.tolist() == [0, 5, 6, 7]


@pytest.mark.spec("PO-CRITICALKV", "PO-DEFENSIVEKV")
def test_the_output_has_thousands_of_channels() -> None:
    v = Numbers(1).fractions(2 * 3 * 4).reshape(2, 3, 4)
    W_o = Numbers(2).fractions(4 * 4 * 2500).reshape(4, 4, 2500) - 0.5
    layer = {"q": [None] * 4, "k": [None] * 2, "v": v.tolist()}
    for got, want in zip(output_size(v, W_o), weighed.output_sizes(layer, W_o.tolist()), strict=True):
        assert scores_agree(got, want)


@pytest.mark.spec("PO-VATP")
def test_each_of_thousands_of_tokens_has_its_own_norm() -> None:
    v = Numbers(3).fractions(5_000 * 3).reshape(1, 5_000, 3) - 0.5
    (actual,) = value_norms(v)
    assert scores_agree(actual, [sum(map(abs, value)) for value in v[0].tolist()])


@pytest.mark.spec("PO-VATP", "PO-CRITICALKV")
def test_scores_below_zero_are_refused() -> None:
    inputs = drawn(5, n=9, L=1, heads=(1, 1))
    W_o = {0: inputs.W_o[0]}
    hosts: list[Policy] = [
        policies.with_value_norms(policies.knorm(), 1), policies.with_critical_selection(policies.knorm(), W_o),
    ]
    for policy in hosts:
        with pytest.raises(SpecError, match="scores of at least 0"):
            policies.retain(policy, Budget(count=4), observation(policy, inputs))


@pytest.mark.spec("PO-VATP", "PO-CRITICALKV")
def test_compositions_are_named_and_go_on_in_turns_where_their_host_does() -> None:
    weighty = policies.with_value_norms(policies.expected_attention(np.ones(2), N_sink=1))
    assert (weighty.name, weighty.floor) == ("vatp(expected-attention)", 5)
    inputs = drawn(5, n=9, L=1, heads=(1, 1))
    blind = {0: replace(inputs.layers[0], v=None)}
    for policy in (weighty, policies.with_critical_selection(policies.snapkv(2, 1), {0: inputs.W_o[0]})):
        with pytest.raises(SpecError, match="v = None"):
            policies.retain(policy, Budget(count=6), Observation(9, 1, None, blind))
    assert policies.with_critical_selection(policies.snapkv(), {}).name == "critical(snapkv)"
    with pytest.raises(SpecError, match="evicts only at the end"):
        policies.start(policies.criticalkv({0: inputs.W_o[0]}, 2, 1), Budget(count=6), Observation(9, 1, None, {}))


@pytest.mark.spec("PO-CAKE")
@fewer_examples
@given(seed=seeds, window=st.integers(1, 9), tau1=st.sampled_from([0.5, 1.0, 1.6]), tau2=st.sampled_from([0.4, 2.0]))
def test_scores_and_preferences_lie_within_their_bound(seed: int, window: int, tau1: float, tau2: float) -> None:
    """A window of one query has no variance, and therefore no preference."""
    inputs = drawn(seed)
    policy = policies.cake(window, KERNEL, 8.0, tau1, tau2)
    actual = policy.scorer(observation(policy, inputs), policy.protection(inputs.n))
    rows = iter(actual.values)
    for view in inputs.layers:
        assert all(scores_agree(next(rows), want) for want in cake_oracle.scores(plain(view), window, KERNEL, 8.0))
    assert actual.preferences is not None
    want = [cake_oracle.preference(plain(view), window, tau1, tau2) for view in inputs.layers]
    assert scores_agree(actual.preferences, want)


@pytest.mark.spec("PO-CAKE")
def test_a_key_that_nobody_sees_adds_nothing() -> None:
    """0 log 0 must be 0: weights of 0 and 1 have entropy 0 and no variance."""
    A = np.array([[[1.0, 0.0], [1.0, 0.0]]])
    assert layer_preference(A, 1.0, 1.0) == 0.0
    assert cake_score(A, 8.0, 1, 1).tolist() == [[1.0, 0.0]]


@pytest.mark.spec("PO-CAKE")
@pytest.mark.parametrize("W_now", [33, 65, 129])
def test_preferences_of_wide_windows(W_now: int) -> None:
    """Check entropy and variance of hundreds of queries and keys."""
    view = drawn(3, n=300, L=1, heads=(2, 2)).layers[0]
    A = observed_attention(view, W_now)[:, :, : 300 - W_now]
    assert scores_agree([layer_preference(A, 1.0, 1.0)], [cake_oracle.preference(plain(view), W_now, 1.0, 1.0)])
    for got, want in zip(cake_score(A, 200.0, 5, 2), cake_oracle.scores(plain(view), W_now, 5, 200.0), strict=True):
        assert scores_agree(got, want[: 300 - W_now])


@pytest.mark.spec("PO-PREFERENCE-BUDGET")
def test_a_total_below_the_windows_is_refused() -> None:
    with pytest.raises(SpecError, match="4 tokens of the window"):
        ITEMS["PO-PREFERENCE-BUDGET"]({"preferences": [1.0, 2.0], "B": 3, "W": 4, "n": 10}, PAPER)
    assert preferred_targets([Fraction(1)], Fraction(0), 5) == [0]


def shown(inputs: Inputs, **constants: Any) -> list[tuple[LayerView, Any]]:
    """Return the layers of a rehearsal with these constants, including values, and their W_o."""
    seen = observation(policies.kvzip(**{**REHEARSED, **constants}), inputs).layers
    return [(view, inputs.W_o[at]) for at, view in seen.items()]


@pytest.mark.spec("PO-KVZIP", "PO-KVZIP-PLUS")
def test_repeats_of_hundreds_of_tokens() -> None:
    """Check more queries than are processed at a time. A late query decides."""
    ((view, W_o),) = shown(drawn(3, n=560, L=1, heads=(1, 1)), chunk=600)
    (repeat,) = view.repeats or ()
    louder = replace(repeat, q=repeat.q * np.linspace(0.1, 3.0, repeat.q.shape[1])[:, None])
    view = replace(view, repeats=(louder,))
    plain, free = rehearsed(view), slice(REHEARSED["N_sink"], 560 - REHEARSED["N_recent"])
    assert scores_agree(kvzip_score(view, 4)[0, free], kvzip.scores(plain, 4)[0][free])
    assert scores_agree(kvzip_plus_score(view, 4, W_o)[0, free], kvzip.scores(plain, 4, W_o.tolist())[0][free])


@pytest.mark.spec("PO-KVZIP-PLUS")
def test_what_cannot_be_weighed_is_refused() -> None:
    ((view, W_o), *_) = shown(drawn(3, n=20))
    with pytest.raises(SpecError, match="needs the values"):
        kvzip_plus_score(replace(view, v=None), 4, W_o)
    assert view.repeats is not None
    none = replace(view.repeats[0], norms=0 * view.repeats[0].norms)
    with pytest.raises(SpecError, match="norms above 0"):
        kvzip_plus_score(replace(view, repeats=(none,)), 4, W_o)


@pytest.mark.spec("PO-KVZIP")
def test_a_prompt_that_was_not_rehearsed_is_refused() -> None:
    inputs = drawn(3, n=20)
    policy = policies.kvzip(**REHEARSED)
    seen = observation(policy, inputs)
    bare = replace(seen, layers={at: replace(view, repeats=None) for at, view in seen.layers.items()})
    with pytest.raises(SpecError, match="repeats the prompt"):
        policies.retain(policy, Budget(count=12), bare)


@pytest.mark.spec("PO-FULL-HEADS")
@pytest.mark.parametrize(("heads", "n", "B"), [(1_000, 400, 300), (300, 5_000, 700), (70_000, 12, 9)])
def test_shares_of_many_heads(heads: int, n: int, B: int) -> None:
    scores = Numbers(heads).integers(0, heads // 2, heads).astype(np.float64)
    actual = FullHeads(scores, 8)(B * heads, Scores(np.zeros((heads, n)), np.arange(n + 1)))
    full = (B - 8) * heads // (n - 8)
    assert actual.dtype == np.int64
    assert actual.sum() == heads * B
    assert sorted(np.flatnonzero(actual == n)) == sorted(np.lexsort((np.arange(heads), -scores))[:full])
    assert np.ptp(actual[actual < n]) <= 1
