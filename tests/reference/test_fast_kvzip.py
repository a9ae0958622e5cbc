"""Fast KVzip: scores of a gate from hidden states, as calibrations store the gates."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.methods.fast_kvzip import all_rows
from conformance.methods.kvzip import global_shares
from conformance.methods.policies import top
from conformance.strategies.policy_inputs import (
    calibrated,
    decided,
    drawn,
    gates_of,
    identity,
    observation,
)
from conformance.tolerances import scores_agree
from reference.calibration import Gates, load_calibration, save_calibration
from reference.policies import fast_kvzip, retain
from reference.policies.fast_kvzip import gate_score
from reference.policies.layers import decides_again, is_layerwise
from reference.policies.names import check_name, make_policy
from spec.budget import Budget
from spec.errors import SpecError

pytestmark = [pytest.mark.usefixtures("reference_items"), pytest.mark.spec("PO-FAST-KVZIP")]


def data(inputs: Any) -> dict[str, Any]:
    return {"calibration": calibrated(inputs), "served": identity(inputs)}


@pytest.mark.parametrize("heads", [(1, 1), (2, 1), (2, 2), (3, 2)])
def test_scores_are_those_of_the_brute_force(heads: tuple[int, int]) -> None:
    for seed in range(6):
        inputs = drawn(seed, 9 + seed, 2, heads)
        policy = fast_kvzip(calibrated(inputs), identity(inputs), 2, 3)
        values = policy.scorer(observation(policy, inputs), np.zeros(inputs.n, dtype=np.bool_)).values
        assert all(scores_agree(*pair) for pair in zip(values, all_rows(inputs, 5), strict=True))


def test_values_of_a_gate() -> None:
    """A gate of one channel has queries and keys 1 or -1, apart from the constant in the norm."""
    one, hidden = np.ones((1, 1, 1)), np.array([[2.0], [-2.0]])
    scores = gate_score(
        hidden, one, np.zeros((1, 1)), -one, np.ones(1), np.ones(1), np.array([[[1.0], [0.0]]]), np.array([0.5])
    )
    first, second = (1 / (1 + math.exp(base + 0.5) + math.exp(0.5)) for base in (1.0, -1.0))
    assert scores_agree(scores[0], [first, second], "float32")
    assert gate_score(
        np.zeros((0, 1)), one, np.zeros((1, 1)), one, np.ones(1), np.ones(1), one, np.zeros(1)
    ).shape == (1, 0)


def test_a_base_key_that_always_wins_gives_the_score_zero() -> None:
    one = np.ones((1, 1, 1))
    scores = gate_score(np.ones((2, 1)), one, np.zeros((1, 1)), one, np.ones(1), np.ones(1), 1e6 * one, np.zeros(1))
    assert scores.tolist() == [[0.0, 0.0]]


def test_all_heads_of_all_layers_share_one_budget() -> None:
    for seed in range(5):
        inputs = drawn(seed, 20, 2, (2, 2))
        rows = [[None if i < 2 or i >= 17 else x for i, x in enumerate(row)] for row in all_rows(inputs, 9)]
        shares = global_shares(rows, 9)
        found = decided(make_policy("fast-kvzip:N_sink=2:N_recent=3", data(inputs)), inputs, 9)
        assert found == [top(row, share) for row, share in zip(rows, shares, strict=True)]
        assert len(set(shares)) > 1


def test_parts_of_the_text_replace_the_shares_and_the_protection() -> None:
    inputs = drawn(4, 18, 2, (2, 1))
    found = decided(make_policy("score=fast-kvzip/recent=2", data(inputs)), inputs, 6)
    rows = [[None if i >= 16 else x for i, x in enumerate(row)] for row in all_rows(inputs, 6)]
    assert found == [top(row, 6) for row in rows]


def test_all_layers_decide_together_and_only_about_the_first_prompt() -> None:
    inputs = drawn(3, 12, 2, (2, 1))
    policy = fast_kvzip(calibrated(inputs), identity(inputs), 1, 2)
    assert not is_layerwise(policy)
    assert not decides_again(policy)
    assert check_name("FastKVzipPress") == "fast-kvzip"


def test_a_calibration_file_gives_back_every_bit(tmp_path: Path) -> None:
    inputs = drawn(1, 12, 2, (2, 1))
    taken = calibrated(inputs)
    save_calibration(taken, tmp_path / "own.npz")
    again = load_calibration(tmp_path / "own.npz")
    assert again.digest == taken.digest != replace(taken, gates=None).digest
    assert again.gates is not None
    assert again.networks is not None
    for name, x in gates_of(inputs).arrays.items():
        assert np.array_equal(again.gates.arrays[name], x)
    save_calibration(replace(taken, networks=None), tmp_path / "gates.npz")
    assert load_calibration(tmp_path / "gates.npz").networks is None


@pytest.mark.parametrize(("change", "words"), [
    ({"W_k": np.ones((2, 2, 4, 5))}, "must have the shapes"), ({"bias": np.ones((2, 3))}, "must have the shapes"),
    ({"base": np.ones((2, 2, 3, 5))}, "must have the shapes"), ({"norm_q": np.full((2, 4), np.nan)}, "must be finite"),
    ({"W_q": np.ones((2, 3, 4, 6)), "b_q": np.ones((2, 3, 4)), "bias": np.ones((2, 3))}, "a multiple of 2 query heads"),
])
def test_gates_whose_arrays_do_not_agree_are_refused(change: dict[str, Any], words: str) -> None:
    gates: dict[str, Any] = {
        "W_q": np.ones((2, 4, 4, 6)), "b_q": np.ones((2, 4, 4)), "W_k": np.ones((2, 2, 4, 6)),
        "norm_q": np.ones((2, 4)), "norm_k": np.ones((2, 4)), "base": np.ones((2, 2, 3, 4)), "bias": np.ones((2, 4)),
    }
    assert Gates(**gates).width == 6
    with pytest.raises(SpecError, match=words):
        Gates(**gates | change)


def test_what_does_not_fit_is_refused() -> None:
    inputs = drawn(2, 12, 2, (2, 1))
    taken, served = calibrated(inputs), identity(inputs)
    policy = fast_kvzip(taken, served, 1, 1)
    with pytest.raises(SpecError, match="has no gates"):
        fast_kvzip(replace(taken, gates=None), served)
    with pytest.raises(SpecError, match="was made for a different model"):
        fast_kvzip(taken, replace(served, model="other"))
    with pytest.raises(SpecError, match=r"calibration\.gates = 1: must be 2"):
        replace(taken, gates=Gates(**{name: x[:1] for name, x in gates_of(inputs).arrays.items()}))
    given = observation(policy, inputs)
    wrong = replace(given.layers[1], hidden=np.ones((12, 3)))
    with pytest.raises(SpecError, match="does not fit layer 1 of a model with 3 channels"):
        retain(policy, Budget(count=5), replace(given, layers={**given.layers, 1: wrong}))
    with pytest.raises(SpecError, match=r"the part /every=4: .*uses hidden states, .*leave the cadence out"):
        make_policy("fast-kvzip/layers=even/every=4", data(inputs))
