"""Scorers that kvpress has: random, FINCH, Compactor and its parts, CapKV. Kept sets are those of the brute forces."""

from dataclasses import replace

import numpy as np
import pytest

from conformance.methods import brutes
from conformance.methods.brute import Brute
from conformance.methods.vase import uniforms
from conformance.oracles.choices import fits
from conformance.strategies.policy_inputs import altered, decided, drawn, model_constants
from conformance.tolerances import scores_agree
from reference.policies import capkv, finch, random_tokens, retain_turn
from reference.policies.attention import unrotated
from reference.policies.compactor import chunk_attention, leverage_scores
from reference.policies.finch import finch_score
from reference.policies.names import make_policy
from spec.budget import Budget
from spec.errors import SpecError
from spec.policy import Observation

pytestmark = pytest.mark.usefixtures("reference_items")

BRUTES = {brute.name: brute for brute in brutes()}
SCORERS = [
    pytest.param(BRUTES[name], id=name, marks=pytest.mark.spec(BRUTES[name].item))
    for name in ("random-tokens", "finch", "leverage", "noncausal", "compactor", "capkv", "q-filters")
]


@pytest.mark.parametrize("brute", SCORERS)
@pytest.mark.parametrize("kind", ["normal", "axes", "equal"])
def test_kept_sets_are_those_of_the_brute_force(brute: Brute, kind: str) -> None:
    for seed in range(6):
        inputs = altered(drawn(seed, 3 + 5 * seed, 1 + seed % 2, (1 + seed % 2, 1 + seed // 2 % 2)), kind, seed)
        B = max(1, brute.floor) + seed
        actual, wanted = decided(brute.policy(inputs), inputs, B), brute.expected(inputs, B)
        if kind == "normal" or brute.name == "random-tokens":  # other equal scores tie up to rounding
            assert all(fits(*pair) for pair in zip(actual, wanted, strict=True)), (seed, actual, wanted)
        assert [len(kept) for kept in actual] == [min(B, inputs.n)] * len(actual)


@pytest.mark.spec("PO-RANDOM")
def test_a_token_has_the_same_number_in_each_turn() -> None:
    inputs, policy = drawn(1, 20, 2, (2, 1)), random_tokens(3)
    live = [np.array([g, *range(3 + g, 20)]) for g in range(4)]
    views = [
        replace(inputs.layers[g // 2], k=inputs.layers[g // 2].k[g % 2 :][:1, group]) for g, group in enumerate(live)
    ]
    sets = [Observation(20, 1, None, {g // 2: view}, first=g) for g, view in enumerate(views)]
    kept = retain_turn(policy, Budget(count=6), live, sets, 2)
    for g, group in enumerate(live):
        numbers = uniforms(3, g, 0, 20)
        assert kept.group(g).tolist() == sorted(sorted(group.tolist(), key=lambda at: -numbers[at])[:6])
    for seed in (-1, 2**64):
        with pytest.raises(SpecError, match=rf"seed = {seed}: must lie in \[0, 2\^64\)"):
            random_tokens(seed)


@pytest.mark.spec("PO-NONCAUSAL")
def test_the_last_chunk_is_shorter_and_later_queries_are_seen() -> None:
    (view,) = drawn(2, 7, 1, (1, 1)).layers
    A = chunk_attention(replace(view, q=np.zeros_like(view.q)), 4)
    assert scores_agree(A.ravel(), [1.0] * A.size)  # uniform attention: a chunk spreads as many queries as it has keys
    part = chunk_attention(replace(view, q=view.q[:, 5:]), 4)
    assert not part[:, :4].any()
    assert scores_agree(part.sum(axis=1), [2.0])


@pytest.mark.spec("PO-LEVERAGE")
def test_an_outlier_has_the_leverage() -> None:
    x = np.zeros((1, 9, 2))
    x[0, 4] = 3.0, 4.0
    scores = leverage_scores(x)[0]
    assert scores.argmax() == 4
    assert 0.99 * 8 / 9 < scores[4] < 8 / 9


@pytest.mark.spec("PO-LEVERAGE")
def test_a_turn_removes_the_rotation_of_the_positions_in_the_text() -> None:
    inputs = drawn(7, 20, 1, (1, 1))
    policy = make_policy("leverage", model_constants("leverage", inputs))
    (view,), live = inputs.layers, np.arange(3, 20, 2)
    shown = Observation(20, 1, None, {0: replace(view, k=view.k[:, live])})
    kept = retain_turn(policy, Budget(count=4), [live], [shown]).kept
    scores = leverage_scores(unrotated(view.k, np.arange(20), inputs.inv_freq, inputs.factor)[:, live])[0]
    assert kept.tolist() == sorted(live[np.argsort(-scores)[:4]].tolist())


@pytest.mark.spec("PO-FINCH")
def test_the_question_is_kept_and_each_weight_counts_the_visible_keys() -> None:
    inputs = drawn(4, 9, 1, (1, 1))
    (view,) = inputs.layers
    even = replace(inputs, layers=[replace(view, q=np.zeros_like(view.q))])
    assert decided(finch(3), even, 5) == [[0, 1, 6, 7, 8]]  # all products are 1, so the lower positions are kept
    assert scores_agree(finch_score(even.layers[0], 3)[0, :6], [1.0] * 6)


@pytest.mark.spec("PO-CAPKV", "PO-COMPACTOR")
@pytest.mark.parametrize(("name", "argument"), [
    ("compactor:N_sink=-1", "N_sink"), ("compactor:N_recent=-1", "N_recent"), ("compactor:c=0", "c"),
    ("capkv:tau=0", "tau"), ("capkv:N_future=0", "N_future"), ("capkv:N_sink=-1", "N_sink"), ("finch:W=0", "W"),
    ("noncausal:c=0", "c"), ("compactor/recent=2", "protection"), ("capkv/every=4", "cadence"),
])
def test_constants_are_checked(name: str, argument: str) -> None:
    with pytest.raises(SpecError, match=argument):
        make_policy(name, {"inv_freq": np.array([0.5, 0.1])})


@pytest.mark.spec("PO-CAPKV")
def test_a_key_of_length_zero_has_the_cosine_zero() -> None:
    inputs = drawn(6, 8, 1, (1, 1))
    (view,) = inputs.layers
    zero = replace(inputs, layers=[replace(view, k=np.zeros_like(view.k))])
    (kept,) = decided(capkv(inputs.inv_freq, inputs.factor, N_sink=0), zero, 5)
    v = np.asarray(view.v)[0]  # equal weights of 1, so only the values decide
    leverage = (v * np.linalg.solve(np.eye(v.shape[1]) + (1 + 1e-6) * v.T @ v, v.T).T).sum(axis=1)
    assert kept == sorted(np.argsort(-leverage)[:5].tolist())
