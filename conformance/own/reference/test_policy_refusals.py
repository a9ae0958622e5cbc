"""Input that a policy does not admit is refused by name."""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from conformance.strategies.policy_inputs import drawn, observation
from reference import policies
from reference.policies.budgets import Adaptive, Competition, Pyramid
from reference.policies.keydiff import keydiff_score
from reference.policies.lagkv import lagkv_score
from reference.policies.official import pyramidkv_official
from reference.policies.protections import SinkAndRecent
from spec.budget import Budget
from spec.errors import SpecError
from spec.policy import LayerView, Policy, Scores

pytestmark = pytest.mark.usefixtures("reference_items")

INV_FREQ = np.array([1.0, 0.5])


def scores(H: int, n: int, pinned: int) -> Scores:
    values = np.zeros((H, n))
    values[:, :pinned] = np.nan
    return Scores(values, np.arange(n + 1), heads=H)


def refused(item: str, make: Callable[[], object], argument: str) -> Any:
    return pytest.param(make, argument, marks=pytest.mark.spec(item))


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        refused("PO-SNAPKV", lambda: policies.snapkv(0), "W"),
        refused("PO-SNAPKV", lambda: policies.snapkv(8, 4), "kernel"),
        refused("PO-SNAPKV", lambda: policies.snapkv(8, -1), "kernel"),
        refused("PO-PYRAMIDKV", lambda: policies.pyramidkv(8, 7, 0), "beta"),
        refused("PO-PYRAMIDKV-DESCRIBED", lambda: policies.pyramidkv_described(8, 0), "beta"),
        refused("PO-PYRAMIDKV-DESCRIBED", lambda: policies.pyramidkv_described(0), "W"),
        refused("PO-CHUNKKV", lambda: policies.chunkkv(0), "c"),
        refused("PO-CHUNKKV", lambda: policies.chunkkv(10, 0), "W"),
        refused("PO-CHUNKKV", lambda: policies.chunkkv(10, 8, 0), "N_reuse"),
        refused("PO-CHUNKKV-DESCRIBED", lambda: policies.chunkkv_described(0), "c"),
        refused("PO-H2O-DESCRIBED", lambda: policies.h2o_described(0), "W"),
        refused("PO-RKV", lambda: policies.rkv(0), "W"),
        refused("PO-RKV", lambda: policies.rkv(8, 2), "kernel"),
        refused("PO-RKV", lambda: policies.rkv(lam=1.5), "lam"),
        refused("PO-RKV", lambda: policies.rkv(lam=float("nan")), "lam"),
        refused("PO-RKV", lambda: policies.rkv(lam=-0.5), "lam"),
        refused("PO-RKV", lambda: policies.rkv(every=0), "every"),
        refused("PO-LAGKV", lambda: policies.lagkv(-1), "sink"),
        refused("PO-LAGKV", lambda: policies.lagkv(lag=0), "lag"),
        refused("PO-ADAKV", lambda: policies.adakv(safeguard=Fraction(3, 2)), "safeguard"),
        refused("PO-ADAKV", lambda: policies.adakv(8, 4), "kernel"),
        refused(
            "PO-ADAPTIVE-BUDGET", lambda: policies.with_adaptive_budgets(policies.knorm(), Fraction(-1)), "safeguard"
        ),
        refused("PO-DEFENSIVEKV", lambda: policies.defensivekv({}, 0), "W"),
        refused("PO-DEFENSIVEKV", lambda: policies.defensivekv({}, 8, 4), "kernel"),
        refused("PO-EXPECTED-ATTENTION", lambda: policies.expected_attention(INV_FREQ, N_sink=-1), "N_sink"),
        refused("PO-EXPECTED-ATTENTION", lambda: policies.expected_attention(INV_FREQ, N_future=0), "N_future"),
        refused("PO-EXPECTED-ATTENTION", lambda: policies.expected_attention(INV_FREQ, factor=0.0), "factor"),
        refused("PO-STREAMINGLLM", lambda: policies.streaming_llm(-1), "N_sink"),
        refused("PO-STREAMINGLLM", lambda: SinkAndRecent(-1, 0), "sink"),
        refused("PO-STREAMINGLLM", lambda: SinkAndRecent(0, -1), "recent"),
        refused("PO-COMPETITION-BUDGET", lambda: Competition(Fraction(2)), "safeguard"),
        refused("PO-PYRAMID-OFFICIAL", lambda: pyramidkv_official(128, 8, 1, 4096), "L"),
        refused("PO-PYRAMID-OFFICIAL", lambda: pyramidkv_official(8, 8, 4, 4096), "capacity"),
    ],
)
def test_a_constant_out_of_range_is_refused(make: Callable[[], object], argument: str) -> None:
    with pytest.raises(SpecError) as caught:
        make()
    assert caught.value.argument == argument


@pytest.mark.spec("PO-KEYDIFF")
def test_a_zero_key_has_no_direction() -> None:
    """The message names the head and the token."""
    k = np.ones((2, 3, 2))
    k[1, 2] = 0.0
    with pytest.raises(SpecError, match="KV head 1, token 2"):
        keydiff_score(LayerView(k, k, None, 1.0, None))


@pytest.mark.spec("PO-KEYDIFF")
def test_a_zero_anchor_scores_nothing() -> None:
    """Two opposite keys have no mean direction: both score 0."""
    k = np.array([[[1.0, 0.0], [-1.0, 0.0]]])
    assert keydiff_score(LayerView(k, k, None, 1.0, None)).tolist() == [[0.0, 0.0]]


@pytest.mark.spec("PO-RETAIN")
@pytest.mark.parametrize("name", ["knorm", "tova", "keydiff"])
def test_a_pinned_prompt_above_the_budget_is_refused(name: str) -> None:
    """Protection that a share cannot hold: the error names the budget, before anything is kept."""
    inputs = drawn(7, n=12, L=2, heads=(2, 1))
    host: Policy = vars(policies)[name]()
    pinned = Policy(
        name, host.scorer, host.budgets, host.selector, SinkAndRecent(6, 0), granularity=host.granularity
    )
    with pytest.raises(SpecError, match="6 protected tokens") as caught:
        policies.retain(pinned, Budget(count=5), observation(pinned, inputs))
    assert caught.value.argument == "budget"
    assert len(policies.retain(pinned, Budget(count=6), observation(pinned, inputs))[0].group(0)) == 6


@pytest.mark.spec("PO-ADAPTIVE-BUDGET", "PO-COMPETITION-BUDGET", "PO-PYRAMID-BUDGET")
@pytest.mark.parametrize("budgets", [Adaptive(Fraction(1, 5)), Competition(Fraction(1, 5)), Pyramid(4)])
def test_heads_that_cannot_hold_what_is_theirs_are_refused(budgets: Adaptive | Competition | Pyramid) -> None:
    """Two heads with 4 protected tokens each do not fit 7."""
    with pytest.raises(SpecError) as caught:
        budgets(7, scores(2, 10, 4))
    assert caught.value.argument == "budget"


@pytest.mark.parametrize("name", [
    pytest.param("caote", marks=pytest.mark.spec("PO-CAOTE")),
    pytest.param("expected_attention", marks=pytest.mark.spec("PO-EXPECTED-ATTENTION")),
    pytest.param("defensivekv", marks=pytest.mark.spec("PO-DEFENSIVEKV")),
    pytest.param("lagkv", marks=pytest.mark.spec("PO-LAGKV")),
])
def test_values_that_were_not_captured_are_missed(name: str) -> None:
    """A policy that weighs by values MUST be shown them."""
    inputs = drawn(9, n=12, L=1, heads=(1, 1))
    arguments: Any = {"expected_attention": [INV_FREQ], "defensivekv": [{0: inputs.W_o[0]}, 3]}.get(name, [])
    policy = vars(policies)[name](*arguments)
    seen = observation(policy, inputs)
    blind = {at: LayerView(x.q, x.k, None, x.scaling, x.softcap) for at, x in seen.layers.items()}
    with pytest.raises(SpecError, match="v = None"):
        policies.retain(policy, Budget(count=6), type(seen)(seen.seen, seen.groups, None, blind))


@pytest.mark.spec("PO-LAGKV")
def test_one_channel_has_no_spread() -> None:
    view = drawn(9, n=12, L=1, heads=(1, 1)).layers[0]
    with pytest.raises(SpecError, match="d = 1"):
        lagkv_score(replace(view, v=np.asarray(view.v)[:, :, :1]), 0, 3)


@pytest.mark.spec("PO-DEFENSIVEKV")
def test_a_token_without_output_has_no_share() -> None:
    inputs = drawn(9, n=12, L=1, heads=(2, 1))
    np.asarray(inputs.layers[0].v)[:, 4] = 0.0
    policy = policies.defensivekv({0: inputs.W_o[0]}, 3)
    with pytest.raises(SpecError, match="token 4"):
        policies.retain(policy, Budget(count=6), observation(policy, inputs))
