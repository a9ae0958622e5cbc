"""Tests of NestedKV: scores inside the certified radius of brute force, laws of the scores, and errors."""

import re
from dataclasses import replace
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.checks.refusals import refused
from conformance.oracles import nestedkv as oracle
from conformance.strategies.numbers import NESTED, TYPES, keys, of_type, seeds
from conformance.tolerances import nestedkv_radius, scores_agree, traced_radius
from spec.backend import NestedKVStages
from spec.parameters import NESTEDKV, NestedKVParameters

lengths = st.integers(1, 40)


def names_a_place(text: str, head: int, token: int) -> bool:
    """Return True if a text names both numbers, after the words "head" and "token", or in this order."""
    if f"{head}" not in re.findall(r"\d+", text) or f"{token}" not in re.findall(r"\d+", text):
        return False
    numbers = {(word, int(number)) for word, number in re.findall(r"\b(head|token)\b\D*?(\d+)", text.lower())}
    if not numbers:
        return re.search(rf"\b{head}\b.*\b{token}\b", text) is not None
    expected = (("head", head), ("token", token))
    return all((word, number) in numbers for word, number in expected if word in dict(numbers))


@pytest.mark.spec("NK-UNIT-KEYS", "NK-SCORE")
@pytest.mark.parametrize(("head", "token"), [(1, 7), (1, 3), (0, 2), (2, 0), (2, 256), (1, 1_024)])
def test_a_zero_key_is_refused_by_name(nestedkv_stages: NestedKVStages, head: int, token: int) -> None:
    """Check that the error names the KV head and the token of the zero key, in any words."""
    k = keys(0, 3, max(9, token + 1))
    k[head, token] = 0
    with refused("k", k) as caught:
        nestedkv_stages.anomaly_score(k, NESTED)
    assert names_a_place(str(caught.value), head, token)


@pytest.mark.spec("NK-SCORE")
@pytest.mark.parametrize("k", [np.zeros((2, 3)), np.full((1, 2, 2), np.nan), np.ones((1, 2, 2), int), "k"])
def test_keys_of_a_wrong_kind_are_refused(nestedkv_stages: NestedKVStages, k: Any) -> None:
    with refused("k", k):
        nestedkv_stages.anomaly_score(k, NESTED)


@pytest.mark.spec("NK-SCORE")
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("n", [1, 33, 257, 1_025])
def test_keys_that_are_not_finite_are_refused_anywhere(nestedkv_stages: NestedKVStages, n: int, value: float) -> None:
    for place in (0, 2 * n, -1):
        k = np.ones((2, n, 4), np.float32)
        k.flat[place] = value
        with refused("k", k):
            nestedkv_stages.anomaly_score(k, NESTED)


def inside(result: Any, k: Any, p: NestedKVParameters, precision: str) -> None:
    """Check that the scores of each head are within the radius of brute force."""
    for head, got in zip(k, result, strict=True):
        radius = nestedkv_radius(head.tolist(), p, precision)
        assert (np.abs(got - np.array(oracle.scores(head.tolist(), p))) <= radius).all()
        assert (got >= -radius).all()
        assert (got <= 1 + radius).all()


@pytest.mark.spec(
    "NK-SCORE", "NK-UNIT-KEYS", "NK-STABLE", "NK-EPISODIC", "NK-CURRENT", "NK-ANOMALY", "NK-MIN-MAX", "NK-GAP",
    "NK-BLEND", "NK-SURPRISE", "NK-ROUTE",
)
@given(
    seed=seeds, H_kv=st.integers(1, 2), n=lengths, W=st.integers(1, 9), tau=st.sampled_from([NESTED.tau, 0.0]),
)
def test_a_score_lies_within_its_radius(
    nestedkv_stages: NestedKVStages, precision: str, seed: int, H_kv: int, n: int, W: int, tau: float,
) -> None:
    """Check scores with different windows, and with tau = 0.

    At tau = 0 the gate is half open if the surprise is 0, so an error in the rectified values changes the score.
    """
    k, p = keys(seed, H_kv, n), replace(NESTED, W=W, tau=tau)
    actual = nestedkv_stages.anomaly_score(k, p)
    assert actual.dtype == np.float64
    assert actual.shape == (H_kv, n)
    inside(actual, k, p, precision)


@pytest.mark.spec(
    "NK-SCORE", "NK-UNIT-KEYS", "NK-STABLE", "NK-EPISODIC", "NK-CURRENT", "NK-ANOMALY", "NK-MIN-MAX", "NK-GAP",
    "NK-BLEND", "NK-SURPRISE", "NK-ROUTE",
)
def test_the_papers_constants_across_blocks_and_windows(nestedkv_stages: NestedKVStages, precision: str) -> None:
    """Check 300 tokens: blocks of 128 tokens, a shorter last block, and windows that cross blocks.

    The radius is small enough to find errors.
    """
    k = keys(5, 1, 300, 8)
    assert nestedkv_radius(k[0].tolist(), NESTEDKV, precision) < 0.05
    inside(nestedkv_stages.anomaly_score(k, NESTEDKV), k, NESTEDKV, precision)


@pytest.mark.spec("NK-MIN-MAX", "NK-SCORE")
def test_equal_keys_score_zero(nestedkv_stages: NestedKVStages) -> None:
    """Check that keys of equal direction have exactly the score 0, also if their lengths differ."""
    k = np.tile(np.array([0.1, 0.7, -0.3], np.float32), (2, 200, 1))
    k[:, ::3] *= 4
    assert (nestedkv_stages.anomaly_score(k, NESTEDKV) == 0).all()


@pytest.mark.spec("NK-STABLE", "NK-EPISODIC", "NK-CURRENT", "NK-ANOMALY", "NK-SCORE")
def test_opposite_keys_have_no_mean(nestedkv_stages: NestedKVStages) -> None:
    """Check keys k, -k, k, -k, of which only windows of odd length have a mean other than 0."""
    k = np.array([[[1.0, 2.0], [-1.0, -2.0]] * 3], np.float32)
    p = replace(NESTED, b_min=6, b_max=6, W=2)
    actual = nestedkv_stages.anomaly_score(k, p)
    assert scores_agree(actual[0], oracle.scores(k[0].tolist(), p)) or actual[0, 0] < actual[0, 1:].min()


@pytest.mark.spec("NK-SCORE")
@pytest.mark.parametrize("make", [
    lambda k: k.astype(np.float64), lambda k: k[:, ::-1][:, ::-1], lambda k: np.asfortranarray(k),
    lambda k: np.repeat(k, 2, axis=1)[:, ::2], lambda k: np.ascontiguousarray(k.transpose(1, 0, 2)).transpose(1, 0, 2),
])
def test_keys_are_read_where_they_lie(nestedkv_stages: NestedKVStages, make: Any) -> None:
    """Check that strides and float64 do not change the result, bit for bit, and that the keys are not changed."""
    k = keys(8, 2, 21)
    given = make(k)
    assert np.array_equal(nestedkv_stages.anomaly_score(given, NESTED), nestedkv_stages.anomaly_score(k, NESTED))
    assert np.array_equal(given, k)


@pytest.mark.spec("NK-SCORE")
@pytest.mark.parametrize("kind", TYPES)
def test_every_type_is_read_exactly(nestedkv_stages: NestedKVStages, kind: str) -> None:
    """Check that float32 and each other type have equal results, bit for bit.

    Some keys have a length whose square the type cannot hold.
    """
    k, size = of_type(kind, 9, (2, 40, 4))
    wide = nestedkv_stages.anomaly_score((k.astype(np.float64) / size).astype(np.float32), NESTED)
    assert np.array_equal(nestedkv_stages.anomaly_score(k, NESTED), wide)


@pytest.mark.spec("NK-UNIT-KEYS", "NK-SCORE")
@pytest.mark.parametrize(("kind", "exponent"), [
    *product(["float32"], [-90, -8, 90]), *product(["float64"], [-1_020, -500, -140, 126, 500, 1_020]),
    *product(["longdouble"], [-700, 700]),
])
@pytest.mark.parametrize("step", [1, 2])
def test_lengths_of_keys_say_nothing(nestedkv_stages: NestedKVStages, kind: str, exponent: int, step: int) -> None:
    """Check that a power of two as a factor of all keys, or of every second key, does not change the result.

    For some factors the squares overflow or become 0.
    """
    k = keys(11, 1, 25)
    longer = k.astype(kind)
    longer[:, ::step] *= longer.dtype.type(2.0**exponent)
    assert np.array_equal(nestedkv_stages.anomaly_score(longer, NESTED), nestedkv_stages.anomaly_score(k, NESTED))


@pytest.mark.spec("NK-UNIT-KEYS", "NK-SCORE")
def test_a_key_of_2_to_the_minus_126_is_a_key(nestedkv_stages: NestedKVStages) -> None:
    """Check that a key of length 2^-126 is not treated as zero. Only shorter keys may be."""
    k = np.array([[[1.0, 0.0], [0.0, -1.0], [-1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]], np.float32)
    tiny = k * np.float32(2.0**-126)
    assert np.array_equal(nestedkv_stages.anomaly_score(tiny, NESTED), nestedkv_stages.anomaly_score(k, NESTED))


@pytest.mark.spec("NK-UNIT-KEYS", "NK-SCORE")
def test_a_key_of_negative_zeros_is_refused(nestedkv_stages: NestedKVStages) -> None:
    k = keys(0, 2, 9)
    k[1, 4] = -0.0
    with refused("k", k):
        nestedkv_stages.anomaly_score(k, NESTED)


@pytest.mark.spec("NK-SCORE", "NK-UNIT-KEYS", "NK-STABLE", "NK-EPISODIC", "NK-CURRENT", "NK-ANOMALY")
@pytest.mark.parametrize("d", [5, 33, 80, 96])
def test_every_channel_counts(nestedkv_stages: NestedKVStages, precision: str, d: int) -> None:
    """Check head dimensions that are not a multiple of 16, or not a power of 2. The last channels weigh most."""
    k = keys(d, 1, 40, d) * np.linspace(0.1, 3, d, dtype=np.float32)
    inside(nestedkv_stages.anomaly_score(k, NESTED), k, NESTED, precision)


@pytest.mark.spec("NK-CURRENT", "NK-EPISODIC", "NK-SCORE")
def test_windows_far_from_the_start(nestedkv_stages: NestedKVStages, precision: str) -> None:
    """Check 2 200 tokens: a difference of sums over the prompt has a larger error than a sum over a window."""
    k, p = keys(7, 1, 2_200, 2), replace(NESTEDKV, W=9)
    want = oracle.traced(k[0].tolist(), p)
    radius = traced_radius(2_200, 2, want.raw, want.shortest, want.deviation, p, precision)
    assert (np.abs(nestedkv_stages.anomaly_score(k, p)[0] - want.score) <= radius).all()


@pytest.mark.spec("NK-GAP", "NK-SCORE")
@pytest.mark.parametrize(("p", "n"), [("15/22", 22), ("13/23", 23), ("15/26", 26)])
def test_the_share_of_the_gap_is_exact(nestedkv_stages: NestedKVStages, precision: str, p: str, n: int) -> None:
    """Check the top share of the gap, such as 15 of 22 tokens, for which the product of floats is below 15.

    With a closed gate and a large beta, one token less changes the score by more than the radius in float32.
    """
    k, exact = keys(n, 1, n), replace(NESTED, p=Fraction(p), beta=30.0, tau=1e3, kappa=0.1)
    assert int(float(Fraction(p)) * n) < Fraction(p) * n
    one_less = oracle.scores(k[0].tolist(), replace(exact, p=Fraction(p) - Fraction(1, n)))
    off = np.abs(np.array(one_less) - oracle.scores(k[0].tolist(), exact))
    assert off.max() > nestedkv_radius(k[0].tolist(), exact, "float32")
    inside(nestedkv_stages.anomaly_score(k, exact), k, exact, precision)


@pytest.mark.parametrize(("w0", "tau"), [
    pytest.param((1.0, 1e-12, 1e-12), 1e3, marks=pytest.mark.spec("NK-STABLE", "NK-SCORE"), id="stable"),
    pytest.param((1e-12, 1.0, 1e-12), 1e3, marks=pytest.mark.spec("NK-EPISODIC", "NK-SCORE"), id="episodic"),
    pytest.param((1e-12, 1e-12, 1.0), 1e3, marks=pytest.mark.spec("NK-CURRENT", "NK-SCORE"), id="current"),
    pytest.param(NESTED.w0, 0.1, marks=pytest.mark.spec("NK-SURPRISE", "NK-SCORE"), id="surprise"),
])
def test_one_part_decides(
    nestedkv_stages: NestedKVStages, precision: str, w0: tuple[float, float, float], tau: float,
) -> None:
    """Check a closed gate with nearly all weight on one memory, and a gate that is partly open.

    The windows and blocks do not divide n.
    """
    k, p = keys(4, 2, 19), replace(NESTED, w0=w0, tau=tau)
    inside(nestedkv_stages.anomaly_score(k, p), k, p, precision)


@pytest.mark.spec("NK-BLEND", "NK-SCORE")
def test_each_head_has_its_own_largest_gain(nestedkv_stages: NestedKVStages, precision: str) -> None:
    """Check gains of heads that differ by more than 750.

    A backend that subtracts the largest gain of all heads computes exp of the difference as 0.
    """
    k = keys(3, 2, 40)
    k[1] = 1 + 0.5 * k[0]
    k[1, -1, 0] = -9.0
    p = replace(NESTED, beta=4_000.0, tau=1e3)
    inside(nestedkv_stages.anomaly_score(k, p), k, p, precision)


@pytest.mark.spec("NK-ROUTE", "NK-BLEND", "NK-SCORE")
@pytest.mark.parametrize("tau", [0.0, 0.6, 1e3])
@pytest.mark.parametrize(("kappa", "beta"), [(750.0, 3.0), (4_000.0, 3.0), (1e30, 3.0), (10.0, 5_000.0), (1e30, 1e30)])
def test_gates_and_gains_of_any_sharpness(
    nestedkv_stages: NestedKVStages, precision: str, kappa: float, beta: float, tau: float,
) -> None:
    """Check very sharp gates and gains, whose exponents exceed float64 and which must not become NaN."""
    k, p = keys(3, 2, 40), replace(NESTED, kappa=kappa, beta=beta, tau=tau)
    inside(nestedkv_stages.anomaly_score(k, p), k, p, precision)
