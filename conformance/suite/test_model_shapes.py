"""Tests of stages with the head counts and head dimensions of real models, on a few hundred tokens.

A quick run has these tests too. The scale lane has thousands of tokens.
"""

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from conformance.checks import scale_checks
from conformance.oracles.scale import selectors as oracle
from conformance.strategies.numbers import Numbers
from conformance.strategies.one_change import CALLS, NONE, SCORES, K, Q
from conformance.strategies.scale_attention import Shape, laddered
from conformance.suite.conftest import INTERPRETERS
from conformance.suite.test_calls import STAGES, parts, stage_of
from conformance.suite.test_policy_stages import best, kept
from conformance.suite.test_scale_policies import SOFT, keys, nestedkv_radius, signatures
from conformance.tolerances import UNIT_ROUNDOFF, attention_error, expected_error, received_radius
from spec.backend import Backend, CrystalStages, DiversityStages, NestedKVStages, PolicyStages
from spec.parameters import PAPER, CrystalCacheParameters

SHAPES = [
    (32, 8, 64, 300), (9, 3, 64, 512), (28, 4, 128, 300), (8, 1, 128, 256), (64, 8, 64, 128), (15, 5, 64, 384),
]
"""Query heads, KV heads, head dimension and tokens, with 4, 3, 7, 8, 8 and 3 query heads for each KV head.

Some numbers of tokens are multiples of a block size.
"""
LAST = 70
"""Number of the last queries of a prompt that are read: above 64, for which sums in half precision are wrong."""
CAPS = [None, 30.0, 50.0]
REPEATS = 2_100
FEWER = {
    "crystal.coattention": {"q": Q[:, :6], "k": K[:, :6], "positions": np.arange(6)},
    "diversity.diverse": {"s": SCORES, "V": np.eye(6), "retained": NONE, "k": 2},
}
"""Smaller arguments of slow stages, for a call that is repeated REPEATS times."""

large = pytest.mark.usefixtures("compiled")


def attention_input(H: int, H_kv: int, d: int, n: int, queries: int) -> tuple[Any, Any]:
    """Return queries of the last tokens (H, queries, d), and keys (H_kv, n, d), in float32."""
    numbers = Numbers(H + d)
    shapes = ((H, queries, d), (H_kv, n, d))
    q, k = ((numbers.fractions(h * m * d).reshape(h, m, d) - 0.5).astype(np.float32) for h, m, d in shapes)
    return q, k


@large
@pytest.mark.spec("PO-OBSERVED-ATTENTION", "PO-KVZIP", "PO-KVZIP-PLUS")
@pytest.mark.parametrize("softcap", CAPS)
@pytest.mark.parametrize(("H", "H_kv", "d", "n"), SHAPES)
def test_attention_that_keys_receive(
    policy_stages: PolicyStages, precision: str, H: int, H_kv: int, d: int, n: int, softcap: float | None,
) -> None:
    """Check the sum and the largest of each key's weights within their certified radius.

    Inputs with a soft cap also have attention sinks.
    """
    q, k = attention_input(H, H_kv, d, n, LAST)
    scaling, norms = 8 * d**-0.5, np.linspace(1.0, 3.0, LAST)
    sinks = None if softcap is None else np.linspace(-1.0, 1.0, H)
    A, error = oracle.attended(q, k, scaling, softcap, sinks), attention_error(q, k, scaling, softcap, precision, sinks)
    received = policy_stages.received_attention(q, k, scaling, softcap, sinks)
    for head, (got, rows) in enumerate(zip(received, A.reshape(H_kv, -1, n), strict=True)):
        radius = received_radius(rows, np.tile(error, H // H_kv), precision)
        assert radius.max() < 0.005 * rows.sum(axis=0).max(), "the error bound is too large for a test"
        off = np.abs(got - rows.sum(axis=0)) - radius
        assert off.max() <= 0, f"KV head {head}, key {off.argmax()}: {got[off.argmax()]} is wrong"
    largest = policy_stages.largest_attention(q, k, norms, scaling, softcap, sinks)
    bound = error + 8 * UNIT_ROUNDOFF[precision] * (1 + error)
    for weights, got in zip(A / norms[:, None], largest, strict=True):
        assert (got >= (weights * (1 - bound)[:, None]).max(axis=0)).all()
        assert (got <= (weights * (1 + bound)[:, None]).max(axis=0)).all()


@pytest.mark.spec("PO-OBSERVED-ATTENTION", "PO-KVZIP", "PO-KVZIP-PLUS")
@pytest.mark.parametrize("d", [64, 128])
def test_keys_are_not_rounded_to_float16(policy_stages: PolicyStages, precision: str, d: int) -> None:
    """Check that the second logit is larger by 1. For keys in float16 or bfloat16, both logits would be equal."""
    q, k = np.zeros((32, 1, d), np.float32), np.zeros((8, 2, d), np.float32)
    q[:, :, -1], k[:, :, -1] = 4096.0, [1.0, 1.0 + 2.0**-12]
    want, error = np.exp([-1.0, 0.0]) / (1 + np.exp(-1.0)), attention_error(q, k, 1.0, None, precision)[0]
    assert error < 0.2
    assert (np.abs(policy_stages.received_attention(q, k, 1.0, None) - 4 * want) <= 4 * error * want).all()
    assert (np.abs(policy_stages.largest_attention(q, k, np.ones(1), 1.0, None) - want) <= error * want).all()


@large
@pytest.mark.spec("PO-EXPECTED-ATTENTION")
@pytest.mark.parametrize(("H", "H_kv", "d", "n"), SHAPES)
def test_attention_that_is_expected(
    policy_stages: PolicyStages, precision: str, H: int, H_kv: int, d: int, n: int,
) -> None:
    q, k = attention_input(H, H_kv, d, n, n)
    v = k[:, ::-1] + np.float32(0.25)
    inv_freq, at = 10_000.0 ** (-np.arange(d // 2) / (d // 2)), np.arange(n)
    want, mass = oracle.expected(q, k, v, at, at + n, inv_freq, 1.25, 4 / d)
    error = expected_error(mass, n, d, n, precision)
    assert error < 0.05, "the error bound is too large for a test"
    actual = policy_stages.expected_attention(q, k, v, at, at + n, inv_freq, 1.25, 4 / d)
    assert (np.abs(actual - want) <= error * want).all()


@large
@pytest.mark.spec("CC-COATTENTION", "CC-ATTENTION", "CC-SALIENCE", "CC-INTRA", "CC-CROSS")
@pytest.mark.parametrize(("H", "H_kv", "d", "n"), SHAPES)
def test_the_first_stage(stages: CrystalStages, precision: str, H: int, H_kv: int, d: int, n: int) -> None:
    p: CrystalCacheParameters = CrystalCacheParameters(**{**vars(PAPER), "C": 128})
    inputs = laddered(Shape("models", H, H_kv, d, n, p))
    actual, want = inputs.run(stages), scale_checks.boxed(inputs, precision)
    assert not list(scale_checks.salience(actual.salience, want, p, precision, strict=False))
    for name in ("intra", "cross"):
        index, weight = getattr(actual, name), getattr(actual, f"{name}_weight")
        k, tau = getattr(p, f"k_{name}"), getattr(p, f"tau_{name}")
        assert not list(scale_checks.neighbours(index, weight, getattr(want, name), k, tau, strict=False))


@large
@pytest.mark.spec("NK-SCORE")
@pytest.mark.parametrize(("H_kv", "d", "n"), [(8, 64, 300), (8, 128, 128), (1, 128, 512), (3, 64, 384), (2, 64, 1_024)])
def test_nestedkv(nestedkv_stages: NestedKVStages, precision: str, H_kv: int, d: int, n: int) -> None:
    k = keys(H_kv, n, d)
    for head, (head_keys, got) in enumerate(zip(k, nestedkv_stages.anomaly_score(k, SOFT), strict=True)):
        want = oracle.nestedkv(head_keys, SOFT)
        off = np.abs(got - want.score)
        assert off.max() <= nestedkv_radius(want, k.shape, SOFT, precision), f"KV head {head}, token {off.argmax()}"


@large
@pytest.mark.spec("NK-CURRENT", "NK-SCORE")
def test_windows_after_a_long_prefix(nestedkv_stages: NestedKVStages, precision: str) -> None:
    """Check windows of three keys. float32 sums over all 33 000 keys would lose too many digits.

    The keys are within 90 degrees, and nearly all weight is on the current memory, so that the radius is small.
    """
    n = 33_000
    angle = np.pi / 2 * Numbers(n).fractions(n)
    k = np.stack([np.cos(angle), np.sin(angle)], axis=1)[None].astype(np.float32)
    p = replace(SOFT, W=3, b_min=4, b_max=4, w0=(1e-9, 1e-9, 1.0), beta=0.1, kappa=0.1)
    want = oracle.nestedkv(k[0], p)
    off = np.abs(nestedkv_stages.anomaly_score(k, p)[0] - want.score)
    assert off.max() <= nestedkv_radius(want, k.shape, p, precision), f"token {off.argmax()}"


@pytest.mark.spec("DV-GREEDY")
@pytest.mark.parametrize(("n", "d", "k"), [(128, 64, 32), (512, 128, 128), (300, 128, 90)])
def test_diverse_tokens(selector: DiversityStages, n: int, d: int, k: int) -> None:
    """Check inputs with equal signatures and equal scores."""
    numbers = Numbers(n + d)
    V, s = signatures(n, d, n // 4, numbers), numbers.integers(0, 9, n) / 9
    retained = np.arange(n) >= n - 16
    assert np.array_equal(selector.diverse(s, V, retained, k, 0.5), oracle.diverse(s, V, retained, k, 0.5))


@pytest.mark.spec("PO-TOP-UNITS")
def test_the_best_tokens_of_each_layer_and_head(policy_stages: PolicyStages) -> None:
    """Check 32 layers of 8 KV heads, each with a different number of kept tokens."""
    numbers, groups, n = Numbers(7), 32 * 8, 256
    scores = numbers.integers(0, 40, groups * n).reshape(groups, n) / 40
    shares, pinned = numbers.integers(0, n + 1, groups), np.zeros((groups, n), dtype=np.bool_)
    pinned[:, n - 32 :] = True
    assert kept(policy_stages, scores, shares, pinned) == best(scores, shares, pinned)


@pytest.mark.parametrize("op", STAGES)
def test_a_result_is_the_same_after_thousands_of_calls(subject: Backend, op: str) -> None:
    """Check repeated calls, as a server makes them within minutes. Interpreted code is called less often."""
    interpreted = any(os.environ.get(name, "0") not in ("", "0") for name in INTERPRETERS)
    stage, given = stage_of(subject, op), tuple({**CALLS[op].arguments, **FEWER.get(op, {})}.values())
    first = parts(stage(*given))
    for call in range(2, REPEATS // (50 if interpreted else 1)):
        assert parts(stage(*given)) == first, f"call {call} differs from the first"
