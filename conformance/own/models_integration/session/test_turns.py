"""Turns: later segments on a compacted cache, in one context or in several."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from conformance.own.models_integration.session.families import ENDS, at_once, build, prompt, states_of
from conformance.own.models_integration.session.observed import Observed
from models_integration import CrystalCache, RetainedCache
from reference.crystalcache import empty_state, extend
from reference.crystalcache.activation import inverse_key_norms
from reference.crystalcache.tail import append
from spec.budget import parse_budget
from spec.decode import DecodeState, check_state
from spec.parameters import TINY

pytestmark = pytest.mark.law("eviction-equals-masking")

N, TURN, NEW = 64, 12, 5


def turn(number: int, n: int = TURN) -> Tensor:
    return prompt(n, seed=100 + number)


@pytest.mark.law("decided-as-the-reference")
@pytest.mark.spec("CC-OBSERVED-LAYER")
@pytest.mark.parametrize(("budget", "which"), [(0.5, 0), (30, 0), (0.5, 1), (30, -1), (0.5, -2)])
def test_the_kept_sets_are_those_of_the_reference(budget: float | int, which: int) -> None:
    """Prompt, steps, turn, steps, turn: the states equal those that the reference gives on the same q and k."""
    model, parameters = build("llama", dtype=torch.float64), replace(TINY, observed_layer=which)
    observed, expected = Observed(model, layer=which % 3), empty_state(parse_budget(budget))
    with CrystalCache(budget, ENDS, parameters, backend="numpy")(model):
        cache = RetainedCache(model.config)
        for ids in (prompt(N), turn(1, 1), turn(2, 1), turn(3), turn(4, 1), turn(5, 7)):
            with observed.forward() as seen:
                at_once(model, ids, cache)
            numbers = ids[0].numpy()
            if len(numbers) == 1:
                expected = append(expected, int(numbers[0]), float(inverse_key_norms(seen.new_k)[0]))
            else:
                k = observed.stored(expected.stored, seen)
                expected = extend(expected, seen.q, k, numbers, ENDS, TINY)
                (state,) = states_of(cache).rows
                same_state(state, expected)
            assert cache.stored_positions().tolist() == expected.stored.tolist()


def same_state(found: DecodeState, expected: DecodeState, rtol: float = 1e-9) -> None:
    assert found.stored.tolist() == expected.stored.tolist()
    assert (found.seen, found.step, found.tail_ids) == (expected.seen, expected.step, expected.tail_ids)
    np.testing.assert_array_equal(found.live.offsets, expected.live.offsets)
    np.testing.assert_array_equal(found.ids, expected.ids)
    np.testing.assert_array_equal(found.counts, expected.counts)
    np.testing.assert_array_equal(found.W.indices, expected.W.indices)
    for a, b in (
        (found.D, expected.D), (found.live.impact, expected.live.impact), (found.W.weights, expected.W.weights),
        (found.live.trunk_impact, expected.live.trunk_impact), (found.live.inverse_norms, expected.live.inverse_norms),
    ):
        np.testing.assert_allclose(a, b, rtol=rtol)
    check_state(found)
