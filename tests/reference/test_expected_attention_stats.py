"""Expected Attention with calibrated statistics: kept sets, heads that are decided alone, refusals."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.methods import brutes
from conformance.methods.expected_attention_stats import gaussian
from conformance.oracles.choices import fits
from conformance.strategies.policy_inputs import altered, calibrated, decided, drawn, identity, with_sinks
from conformance.tolerances import scores_agree
from reference.calibration import load_calibration, save_calibration
from reference.policies import expected_attention_stats, retain_turn, triattention
from reference.policies.expected_attention import expected_weights, query_statistics, weights_from_statistics
from spec.budget import Budget
from spec.errors import SpecError
from spec.policy import Observation

pytestmark = [pytest.mark.usefixtures("reference_items"), pytest.mark.spec("PO-EXPECTED-ATTENTION-STATS")]

(BRUTE,) = (brute for brute in brutes() if brute.name == "expected-attention-stats")


@pytest.mark.parametrize("kind", ["normal", "axes", "equal"])
def test_kept_sets_are_those_of_the_brute_force(kind: str) -> None:
    for seed in range(8):
        inputs = drawn(seed, 3 + 5 * seed, 1 + seed % 2, (1 + seed % 2, 1 + seed // 2 % 2))
        inputs = with_sinks(altered(inputs, kind, seed), seed)
        B = BRUTE.floor + seed
        found, wanted = decided(BRUTE.policy(inputs), inputs, B), BRUTE.expected(inputs, B)
        if kind == "normal":  # equal scores tie up to rounding
            assert all(fits(*pair) for pair in zip(found, wanted, strict=True)), (seed, found, wanted)
        assert [len(own) for own in found] == [min(B, inputs.n)] * len(found)


@pytest.mark.spec("PO-EXPECTED-ATTENTION")
def test_both_forms_share_the_weights() -> None:
    """Check that Expected Attention equals the calibrated form for the statistics of the prompt's own queries."""
    (view,) = drawn(3, 14, 1, (2, 2)).layers
    at, ahead, inv_freq = np.zeros(14, np.int64), np.arange(14, 19), np.array([1.0, 0.25])  # position 0: no rotation
    mean, covariance = query_statistics(np.asarray(view.q))
    more = (ahead, inv_freq, 1.0, view.scaling)
    ours = weights_from_statistics(mean, covariance, view.k, view.v, *more)
    assert np.array_equal(ours, expected_weights(view.q, view.k, view.v, at, *more))
    wanted = gaussian(
        view.k.tolist(), np.asarray(view.v).tolist(), mean.tolist(), covariance.tolist(), 14, [1.0, 0.25], 1.0,
        view.scaling, 0, 5,
    )
    assert all(scores_agree(*pair) for pair in zip(ours, wanted, strict=True))


def test_a_head_that_is_decided_alone_has_its_own_statistics() -> None:
    """Check a later turn in which each KV head stores different tokens."""
    inputs = drawn(1, 20, 2, (2, 2))
    taken: Any = calibrated(inputs)
    policy = expected_attention_stats(taken, identity(inputs), 1, 5)
    live = [np.array([0, *range(1 + g, 20)]) for g in range(4)]
    views = [
        replace(view, q=view.q[g % 2 * 2 :][:2], k=view.k[g % 2 :][:1, own], v=np.asarray(view.v)[g % 2 :][:1, own])
        for g, own in enumerate(live) for view in (inputs.layers[g // 2],)
    ]
    sets = [Observation(20, 1, None, {g // 2: view}, first=g) for g, view in enumerate(views)]
    kept = retain_turn(policy, Budget(count=6), live, sets, 2)
    for g, (own, view) in enumerate(zip(live, views, strict=True)):
        heads, values = slice(g % 2 * 2, g % 2 * 2 + 2), np.asarray(view.v)
        (row,) = gaussian(
            view.k.tolist(), values.tolist(), taken.mean[g // 2, heads].tolist(),
            taken.covariance[g // 2, heads].tolist(), 20, inputs.inv_freq.tolist(), inputs.factor, view.scaling, 1, 5,
        )
        best = sorted(range(1, len(own)), key=lambda i: -float(row[i] or 0.0))[:5]
        assert kept.group(g).tolist() == sorted([0, *own[best].tolist()])


def test_a_file_brings_back_the_covariance(tmp_path: Path) -> None:
    taken = calibrated(drawn(4, 12, 2, (2, 2)))
    bare = replace(taken, magnitude=taken.magnitude[:, :, :0])
    for one in (taken, replace(taken, covariance=None), bare):
        save_calibration(one, tmp_path / "mine.npz")
        read = load_calibration(tmp_path / "mine.npz")
        assert read.digest == one.digest
        assert np.array_equal(read.covariance, one.covariance)  # type: ignore[arg-type]
    assert replace(taken, covariance=None).digest != taken.digest


INPUTS = drawn(5, 12, 2, (2, 2))
TAKEN = calibrated(INPUTS)
COVARIANCE: Any = TAKEN.covariance


def decide(calibration: Any, inputs: Any = INPUTS, **constants: int) -> object:
    return decided(expected_attention_stats(calibration, identity(INPUTS), **constants), inputs, 6)


@pytest.mark.parametrize(("act", "words"), [
    (lambda: decide(replace(TAKEN, covariance=None)), "has no covariance: `kvspec calibrate TEXT --covariance`"),
    (lambda: expected_attention_stats(TAKEN, replace(identity(INPUTS), model="other")), "a different model"),
    (lambda: decide(replace(TAKEN, layers=(0, 7))), "has no layer 1; run `kvspec calibrate`"),
    (lambda: decide(TAKEN, drawn(5, 12, 2, (3, 1))), r"does not fit keys with shape \(3, 12, 4\)"),
    (lambda: decide(TAKEN, N_sink=-1), "N_sink = -1: must be at least 0"),
    (lambda: decide(TAKEN, N_future=0), "N_future = 0: must be at least 1"),
    (lambda: replace(TAKEN, covariance=COVARIANCE[:, :, :3]), r"calibration.covariance = .*\(2, 4, 4, 4\)"),
    (lambda: replace(TAKEN, covariance=np.inf * COVARIANCE), r"calibration.covariance = .*must be finite"),
    (lambda: triattention(replace(TAKEN, magnitude=TAKEN.magnitude[:, :, :0]), identity(INPUTS)), "has no query stat"),
    (lambda: replace(TAKEN, magnitude=TAKEN.magnitude[:, :, :0], covariance=None), r"calibration.magnitude = "),
])
def test_calibrations_and_constants_that_do_not_fit_are_refused(act: Callable[[], object], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        act()
