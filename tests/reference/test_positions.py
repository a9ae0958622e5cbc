"""Rotary positions: what the numbers mean for attention, and keys that a turn leaves unchanged."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.plugin import fewer_examples
from reference.injection.rotation import TURNS
from reference.positions import base_of_stream, kept_positions, renumbered_positions, turn_keys
from spec.arrays import Cube, IntVector, Vector
from spec.errors import SpecError

pytestmark = pytest.mark.usefixtures("reference_items")

THETA = 100.0 ** -(np.arange(4) / 4)


def logits(query: Vector, keys: Cube, at: int, positions: IntVector) -> Vector:
    """Return the logits of one query, with queries and keys rotated to their positions from the raw vectors."""
    angles = (np.array([at])[:, None] * THETA, positions[:, None] * THETA)
    q, k = TURNS["half_split"](query[None, None], angles[0]), TURNS["half_split"](keys, angles[1])
    product: Vector = (k[0] @ q[0, 0]).astype(np.float64)
    return product


@pytest.mark.spec("POS-RENUMBERED", "POS-TURN")
@fewer_examples
@given(seed=st.integers(0, 999), kept=st.sets(st.integers(0, 29), min_size=1).map(sorted), base=st.integers(0, 5))
def test_a_set_attends_as_if_the_text_had_only_the_kept_tokens(seed: int, kept: list[int], base: int) -> None:
    """The turned keys and the next query give the logits of a text of k tokens, numbered from 0."""
    rng, n, k = np.random.default_rng(seed), 40, len(kept)
    raw, query = rng.standard_normal((1, k, 8)), rng.standard_normal(8)
    computed = np.array(kept)
    stored = TURNS["half_split"](raw, computed[:, None] * THETA)
    (assigned,), following = renumbered_positions([computed], n, base)
    turned = turn_keys(stored, computed, assigned, THETA, "half_split")
    asked = TURNS["half_split"](query[None, None], np.array([[following]]) * THETA)[0, 0]
    wanted = logits(query, raw, k, np.arange(k))
    assert np.abs(turned[0] @ asked - wanted).max() <= 1e-12
    if kept[-1] != k - 1 and k > 1:
        unmoved = logits(query, raw, n, computed)
        assert np.abs(unmoved - wanted).max() > 1e-12


@pytest.mark.spec("POS-TURN")
@pytest.mark.parametrize("style", ["half_split", "interleaved"])
def test_a_turn_leaves_the_computed_keys_unchanged(style: str) -> None:
    keys = np.random.default_rng(0).standard_normal((2, 3, 9))
    before = keys.copy()
    turned = turn_keys(keys, np.array([0, 5, 9]), np.array([7, 8, 9]), THETA, style)
    assert np.array_equal(keys, before)
    assert not np.array_equal(turned[:, :2], keys[:, :2])
    assert np.array_equal(turned[:, 2], keys[:, 2])
    assert np.array_equal(turned[..., 8], keys[..., 8])


@pytest.mark.spec("POS-BASE", "POS-RENUMBERED")
def test_positions_of_a_long_stream_stay_in_the_range_of_the_model() -> None:
    """A stream of sinks and newest tokens: no position reaches the limit, and keys turn seldom."""
    limit, base, stored, changes = 64, 0, list[int](), 0
    for seen in range(0, 6000, 4):
        now = base_of_stream(seen, base, len(stored), 4, limit)
        changes, base = changes + (now != base), now
        (assigned,), following = renumbered_positions([np.array(stored, dtype=np.int64)], seen, base)
        assert not len(assigned) or assigned[0] >= 0
        assert following + 4 <= limit
        stored = [*stored, *range(seen, seen + 4)]
        stored = stored if len(stored) <= 16 else [*stored[:4], *stored[-12:]]
    assert changes == 124  # at 64, then one in 48 = 64 - 16 tokens


@pytest.mark.spec("POS-KEPT", "POS-RENUMBERED")
@pytest.mark.parametrize("kept", [[0, 12], [3, 2], [4, 4], [-1, 2]])
def test_a_set_that_is_not_of_the_text_is_refused(kept: list[int]) -> None:
    for number in (kept_positions, lambda sets, n: renumbered_positions(sets, n, 0)):
        with pytest.raises(SpecError, match="strictly"):
            number([np.array([0, 1]), np.array(kept)], 12)
