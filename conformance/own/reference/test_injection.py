"""Injection: rotation against complex numbers; places, baselines and instruments against brute force."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance import tolerances
from conformance.assurance.oracles import injection as oracle
from conformance.plugin import sparingly
from reference.injection.diagnostics import bands, entropy, key_cosine, sink_mass
from reference.injection.rotation import TURNS, rebase_angles, shift_angles
from reference.injection.splicing import ARMS, first_tokens, held, most_deviating, placed
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


@pytest.mark.spec("IN-PLACES")
@given(n=st.integers(1, 12), data=st.data())
def test_places_equal_the_brute_force(n: int, data: st.DataObject) -> None:
    hidden, start = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, 99))
    kept = sorted(data.draw(st.sets(st.integers(0, n - 1))))
    found, following = placed(n, hidden, start, np.array(kept, dtype=np.int64))
    assert (found.tolist(), following) == oracle.placed(n, hidden, start, kept)


lists = st.lists(st.integers(0, 9), max_size=6)


@pytest.mark.spec("IN-BASELINES")
@pytest.mark.parametrize("arm", ARMS)
@sparingly
@given(session=lists, prefix=lists, raw=st.lists(lists, max_size=3), wrapped=st.lists(lists, max_size=3))
def test_baselines_equal_the_brute_force(
    arm: str, session: list[int], prefix: list[int], raw: list[list[int]], wrapped: list[list[int]],
) -> None:
    found = held(arm, session, prefix, raw, wrapped)
    assert {name: list(value) if isinstance(value, tuple) else value for name, value in vars(found).items()} == (
        oracle.held(arm, session, prefix, raw, wrapped)
    )


@pytest.mark.spec("IN-LEGOLINK")
@given(start=st.integers(0, 20), lengths=st.lists(st.integers(1, 6), max_size=4), k=st.integers(0, 7))
def test_legolink_equals_the_brute_force(start: int, lengths: list[int], k: int) -> None:
    assert first_tokens(start, lengths, k) == oracle.first_tokens(start, lengths, k)


@pytest.mark.spec("IN-CACHEBLEND")
@given(
    n=st.integers(1, 9), heads=st.integers(1, 2), seed=st.integers(0, 99),
    r=st.sampled_from([0.0, 0.1, 0.25, 0.3, 0.5, 0.7, 1.0]),
)
def test_cacheblend_equals_the_brute_force(n: int, heads: int, r: float, seed: int) -> None:
    """Small integers: deviations are exact, and many are equal."""
    rng = np.random.default_rng(seed)
    spliced, fresh = (rng.integers(-2, 3, (heads, n, 2)).astype(np.float64) for _ in range(2))
    assert most_deviating(spliced, fresh, 7, r) == oracle.most_deviating(spliced.tolist(), fresh.tolist(), 7, r)


@pytest.mark.spec("IN-CACHEBLEND")
def test_of_many_equal_deviations_the_first_are_computed_again() -> None:
    """As many as an unstable sort would mix."""
    rng = np.random.default_rng(0)
    spliced = rng.integers(0, 2, (1, 400, 1)).astype(np.float64)
    ones = np.flatnonzero(spliced[0, :, 0])
    found = most_deviating(spliced, np.zeros_like(spliced), 7, 0.25)
    assert len(ones) > 100
    assert found == (7 + ones[:100]).tolist()


@st.composite
def attentions(draw: st.DrawFn) -> Cube:
    """(2, 3, n) with rows that sum to 1, zeros and certain rows among them."""
    rng, n = np.random.default_rng(draw(st.integers(0, 2**32 - 1))), draw(st.integers(1, 8))
    raw = rng.exponential(size=(2, 3, n)) * (rng.random((2, 3, n)) < 0.7)
    raw[..., 0] += 0.1
    raw[0, 0] = np.eye(n)[0]
    weights: Cube = raw / raw.sum(-1, keepdims=True)
    return weights


@pytest.mark.spec("IN-ENTROPY")
@given(weights=attentions())
def test_entropy_equals_the_brute_force(weights: Cube) -> None:
    found = entropy(weights)
    want = [oracle.entropy(row) for head in weights.tolist() for row in head]
    assert tolerances.close("IN-ENTROPY", found.ravel(), want)
    assert found[0, 0] == 0
    assert (found <= np.log(weights.shape[2]) + 1e-12).all()


@pytest.mark.spec("IN-SINK-MASS")
@sparingly
@given(weights=attentions(), data=st.data())
def test_sink_mass_equals_the_brute_force(weights: Cube, data: st.DataObject) -> None:
    n = weights.shape[2]
    at = np.array(sorted(data.draw(st.sets(st.integers(0, 12), min_size=n, max_size=n))), dtype=np.int64)
    found = sink_mass(weights, at)
    want = [oracle.sink_mass(row, at.tolist(), 4) for head in weights.tolist() for row in head]
    assert tolerances.close("IN-SINK-MASS", found.ravel(), want)


@pytest.mark.spec("IN-KEY-COSINE")
@pytest.mark.parametrize("style", ["half_split", "interleaved"])
@sparingly
@given(seed=st.integers(0, 2**32 - 1), d=st.integers(4, 6), start=st.integers(0, 3000))
def test_cosines_equal_the_brute_force(style: str, seed: int, d: int, start: int) -> None:
    """A token that is the same but for its rotation has the cosine 1 once both are taken off."""
    rng = np.random.default_rng(seed)
    a, b, theta = rng.standard_normal((2, 3, d)), rng.standard_normal((2, 3, d)), np.array([1.0, 0.01])
    at, later = np.arange(3), start + np.arange(3)
    b[0, 1] = oracle.turned(a[0, 1].tolist(), (start * theta).tolist(), style == "interleaved")
    b[1, 2] = 0.0
    found = key_cosine(a, b, (at, later), theta, style)
    want = [
        oracle.cosines(x, y, (p, q), theta.tolist(), style == "interleaved")
        for one, other in zip(a.tolist(), b.tolist(), strict=True)
        for x, y, p, q in zip(one, other, at.tolist(), later.tolist(), strict=True)
    ]
    for which in (0, 1):
        assert np.abs(found[which].ravel() - [pair[which] for pair in want]).max() <= tolerances.key_cosine_error(d)
    assert abs(found[1][0, 1] - 1) <= tolerances.key_cosine_error(d)
    assert (found[0][1, 2], found[1][1, 2]) == (0, 0)


@pytest.mark.spec("IN-BANDS")
@given(depth=st.integers(1, 130))
def test_bands_equal_the_brute_force(depth: int) -> None:
    assert {name: list(band) for name, band in bands(depth).items()} == oracle.bands(depth)
