"""The comparison with kvpress, as far as it needs no kvpress."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from conformance.measure.peers.differences import OURS
from conformance.measure.peers.inputs import SMALL, drawn, positions_of
from reference import policies
from spec.budget import Budget
from spec.policy import Observation


def test_keys_are_found_at_their_positions() -> None:
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((3, 20, 4)).astype(np.float32)
    chosen = np.stack([rng.permutation(20)[:7] for _ in keys])
    some = np.stack([head[at] for head, at in zip(keys, chosen, strict=True)])
    assert positions_of(some, keys).tolist() == chosen.tolist()
    with pytest.raises(ValueError, match="head 1: a key is none"):
        positions_of(np.where(np.arange(3)[:, None, None] == 1, some + 1, some), keys)
    keys[2, 5] = keys[2, 9]
    with pytest.raises(ValueError, match="head 2: 1 of 20 keys"):
        positions_of(some, keys)


@pytest.mark.parametrize("seed", range(8))
def test_our_pyramid_on_one_layer_is_what_the_policy_keeps_there(seed: int) -> None:
    """The budgets part alone, against the whole policy on all layers."""
    inputs, (ours, _) = drawn(seed, 120), OURS["PyramidKV"]
    views, heads = dict.fromkeys(range(SMALL.layers), inputs.view), len(inputs.k)
    B = -(-inputs.kept * inputs.n // 1)
    found, _ = policies.retain(
        policies.pyramidkv(SMALL.window, SMALL.kernel), Budget(count=int(B)),
        Observation(inputs.n, SMALL.layers * heads, None, views),
    )
    for layer in range(SMALL.layers):
        groups = [found.group(layer * heads + head).tolist() for head in range(heads)]
        assert ours(replace(inputs, layer=layer), frozenset()) == groups


@pytest.mark.parametrize("press", OURS)
def test_every_reading_gives_kept_sets_on_every_input(press: str) -> None:
    """Also where a pyramid's line has no token left for its last layer, of which no budget can be made."""
    ours, readings = OURS[press]
    for seed in range(30):
        inputs = drawn(seed, 40)
        for some in [(), *((reading,) for reading in readings), readings]:
            for kept in ours(inputs, frozenset(some)):
                assert kept == sorted(set(kept))
                assert set(kept) <= set(range(inputs.n))


def test_inputs_at_another_ratio_are_the_same_tensors() -> None:
    inputs = drawn(3, 40)
    view, other = inputs.view, inputs.at("0.25")
    assert (other.ratio, other.kept, other.view) == ("0.25", Fraction(3, 4), view)
    assert inputs.ratio != "0.25"
