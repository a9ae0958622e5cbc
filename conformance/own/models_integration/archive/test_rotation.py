"""Rotation: the items against complex numbers, and what must hold of any rotation."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance import tolerances
from conformance.assurance.oracles import injection as oracle
from conformance.plugin import sparingly
from models_integration.model.rotation import angles_between, turned
from reference.injection.rotation import TURNS, rebase_angles, shift_angles
from spec.arrays import Cube, Matrix, Vector

pytestmark = pytest.mark.usefixtures("reference_items")

STYLES = [
    pytest.param("half_split", marks=pytest.mark.spec("IN-HALF-SPLIT")),
    pytest.param("interleaved", marks=pytest.mark.spec("IN-INTERLEAVED")),
]


@st.composite
def keys(draw: st.DrawFn) -> tuple[Cube, Vector]:
    """Keys with channels that do not rotate, and inverse frequencies as models have them."""
    pairs = draw(st.integers(0, 4), label="pairs")
    shape = (draw(st.integers(1, 2)), draw(st.integers(1, 4)), 2 * pairs + draw(st.integers(1, 3), label="others"))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1), label="seed"))
    theta = np.sort(rng.uniform(1e-4, 1.0, pairs))[::-1].astype(np.float32).astype(np.float64)
    return rng.standard_normal(shape), theta


def bits(x: Cube) -> bytes:
    return np.ascontiguousarray(x).tobytes()


def near(found: Cube, wanted: Cube, angles: Matrix, turns: int) -> bool:
    """Within `turns` rotations' rounding, and the rounding of angles of that size."""
    slack = tolerances.UNIT_ROUNDOFF["float64"] * (1 + np.abs(angles).max(initial=0.0))
    radius = turns * (tolerances.turn_radius(wanted) + 8 * slack * np.abs(wanted).max())
    return bool((np.abs(found - wanted) <= radius).all())


@pytest.mark.parametrize("style", STYLES)
@sparingly
@given(made=keys(), start=st.integers(-64, 131072))
def test_a_turn_is_a_product_of_complex_numbers(style: str, made: tuple[Cube, Vector], start: int) -> None:
    x, theta = made
    angles = shift_angles(x.shape[1], start, theta)
    wanted = oracle.moved(x.tolist(), angles.tolist(), style == "interleaved")
    assert near(TURNS[style](x, angles), np.array(wanted), angles, 1)


@pytest.mark.spec("IN-SHIFT-ANGLES")
@pytest.mark.parametrize("style", STYLES)
@sparingly
@given(made=keys(), a=st.integers(-999, 4096), b=st.integers(-999, 4096))
def test_two_shifts_are_one(style: str, made: tuple[Cube, Vector], a: int, b: int) -> None:
    x, theta = made
    n = x.shape[1]
    twice = TURNS[style](TURNS[style](x, shift_angles(n, a, theta)), shift_angles(n, b, theta))
    assert near(twice, TURNS[style](x, shift_angles(n, a + b, theta)), shift_angles(n, abs(a) + abs(b), theta), 3)


@pytest.mark.spec("IN-SHIFT-ANGLES")
@pytest.mark.parametrize("style", STYLES)
@sparingly
@given(made=keys(), start=st.integers(-4096, 131072))
def test_a_shift_back_restores_and_keeps_the_norm(style: str, made: tuple[Cube, Vector], start: int) -> None:
    x, theta = made
    n = x.shape[1]
    there = TURNS[style](x, shift_angles(n, start, theta))
    assert near(TURNS[style](there, shift_angles(n, -start, theta)), x, shift_angles(n, start, theta), 3)
    norms = np.linalg.norm(there, axis=-1) - np.linalg.norm(x, axis=-1)
    assert (np.abs(norms) <= 4 * tolerances.turn_radius(x)[..., 0]).all()


@pytest.mark.parametrize("style", STYLES)
@sparingly
@given(made=keys(), start=st.integers(1, 4096))
def test_nothing_keeps_every_bit_and_others_keep_theirs(style: str, made: tuple[Cube, Vector], start: int) -> None:
    x, theta = made
    x[..., 0] = -0.0
    n, width = x.shape[1], 2 * len(theta)
    before = bits(x)
    assert bits(TURNS[style](x, shift_angles(n, 0, theta))) == before
    assert bits(TURNS[style](x, shift_angles(n, start, theta))[..., width:]) == bits(x[..., width:])
    assert bits(x) == before


@pytest.mark.spec("IN-REBASE-ANGLES")
@pytest.mark.parametrize("style", STYLES)
@sparingly
@given(made=keys(), start=st.integers(-64, 4096), factor=st.sampled_from([1.0, 4.0, 40.0]))
def test_rebasing_is_turning_back_and_turning_again(
    style: str, made: tuple[Cube, Vector], start: int, factor: float,
) -> None:
    """A key made at position t under the archive's frequencies becomes the live session's key at start + t."""
    x, archived = made
    live, at = archived / factor, np.arange(x.shape[1], dtype=np.float64)[:, None]
    stored = TURNS[style](x, at * archived)
    found = TURNS[style](stored, rebase_angles(x.shape[1], start, archived, live))
    assert near(found, TURNS[style](x, (start + at) * live), (abs(start) + at) * archived, 4)


@pytest.mark.spec("IN-SHIFT-ANGLES", "IN-REBASE-ANGLES")
@given(made=keys(), start=st.integers(-64, 131072))
def test_angles_equal_the_brute_force(made: tuple[Cube, Vector], start: int) -> None:
    x, theta = made
    n = x.shape[1]
    assert shift_angles(n, start, theta).tolist() == oracle.shift_angles(n, start, theta.tolist())
    live = theta / 4
    found = rebase_angles(n, start, theta, live)
    assert found.tolist() == oracle.rebase_angles(n, start, theta.tolist(), live.tolist())


@pytest.mark.parametrize("style", STYLES)
@sparingly
@given(made=keys(), start=st.integers(-64, 4096))
def test_a_scale_stays_where_it_is(style: str, made: tuple[Cube, Vector], start: int) -> None:
    """A unit rotation of scaled keys is the scaled rotation: yarn's factor cancels."""
    x, theta = made
    angles = shift_angles(x.shape[1], start, theta)
    assert near(TURNS[style](1.369 * x, angles), 1.369 * TURNS[style](x, angles), angles, 2)


@pytest.mark.law("decided-as-the-reference")
@pytest.mark.parametrize("style", ["half_split", "interleaved"])
@sparingly
@given(made=keys(), start=st.integers(0, 2048))
def test_tensors_turn_as_the_reference_does(style: str, made: tuple[Cube, Vector], start: int) -> None:
    """Up to the angle, which the integration rounds to float32 as the models do."""
    x, theta = made
    tensor = torch.tensor(theta, dtype=torch.float32)
    angles = angles_between(x.shape[1], start, tensor, tensor)
    assert near(turned(torch.tensor(x), angles, style).numpy(), TURNS[style](x, angles.numpy()), angles.numpy(), 1)
    exact = shift_angles(x.shape[1], start, theta)
    rounding = 4 * tolerances.UNIT_ROUNDOFF["float32"] * (start + x.shape[1])
    assert (np.abs(angles.numpy() - exact) <= rounding).all()
