"""Tests of decode: key norms and activation."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance import tolerances
from conformance.checks.refusals import refused
from conformance.oracles import decode
from conformance.oracles.decode import Model, Trunk
from conformance.strategies.numbers import TYPES, Numbers, of_type
from conformance.strategies.trunks import decode_parameters, inverse_norms
from spec.arrays import Vector
from spec.backend import BreathStages
from spec.decode import LiveTrunks
from spec.parameters import PAPER, CrystalCacheParameters


@st.composite
def keys(draw: st.DrawFn) -> Any:
    """Draw keys of any floating type, of which some are zero in some or all heads."""
    H, n, d = (draw(st.integers(1, most), label=name) for name, most in (("H_kv", 3), ("n", 6), ("d", 5)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1), label="seed"))
    k = rng.standard_normal((H, n, d)) * draw(st.sampled_from([1.0, 1e-4, 100.0]), label="length")
    for i in draw(st.lists(st.integers(0, n - 1), max_size=2), label="zero tokens"):
        k[: draw(st.integers(1, H), label="zero heads"), i] = 0
    return k.astype(draw(st.sampled_from([np.float32, np.float64, np.float16, np.longdouble]), label="type"))


def table(sizes: list[int], norms: Vector) -> LiveTrunks:
    offsets, n = np.cumsum([0, *sizes]).astype(np.int64), sum(sizes)
    return LiveTrunks(np.arange(n), offsets, np.ones(n), norms, np.ones(len(sizes)))


@st.composite
def tables(draw: st.DrawFn) -> LiveTrunks:
    sizes = draw(st.lists(st.integers(1, 4), max_size=6), label="sizes")
    return table(sizes, draw(inverse_norms(sum(sizes)), label="norms"))


def active_by_force(live: LiveTrunks, p: CrystalCacheParameters) -> list[bool]:
    groups = np.split(np.arange(len(live.positions)), live.offsets[1:-1]) if len(live.sizes) else []
    trunks = [Trunk(at, g.tolist(), 1.0, 0.0) for at, g in enumerate(groups)]
    names = decode.active(Model(0, trunks=trunks, norm=dict(enumerate(live.inverse_norms.tolist()))), p)
    return [g.name in names for g in trunks]


@pytest.mark.spec("CC-KEY-NORM")
@given(k=keys())
def test_inverse_norms_lie_in_their_bound(breath_stages: BreathStages, k: Any) -> None:
    """Check the mean over heads of 1 / ||k||, in float64 for any type of the keys. It is infinite for a zero key."""
    actual = breath_stages.inverse_key_norms(k)
    want = np.array([decode.inverse_norm(list(token)) for token in k.astype(np.float64).transpose(1, 0, 2).tolist()])
    assert actual.dtype == np.float64
    assert np.isinf(actual).tolist() == np.isinf(want).tolist()
    finite = np.isfinite(want)
    radius = tolerances.key_norm_error(len(k), k.shape[2]) * want[finite]
    assert (np.abs(actual[finite] - want[finite]) <= radius).all()


@pytest.mark.spec("CC-KEY-NORM")
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("n", [1, 17, 1_025])
def test_keys_of_every_type_and_size(breath_stages: BreathStages, kind: str, n: int) -> None:
    """Check large and small keys whose squares or inverses overflow or underflow the dtype of the keys."""
    k, _ = of_type(kind, n, (2, n, 4))
    want = (1 / np.sqrt((k.astype(np.float64) ** 2).sum(axis=2))).mean(axis=0)
    assert (np.abs(breath_stages.inverse_key_norms(k) - want) <= tolerances.key_norm_error(2, 4) * want).all()


@pytest.mark.spec("CC-KEY-NORM")
@pytest.mark.parametrize("size", [2.0**-990, 1e-200, 1e-162, 1e-160, 1e-150, 1e150, 1.3e154, 1e155, 1e200, 2.0**990])
def test_norms_whose_squares_float64_does_not_hold(breath_stages: BreathStages, size: float) -> None:
    """Check very short and very long keys next to a head of usual length, with a channel that is nearly 0."""
    k = np.array([[[1.0, 0.7, 0.0, 1e-30], [-0.6, 0.0, 0.0, 0.8]], [[1.0, 0.0, 2.0, 0.0], [0.0, 0.0, 0.0, 0.0]]])
    k[0] *= size
    actual, radius = breath_stages.inverse_key_norms(k), tolerances.key_norm_error(2, 4)
    want = (1 / (size * math.hypot(1.0, 0.7)) + 5**-0.5) / 2
    assert abs(actual[0] - want) <= radius * want
    assert actual[1] == np.inf
    alone = breath_stages.inverse_key_norms(k[:1])
    lengths = size * np.hypot(k[0, :, 0] / size, np.hypot(k[0, :, 1] / size, k[0, :, 3] / size))
    assert (np.abs(alone * lengths - 1) <= radius).all()


@pytest.mark.spec("CC-KEY-NORM")
def test_norms_beyond_the_bound_are_counted_as_small_and_large(breath_stages: BreathStages) -> None:
    actual = breath_stages.inverse_key_norms(np.array([[[5e-324, 0.0], [2.0**-1022, 0.0], [1.7e308, 1.7e308]]]))
    assert (actual[:2] >= 2.0**1000).all()
    assert 0 <= actual[2] <= 2.0**-1000


@pytest.mark.spec("CC-KEY-NORM")
@pytest.mark.parametrize(
    "k", [np.ones((2, 3)), np.ones((1, 0, 2)), np.full((1, 1, 2), np.nan), np.ones((1, 1, 2), dtype=np.int64)]
)
def test_keys_that_are_none_are_refused(breath_stages: BreathStages, k: Any) -> None:
    with refused("k", k):
        breath_stages.inverse_key_norms(k)


@pytest.mark.spec("CC-KEY-NORM")
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("n", [1, 33, 257, 1_025])
def test_keys_that_are_not_finite_are_refused_anywhere(breath_stages: BreathStages, n: int, value: float) -> None:
    for place in (0, n, -1):
        k = np.zeros((2, n, 2))
        k.flat[place] = value
        with refused("k", k):
            breath_stages.inverse_key_norms(k)


@pytest.mark.spec("CC-KEY-NORM")
def test_the_mean_is_of_inverses(breath_stages: BreathStages) -> None:
    """Check that norms (1, 9) of two heads have a larger mean inverse than norms (3, 3)."""
    k = np.array([[[1.0], [3.0]], [[9.0], [3.0]]])
    assert breath_stages.inverse_key_norms(k).round(3).tolist() == [0.556, 0.333]


@pytest.mark.spec("CC-ACTIVATION", "CC-ETA")
@given(live=tables(), p=decode_parameters())
def test_active_means_more_than_half(breath_stages: BreathStages, live: LiveTrunks, p: CrystalCacheParameters) -> None:
    assert breath_stages.activation(live, p).tolist() == active_by_force(live, p)


FORMS: list[Callable[[Vector, float, float], Any]] = [
    lambda x, top, theta: x > theta * top, lambda x, top, theta: x * (1 / top) > theta,
    lambda x, top, theta: np.exp(np.log(x) - np.log(top)) > theta,
]


@pytest.mark.spec("CC-ACTIVATION", "CC-ETA")
@pytest.mark.parametrize("theta", [0.3, 0.1, 0.7])
@pytest.mark.parametrize("size", [1.0, 2.0**-60, 1e-3, 1e9])
def test_a_quotient_is_compared(breath_stages: BreathStages, theta: float, size: float) -> None:
    """Check norms near theta times the largest norm, for which any other formula gives wrong results."""
    for form in FORMS:
        count = 0
        for top in size * (1 + Numbers(17).fractions(400)):
            x = theta * top + np.spacing(theta * top) * np.arange(-2.0, 3.0)
            if (form(x, top, theta) != (x / top > theta)).any():
                count += 1
                live = table([1] * 6, np.append(x, top))
                actual = breath_stages.activation(live, replace(PAPER, theta_act=theta))
                assert actual.tolist() == [*(x / top > theta).tolist(), True]
            if count == 3:
                break
        assert count, "no input has a different result with this formula"


@pytest.mark.spec("CC-ACTIVATION")
@pytest.mark.parametrize("half", [128, 256, 2**15, 2**16])
def test_active_members_are_counted_to_the_last(breath_stages: BreathStages, half: int) -> None:
    """Check that a trunk is inactive with half of its tokens above theta_act, and active with one more token."""
    norms = np.where(np.arange(4 * half + 1) < half, 1.0, 0.1)
    norms[2 * half :][: half + 1] = 1.0
    live = table([2 * half, 2 * half, 1], norms)
    assert breath_stages.activation(live, PAPER).tolist() == [False, True, False]


@pytest.mark.spec("CC-KEY-NORM", "CC-ETA")
@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_a_key_of_negative_zeros_is_zero(breath_stages: BreathStages, kind: type) -> None:
    """Check that the inverse norm is infinite if the key is negative zero in one head or in all heads."""
    k: Any = np.ones((2, 4, 3), dtype=kind)
    k[:, 1], k[1, 2] = -0.0, -0.0
    assert np.isinf(breath_stages.inverse_key_norms(k)).tolist() == [False, True, True, False]
