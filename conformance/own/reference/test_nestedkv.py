"""NestedKV: each item's function against brute force."""

from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.oracles import nestedkv as oracle
from conformance.strategies.numbers import NESTED, keys, seeds
from conformance.suite.test_nestedkv import lengths
from conformance.tolerances import scores_agree
from reference import nestedkv as nk
from reference.directions import unit_keys
from spec.parameters import NESTEDKV

pytestmark = pytest.mark.usefixtures("reference_items")


def scales_of(seed: int, n: int) -> Any:
    """Three normalised readings (3, 1, n), with ties."""
    a = np.random.default_rng(seed).integers(0, 9, (3, 1, n)) / 8
    return np.stack([nk.min_max(scale) for scale in a])


@pytest.mark.spec("NK-UNIT-KEYS")
@given(seed=seeds, n=lengths)
def test_keys_become_directions(seed: int, n: int) -> None:
    """Length 1, the same direction; a negative key is no other."""
    k = keys(seed, 1, n).astype(np.float64)
    unit = unit_keys(k)
    assert scores_agree(unit[0].ravel(), [x for row in oracle.unit(k[0].tolist()) for x in row])
    assert np.array_equal(unit_keys(-k), -unit)


@pytest.mark.spec("NK-STABLE", "NK-EPISODIC", "NK-CURRENT")
@given(seed=seeds, n=lengths, W=st.integers(1, 9), b=st.integers(1, 9))
def test_the_three_memories(seed: int, n: int, W: int, b: int) -> None:
    unit = unit_keys(keys(seed, 1, n).astype(np.float64))
    p = replace(NESTED, W=W, b_min=b, b_max=b + 2)
    stable, episodic, current = zip(*(oracle.memories(unit[0].tolist(), i, p) for i in range(n)), strict=True)
    assert scores_agree(nk.stable_memory(unit)[0, 0], stable[0])
    found = nk.episodic_memory(unit, nk.block_size(n, p))[0], nk.current_memory(unit, W)[0]
    for got, want in zip(found, (episodic, current), strict=True):
        assert scores_agree(got.ravel(), [x for row in want for x in row])


@pytest.mark.spec("NK-EPISODIC")
def test_blocks_of_the_papers_lengths() -> None:
    sizes = {1: 128, 4127: 128, 4128: 129, 6400: 200, 8191: 255, 8192: 256, 32768: 256}
    assert {N: nk.block_size(N, NESTEDKV) for N in sizes} == sizes


@pytest.mark.spec("NK-ANOMALY")
@given(seed=seeds, n=lengths)
def test_anomalies_are_negative_cosines(seed: int, n: int) -> None:
    """A memory longer than 2^-16 has a direction, one of 2^-16 has none."""
    unit = unit_keys(keys(seed, 1, n).astype(np.float64))
    memory = keys(seed + 1, 1, n).astype(np.float64)
    memory[0, 0] = 0.0
    memory[0, 0, 1] = 2.0**-16 * (1 + seed % 2)
    got = nk.anomalies(unit, memory)[0]
    assert (got[0] == 0) == (seed % 2 == 0 or unit[0, 0, 1] == 0)
    pairs = zip(unit[0].tolist(), memory[0].tolist(), strict=True)
    assert scores_agree(got, [oracle.anomaly(key, mu) for key, mu in pairs])


@pytest.mark.spec("NK-MIN-MAX")
@given(seed=seeds, n=lengths, width=st.sampled_from([0.0, 2.0**-40, 2.0**-16, 2.0**-15, 1.0]))
def test_values_are_moved_to_the_unit_interval(seed: int, n: int, width: float) -> None:
    """Each head by its own range."""
    rows = np.random.default_rng(seed).integers(-4, 5, (2, n)) / 4 * np.array([[width], [3.0]])
    for row, got in zip(rows, nk.min_max(rows), strict=True):
        assert scores_agree(got, oracle.min_max(row.tolist()))
        spread = row.max() - row.min()
        assert (got.min(), got.max()) == ((0.0, 1.0) if spread > 2.0**-16 else (0.0, 0.0))


@pytest.mark.spec("NK-GAP")
@given(seed=seeds, n=lengths, p=st.fractions(Fraction(1, 20), 1))
def test_gaps_are_means_of_the_ends(seed: int, n: int, p: Fraction) -> None:
    a = scales_of(seed, n)
    assert scores_agree(nk.gap(a, p)[:, 0], oracle.deltas(a[:, 0].tolist(), replace(NESTED, p=p)))


@pytest.mark.spec("NK-BLEND")
@given(seed=seeds, n=lengths)
def test_the_blend_is_a_softmax_over_its_prior(seed: int, n: int) -> None:
    """Equal gaps leave the prior; the weights sum to 1."""
    a = scales_of(seed, n)
    delta = np.random.default_rng(seed).random((3, 1))
    want = oracle.blended(a[:, 0].tolist(), delta[:, 0].tolist(), NESTED)
    assert scores_agree(nk.blend(a, delta, NESTED)[0], want)
    level = nk.blend(a, np.full((3, 1), 0.5), NESTED)[0]
    assert scores_agree(level, (np.array(NESTED.w0) @ a[:, 0]).tolist())
    assert scores_agree(nk.blend(np.ones_like(a), delta, NESTED)[0], [1.0] * n)


@pytest.mark.spec("NK-SURPRISE")
@given(seed=seeds, n=lengths)
def test_surprise_is_normalised_then_rectified(seed: int, n: int) -> None:
    a = scales_of(seed, n)
    found = nk.rectified_surprise(a)[0]
    assert scores_agree(found, oracle.rectified(oracle.surprise(a[:, 0].tolist())))
    assert (found >= 0).all()
    assert (found < 1).all()


@pytest.mark.spec("NK-SURPRISE")
@given(readings=st.lists(st.floats(0, 1), min_size=3, max_size=3))
def test_without_appendix_a_the_gate_never_opens(readings: list[float]) -> None:
    """Population deviation of three numbers of [0, 1]: at most sqrt(2)/3, reached at (0, 0, 1), below tau."""
    (s,) = oracle.surprise([[x] for x in readings])
    (most,) = oracle.surprise([[0.0], [0.0], [1.0]])
    assert s <= most < NESTEDKV.tau
    assert oracle.gate(s, NESTEDKV) <= oracle.gate(most, NESTEDKV) < 0.217
    assert oracle.gate(most * 1.5**0.5, NESTEDKV) < 0.445


@pytest.mark.spec("NK-ROUTE")
@given(seed=seeds, n=lengths)
def test_the_route_runs_from_the_blend_to_the_strongest(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    a, s = scales_of(seed, n), rng.random((1, n))
    blended = nk.blend(a, rng.random((3, 1)), NESTED)
    found = nk.routed_score(a, blended, s, NESTED)
    assert scores_agree(found[0], oracle.routed(a[:, 0].tolist(), blended[0].tolist(), s[0].tolist(), NESTED))
    assert (found >= blended - 1e-15).all()
    assert (found <= a.max(axis=0) + 1e-15).all()
