"""KVzap: scores of a small network from hidden states, as calibrations store them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from conformance.methods.kvzap import rows
from conformance.strategies.policy_inputs import (
    calibrated,
    decided,
    drawn,
    hidden_states,
    identity,
    networks_of,
    observation,
)
from conformance.tolerances import scores_agree
from reference.calibration import Networks, load_calibration, save_calibration
from reference.policies import kvzap, retain
from reference.policies.kvzap import kvzap_score
from reference.policies.layers import decides_again, is_layerwise
from reference.policies.names import make_policy
from reference.policies.retain import shown_to
from spec.budget import Budget
from spec.errors import SpecError
from spec.policy import Needs

pytestmark = [pytest.mark.usefixtures("reference_items"), pytest.mark.spec("PO-KVZAP")]


@pytest.mark.parametrize("n", [12, 13])
def test_scores_are_those_of_the_brute_force(n: int) -> None:
    """Compare linear networks (n is even) and networks with GELU (n is odd) of each layer."""
    for seed in range(6):
        inputs = drawn(seed, n, 3, (2, 1 + seed % 2))
        policy = kvzap(calibrated(inputs), identity(inputs))
        values = policy.scorer(observation(policy, inputs), np.zeros(n, dtype=np.bool_)).values
        assert all(scores_agree(*pair) for pair in zip(values, rows(inputs, n), strict=True))
        assert (networks_of(inputs).W_1 is None) == (n == 12)


def test_values_of_the_network() -> None:
    scores = kvzap_score(
        np.array([[2.0], [-2.0], [0.0]]), np.array([[1.0, 3.0]]), np.array([-4.0]), np.array([[1.0], [0.0]]),
        np.array([0.0, 1.0]),
    )
    half = 3 * 0.8413447460685429 - 4  # 3 GELU(1) - 4
    assert scores_agree(scores[0], [2 * 0.9772498680518208 + half, -2 * 0.0227501319481792 + half, half])
    assert kvzap_score(np.zeros((0, 1)), np.ones((2, 1)), np.zeros(2)).shape == (2, 0)


@pytest.mark.spec("PO-THRESHOLD")
def test_the_threshold_and_the_window_of_the_paper_are_parts() -> None:
    for seed in range(4):
        inputs, tau = drawn(seed, 20 + seed, 2, (2, 1)), -0.5
        data = {"calibration": calibrated(inputs), "served": identity(inputs)}
        found = decided(make_policy("kvzap/threshold=-0.5/recent=3", data), inputs, inputs.n)
        for own, scores in zip(found, rows(inputs, inputs.n), strict=True):
            assert own == [i for i, x in enumerate(scores) if i >= inputs.n - 3 or (x is not None and x > tau)]
            assert 3 <= len(own) < inputs.n
        assert sum(map(len, found)) > 3 * len(found)


def test_pieces_have_the_hidden_states_of_their_tokens() -> None:
    inputs = drawn(5, 13, 2, (2, 1))
    data = {"calibration": calibrated(inputs), "served": identity(inputs)}
    found = decided(make_policy("kvzap/pieces=5", data), inputs, 6)
    for own, scores in zip(found, rows(inputs, 13), strict=True):
        for start, stop in ((0, 5), (5, 10), (10, 13)):
            kept = [i for i in own if start <= i < stop]
            best = sorted((x for x in scores[start:stop] if x is not None), reverse=True)
            assert {scores[i] for i in kept} == set(best[: len(kept)])
        assert len(own) == 6


def test_layers_evict_alone_and_only_the_first_prompt() -> None:
    inputs = drawn(3, 12, 2, (2, 1))
    policy = kvzap(calibrated(inputs), identity(inputs))
    assert is_layerwise(policy)
    assert not decides_again(policy)
    first = replace(inputs, layers=inputs.layers[:1])
    of_first = Networks(**{name: x[:1] for name, x in networks_of(inputs).arrays.items()})
    assert decided(kvzap(calibrated(replace(first, networks=of_first)), identity(inputs)), first, 5) == decided(
        policy, inputs, 5
    )[:2]


def test_a_calibration_file_gives_back_every_bit(tmp_path: Path) -> None:
    for n in (12, 13):
        inputs = drawn(1, n, 2, (2, 1))
        taken = calibrated(inputs)
        save_calibration(taken, tmp_path / "own.npz")
        again = load_calibration(tmp_path / "own.npz")
        assert again.digest == taken.digest != replace(taken, networks=None).digest
        assert again.networks is not None
        ours, theirs = (one.arrays for one in (again.networks, networks_of(inputs)))
        assert ours.keys() == theirs.keys()
        assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
        policies = [kvzap(one, identity(inputs)) for one in (again, taken)]
        assert decided(policies[0], inputs, 5) == decided(policies[1], inputs, 5)


@pytest.mark.parametrize(("arrays", "words"), [
    ({"W_2": np.ones((2, 2, 3)), "b_2": np.ones((2, 3))}, "must have the shapes"),
    ({"W_2": np.ones((2, 2, 3)), "b_2": np.ones((2, 2)), "W_1": np.ones((2, 4, 5)), "b_1": np.ones((2, 4))}, "W_1"),
    ({"W_2": np.ones((2, 2, 3)), "b_2": np.ones((2, 2)), "b_1": np.ones((2, 3))}, "must have the shapes"),
    ({"W_2": np.full((2, 2, 3), np.inf), "b_2": np.ones((2, 2))}, "must be finite"),
])
def test_networks_whose_arrays_do_not_agree_are_refused(arrays: dict[str, np.ndarray], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        Networks(**arrays)


def test_what_does_not_fit_is_refused() -> None:
    inputs = drawn(2, 12, 2, (2, 1))
    taken, served = calibrated(inputs), identity(inputs)
    policy = kvzap(taken, served)
    with pytest.raises(SpecError, match="has no networks"):
        kvzap(replace(taken, networks=None), served)
    with pytest.raises(SpecError, match="was made for a different model"):
        kvzap(taken, replace(served, model="other"))
    with pytest.raises(SpecError, match=r"calibration\.networks = 1: must be 2"):
        replace(taken, networks=Networks(np.ones((1, 2, 3)), np.ones((1, 2))))
    given = observation(policy, inputs)
    for wrong, words in (
        (replace(given.layers[1], hidden=np.ones((12, 3))), "does not fit layer 1 of a model with 3 channels"),
        (replace(given.layers[1], hidden=None), "hidden = None: is needed"),
    ):
        with pytest.raises(SpecError, match=words):
            retain(policy, Budget(count=5), replace(given, layers={**given.layers, 1: wrong}))
    with pytest.raises(SpecError, match="does not fit layer 2"):
        retain(policy, Budget(count=5), replace(given, layers={0: given.layers[0], 2: given.layers[1]}))
    with pytest.raises(SpecError, match=r"the part /every=4: .*uses hidden states, .*leave the cadence out"):
        make_policy("kvzap/every=4", {"calibration": taken, "served": served})
    with pytest.raises(SpecError, match=r"the part /steps=knorm: .*needs scorers that use no hidden states"):
        make_policy("kvzap/every=4/steps=knorm", {"calibration": taken, "served": served})


@pytest.mark.spec("PO-RETAIN")
def test_hidden_states_that_are_not_declared_are_not_shown() -> None:
    inputs = drawn(2, 12, 1, (2, 1))
    given = observation(kvzap(calibrated(inputs), identity(inputs)), inputs)
    (shown,) = shown_to(Needs("all"), given).layers.values()
    with pytest.raises(SpecError, match=r"hidden = None: .*declare Needs\('all', ..., hidden=True\)"):
        np.asarray(shown.hidden)
    (shown,) = shown_to(Needs("all", hidden=True), given).layers.values()
    assert np.array_equal(np.asarray(shown.hidden), hidden_states(inputs.layers[0]))
