"""TriAttention: equations, modes, cadence and pinned prompt compared with brute force, and its calibration file."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.methods import policies as oracle
from conformance.methods import triattention as brute
from conformance.methods.brute import Brute
from conformance.methods.triattention import rows as tri_rows
from conformance.plugin import sparingly
from conformance.strategies.numbers import seeds
from conformance.strategies.policy_inputs import calibrated, decided, drawn, identity, observation
from conformance.tolerances import scores_agree
from lab.policy_cases import PROMPT, decoded, long, triattention
from reference import policies
from reference.calibration import Calibration, Identity, load_calibration, save_calibration
from reference.triattention import Mode, band_statistics, joined, z_scores
from spec.budget import Budget
from spec.errors import SpecError

pytestmark = pytest.mark.usefixtures("reference_items")

MODES: tuple[Mode, ...] = ("global", "head", "layer and head")


@pytest.mark.spec("TA-STATISTICS")
@given(seed=seeds)
def test_statistics_are_means_of_queries_and_of_their_bands(seed: int) -> None:
    q = drawn(seed).layers[0].q
    mean, magnitude = band_statistics(q)
    for head, actual, sizes in zip(q.tolist(), mean, magnitude, strict=True):
        want, want_sizes = brute.statistics(head)
        assert scores_agree(actual, want)
        assert scores_agree(sizes, want_sizes)
    half = mean.shape[1] // 2
    assert (np.hypot(mean[:, :half], mean[:, half:]) <= magnitude * (1 + 1e-12)).all()


@pytest.mark.spec("TA-STATISTICS")
def test_bands_pair_the_two_halves_of_a_head() -> None:
    """Check channels (3, 0, 4, 0): the first band is 3 + 4i, of size 5. Three bands have six channels."""
    for q, sizes in (([3.0, 0.0, 4.0, 0.0], [5.0, 0.0]), ([3.0, 0.0, 0.0, 4.0, 0.0, 1.0], [5.0, 0.0, 1.0])):
        assert band_statistics(np.array([[q]]))[1].tolist() == [sizes]


@pytest.mark.spec("TA-RANKING")
@given(seed=seeds, pinned=st.integers(0, 6))
def test_rows_are_z_scored_over_what_is_not_pinned(seed: int, pinned: int) -> None:
    X = np.random.default_rng(seed).standard_normal((3, 6))
    X[1] = 2.0
    actual = z_scores(X, np.arange(6) >= pinned)
    assert actual[1, pinned:].tolist() == [0.0] * (6 - pinned)
    for row, want in zip(actual, X.tolist(), strict=True):
        assert scores_agree(row, brute.z_score(want, [p < pinned for p in range(6)]))


@pytest.mark.spec("TA-RANKING")
def test_a_small_deviation_counts_as_a_millionth() -> None:
    """Rows that differ only by 1e-9 must stay near 0."""
    z = z_scores(np.array([[0.0, 1e-9]]), np.ones(2, dtype=np.bool_))
    assert z.tolist() == [[-5e-4, 5e-4]]


@pytest.mark.spec("TA-RANKING")
def test_three_modes_of_two_layers() -> None:
    """Check two layers of two KV heads with one token."""
    best = np.array([[[1.0], [4.0]], [[3.0], [0.5]]])
    assert [joined(best, mode).tolist() for mode in MODES] == [
        [[4.0]], [[2.0], [2.25], [2.0], [2.25]], [[1.0], [4.0], [3.0], [0.5]],
    ]


@pytest.mark.spec("TA-POLICY", "PO-STEP")
@pytest.mark.parametrize("mode", MODES)
@sparingly
@given(seed=seeds, B=st.integers(4, 8), slack=st.integers(1, 4), pinned=st.sampled_from([0, 2]))
def test_steps_fire_at_the_budget_and_the_slack(mode: Mode, seed: int, B: int, slack: int, pinned: int) -> None:
    """The policy must keep B when B + slack tokens are stored. t counts all tokens seen, including evicted ones."""
    inputs = long(seed)
    policy = triattention(inputs, mode, pinned, slack)
    groups = 1 if mode == "global" else len(inputs.layers) * inputs.H_kv
    live = [list(range(PROMPT))] * groups
    for seen, actual in enumerate(decoded(policy, inputs, B), PROMPT):
        live = live if seen == PROMPT else [[*row, seen - 1] for row in live]
        if seen == PROMPT or len(live[0]) >= B + slack:
            at = live
            rows = tri_rows(inputs, mode, lambda g, at=at: at[g % groups], seen, pinned)  # type: ignore[misc]
            live = [[row[i] for i in oracle.top(s, B)] for s, row in zip(rows, live, strict=True)]
        assert actual == live


@pytest.mark.spec("TA-POLICY")
def test_the_default_slack_is_128() -> None:
    inputs = drawn(1)
    cadence = policies.triattention(calibrated(inputs), identity(inputs)).cadence
    assert [cadence.due(999, B + more, B) for B in (1, 64) for more in (127, 128)] == [False, True, False, True]


@pytest.mark.spec("TA-POLICY")
def test_a_pinned_prompt_that_does_not_fit_is_an_error_that_says_so() -> None:
    inputs = drawn(2, n=12)
    policy = triattention(inputs, "global", pin_prompt=6)
    with pytest.raises(SpecError, match="exceeds the budget of 5 tokens") as caught:
        policies.retain(policy, Budget(count=5), observation(policy, inputs))
    assert (caught.value.argument, caught.value.value) == ("pin_prompt", 6)
    assert decided(policy, inputs, 6) == [list(range(6))]
    assert set(range(6)) < set(decided(policy, inputs, 9)[0])


@pytest.mark.spec("TA-POLICY")
def test_other_layers_or_heads_than_the_calibrations_are_refused() -> None:
    inputs, other = drawn(5, n=8, L=2, heads=(2, 2)), drawn(5, n=8, L=1, heads=(2, 2))
    three = drawn(5, n=8, L=2, heads=(3, 1))
    modes: tuple[Mode, Mode] = ("global", "layer and head")
    for shown, mode in zip((other, three), modes, strict=True):
        policy = triattention(inputs, mode)
        with pytest.raises(SpecError) as caught:
            policies.retain(policy, Budget(count=5), observation(policy, shown))
        assert caught.value.argument == "calibration"


@pytest.mark.spec("TA-POLICY")
@pytest.mark.parametrize("one", brute.BRUTES, ids=lambda one: one.name)
def test_a_prompt_on_top_of_the_budget_is_a_reading(one: Brute) -> None:
    """TensorRT-LLM keeps b tokens in addition to a prompt of p: p + b with the prompt pinned.

    kvspec keeps b tokens including the prompt.
    """
    inputs = drawn(5, n=12, L=2, heads=(2, 2))
    theirs, ours = (decided(one.policy(inputs, {"pin_prompt": 3}), inputs, B) for B in (7, 4))
    assert theirs == one.kept(inputs, 4, pin_prompt=3, prompt="on top")
    assert ours == one.kept(inputs, 4, pin_prompt=3)
    assert [(own[:3], len(own)) for own in theirs] == [([0, 1, 2], 7)] * len(theirs)


def a_calibration() -> Calibration:
    return calibrated(drawn(11, n=9, L=2, heads=(2, 2)))


@pytest.mark.spec("TA-CALIBRATION")
def test_a_file_brings_back_every_bit(tmp_path: Path) -> None:
    before = a_calibration()
    save_calibration(before, tmp_path / "mine.npz")
    after = load_calibration(tmp_path / "mine.npz")
    assert (after.layers, after.identity.model, after.identity.factor) == (
        before.layers, before.identity.model, before.identity.factor
    )
    for name in ("mean", "magnitude"):
        assert getattr(after, name).tobytes() == getattr(before, name).tobytes()
    assert after.identity.inv_freq.tobytes() == before.identity.inv_freq.tobytes()
    with np.load(tmp_path / "mine.npz") as archive:
        assert json.loads(str(archive["header"]))["format"] == "kvspec.triattention/3"


@pytest.mark.spec("TA-CALIBRATION")
def test_a_digest_is_of_the_statistics_alone() -> None:
    """Check 8 digits that are independent of the name. A different bit of any statistic changes them."""
    actual = a_calibration()
    plain = Identity("other", actual.identity.inv_freq)
    assert plain.rope == replace(plain, factor=1.0).rope
    renamed = replace(actual, identity=plain)
    assert re.fullmatch("[0-9a-f]{8}", actual.digest)
    assert renamed.digest == actual.digest
    for name in ("mean", "magnitude", "head_scores", "filters"):
        changed = replace(actual, **{name: np.nextafter(getattr(actual, name), np.inf)})
        assert changed.digest != actual.digest


@pytest.mark.spec("TA-CALIBRATION")
def test_another_models_calibration_is_refused_by_name() -> None:
    actual = a_calibration()
    here = Identity("llama@1", actual.identity.inv_freq, actual.identity.factor)
    with pytest.raises(SpecError, match=r"calibration = 'drawn': was made for a different model, not for 'llama@1'"):
        policies.triattention(actual, here)


@pytest.mark.spec("TA-CALIBRATION")
@pytest.mark.parametrize("change", ["frequency", "factor", "fewer"])
def test_another_rotation_is_refused_by_name(change: str) -> None:
    """Check the last bit of one frequency, the factor, and the number of frequencies."""
    mine = a_calibration().identity
    frequencies = mine.inv_freq.copy()
    if change == "frequency":
        frequencies[1] = np.nextafter(frequencies[1], 1.0)
    factor = mine.factor + (0.5 if change == "factor" else 0.0)
    here = Identity("drawn", frequencies[:1] if change == "fewer" else frequencies, factor)
    with pytest.raises(SpecError, match="different rotary frequencies") as caught:
        policies.triattention(a_calibration(), here)
    assert caught.value.argument == "calibration"


@pytest.mark.spec("TA-CALIBRATION")
@pytest.mark.parametrize("kind", ["text", "prose", "empty", "archive", "format", "frequencies", "scores"])
def test_a_file_that_is_no_calibration_is_refused(kind: str, tmp_path: Path) -> None:
    """Check that the error names the argument for each kind of file."""
    path = tmp_path / "mine.npz"
    save_calibration(a_calibration(), path)
    with np.load(path) as archive:
        parts = dict(archive)
    if kind in ("text", "prose", "empty"):
        path = path.with_suffix(".txt") if kind == "prose" else path
        path.write_text("{}" if kind == "text" else "Once upon a time" if kind == "prose" else "", encoding="ascii")
    else:
        if kind == "archive":
            del parts["mean"]
        if kind == "format":
            parts["header"] = np.array(str(parts["header"]).replace("triattention/3", "triattention/2"))
        if kind == "frequencies":
            parts["inv_freq"] = parts["inv_freq"] * 2
        if kind == "scores":
            parts["mean"][0, 0, -1] = np.nan
        np.savez(path, **parts)
    with pytest.raises(SpecError) as caught:
        load_calibration(path)
    assert caught.value.argument == ("calibration.mean" if kind == "scores" else "calibration")
    assert ("make it again with kvspec calibrate" in str(caught.value)) is (kind == "format")
    assert ("run `kvspec calibrate mine.txt --model NAME --out" in str(caught.value)) is (kind == "prose")


@pytest.mark.spec("TA-CALIBRATION")
def test_statistics_of_a_wrong_shape_are_refused() -> None:
    actual = a_calibration()
    with pytest.raises(SpecError, match=r"calibration\.magnitude"):
        Calibration(actual.identity, actual.layers, actual.mean, actual.magnitude[:, :1])
