"""Q-Filters: filters from queries, projections of keys, kept sets of heads that are decided alone, and refusals."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.methods.qfilters import main_direction
from conformance.strategies.policy_inputs import calibrated, decided, drawn, identity
from conformance.tolerances import scores_agree
from reference.calibration import load_calibration, save_calibration
from reference.policies import q_filters, retain_turn
from reference.policies.names import check_name
from reference.policies.qfilters import filter_score, query_filters
from spec.budget import Budget
from spec.errors import SpecError
from spec.policy import Observation

pytestmark = [pytest.mark.usefixtures("reference_items"), pytest.mark.spec("PO-Q-FILTERS")]


@pytest.mark.parametrize("seed", range(6))
def test_filters_are_the_main_directions_of_the_queries(seed: int) -> None:
    """Compare with power iteration. The queries have one direction that is clearly the longest, of either sign."""
    rng = np.random.default_rng(seed)
    G = 1 + seed % 3
    q = rng.normal(size=(2 * G, 30, 6)) + 3 * rng.normal(size=(2 * G, 1, 6))
    q[:, :, 1] += 20 * rng.normal(size=(2 * G, 30))  # the longest direction is not that of the mean
    found, wanted = query_filters(q, 2), np.array([main_direction(head.tolist()) for head in q])
    for row, own in zip(found, wanted.reshape(2, G, 6).mean(axis=1), strict=True):
        assert scores_agree(row, own)
    for sign in (1.0, -1.0):
        assert (np.einsum("hmd,hd->h", sign * q[::G], query_filters(sign * q[::G], 2)) > 0).all()


def test_a_projection_counts_length_and_sign() -> None:
    k = np.array([[[2.0, 0.0], [0.0, 1.0], [-3.0, 1.0]], [[2.0, 0.0], [0.0, 1.0], [-3.0, 1.0]]])
    assert filter_score(k, np.array([[1.0, 0.5], [-1.0, 0.0]])).tolist() == [[2.0, 0.5, -2.5], [-2.0, 0.0, 3.0]]


def test_a_head_that_is_decided_alone_has_its_own_filter() -> None:
    """Check a later turn in which each KV head stores different tokens."""
    inputs = drawn(1, 20, 2, (2, 1))
    policy, given = q_filters(calibrated(inputs), identity(inputs)), calibrated(inputs).filters
    assert given is not None
    live = [np.array([g, *range(3 + g, 20)]) for g in range(4)]
    views = [replace(inputs.layers[g // 2], k=inputs.layers[g // 2].k[g % 2 :][:1, own]) for g, own in enumerate(live)]
    sets = [Observation(20, 1, None, {g // 2: view}, first=g) for g, view in enumerate(views)]
    kept = retain_turn(policy, Budget(count=6), live, sets, 2)
    for g, own in enumerate(live):
        scores = views[g].k[0] @ given[g // 2, g % 2]
        assert kept.group(g).tolist() == sorted(own[np.argsort(-scores, kind="stable")[:6]].tolist())


def test_a_file_brings_back_the_filters(tmp_path: Path) -> None:
    inputs = drawn(4, 12, 2, (2, 2))
    taken = calibrated(inputs)
    for one in (taken, replace(taken, filters=None)):
        save_calibration(one, tmp_path / "mine.npz")
        read = load_calibration(tmp_path / "mine.npz")
        assert read.digest == one.digest
        assert (read.filters is None) == (one.filters is None)
    assert replace(taken, filters=None).digest != taken.digest
    save_calibration(taken, tmp_path / "mine.npz")
    policies = [q_filters(one, identity(inputs)) for one in (taken, load_calibration(tmp_path / "mine.npz"))]
    assert decided(policies[0], inputs, 5) == decided(policies[1], inputs, 5)


INPUTS = drawn(5, 8, 2, (2, 2))
TAKEN = calibrated(INPUTS)
FILTERS: Any = TAKEN.filters


def decide(calibration: Any, inputs: Any = INPUTS) -> object:
    return decided(q_filters(calibration, identity(INPUTS)), inputs, 4)


@pytest.mark.parametrize(("act", "words"), [
    (lambda: decide(replace(TAKEN, filters=None)), "has no filters: `kvspec calibrate` writes them"),
    (lambda: q_filters(TAKEN, replace(identity(INPUTS), model="other")), "was made for a different model"),
    (lambda: decide(replace(TAKEN, layers=(0, 7))), "has no filters for layer 1; run `kvspec calibrate`"),
    (lambda: decide(TAKEN, drawn(5, 8, 2, (3, 1))), r"does not fit keys with shape \(3, 8, 4\)"),
    (lambda: replace(TAKEN, filters=FILTERS[:1]), r"calibration.filters = .*must have the shape \(2, 2, 4\)"),
    (lambda: replace(TAKEN, filters=np.nan * FILTERS), r"calibration.filters = .*must be finite"),
])
def test_calibrations_that_do_not_fit_are_refused(act: Callable[[], object], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        act()


@pytest.mark.parametrize("name", ["q-filters", "QFilters", "QFilterPress", "Q-Filters", "qfilter"])
def test_names_of_the_method(name: str) -> None:
    assert check_name(name) == "q-filters"
