"""Policies with a calibration: files, refusals, and scores of Q-Filters, KVzap, Fast KVzip and Expected Attention."""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.methods.expected_attention_stats import gaussian, products_with
from conformance.methods.qfilters import main_direction
from conformance.strategies.policy_inputs import (
    Inputs,
    calibrated,
    decided,
    drawn,
    hidden_states,
    identity,
    networks_of,
    observation,
)
from conformance.tolerances import scores_agree
from reference.calibration import Calibration, Gates, Identity, Networks, load_calibration, save_calibration
from reference.policies import expected_attention_stats, kvzap, q_filters, retain, retain_turn
from reference.policies.expected_attention import expected_weights, query_statistics, weights_from_statistics
from reference.policies.fast_kvzip import gate_score
from reference.policies.kvzap import kvzap_score
from reference.policies.names import check_name, make_policy
from reference.policies.qfilters import filter_score, query_filters
from reference.policies.retain import shown_to
from spec.budget import Budget
from spec.errors import SpecError
from spec.policy import Needs, Observation, Policy

pytestmark = pytest.mark.usefixtures("reference_items")

EA, QF, KVZAP, FAST, HEADS, TA = (
    pytest.mark.spec("PO-EXPECTED-ATTENTION-STATS"), pytest.mark.spec("PO-Q-FILTERS"), pytest.mark.spec("PO-KVZAP"),
    pytest.mark.spec("PO-FAST-KVZIP"), pytest.mark.spec("PO-KVZIP-HEADS"), pytest.mark.spec("TA-CALIBRATION"),
)
INPUTS = drawn(5, 12, 2, (2, 2))
TAKEN: Any = calibrated(INPUTS)
FIELDS = ("covariance", "filters", "networks", "gates", "head_scores")
"""Parts that a calibration can lack."""
SMALL: Mapping[str, dict[str, Any]] = {
    "expected-attention-stats": {"N_sink": 1, "N_future": 5}, "q-filters": {}, "kvzap": {},
    "fast-kvzip": {"N_sink": 1, "N_recent": 1}, "kvzip-heads": {"N_sink": 1, "N_recent": 1}, "triattention": {},
}
MARKS = dict(zip(SMALL, (EA, QF, KVZAP, FAST, HEADS, TA), strict=True))


def policy_of(name: str, calibration: Any = TAKEN, **changed: Any) -> Policy:
    return make_policy(name, {"calibration": calibration, "served": identity(INPUTS), **SMALL[name], **changed})


def decide(name: str, calibration: Any = TAKEN, inputs: Inputs = INPUTS, **constants: Any) -> object:
    return decided(policy_of(name, calibration, **constants), inputs, 9)


def with_hidden(name: str, x: Any, at: int = 1) -> object:
    """Decide about a prompt whose second layer has these hidden states and this number."""
    policy = policy_of(name)
    given = observation(policy, INPUTS)
    second = given.layers[1] if x is ... else replace(given.layers[1], hidden=x)
    return retain(policy, Budget(count=9), replace(given, layers={0: given.layers[0], at: second}))


def contents(one: Calibration) -> tuple[object, ...]:
    """Return what a file must bring back. The digest is of all numbers."""
    served, lacks = one.identity, [name for name in FIELDS if getattr(one, name) is None]
    names = [] if one.networks is None else [*one.networks.arrays]
    return one.digest, one.layers, one.samples, served.model, served.factor, served.inv_freq.tobytes(), lacks, names


@pytest.mark.parametrize("n", [pytest.param(n, marks=[*MARKS.values()]) for n in (12, 13)])
def test_a_file_brings_back_every_bit(tmp_path: Path, n: int) -> None:
    """Check a calibration with all parts, and without each part. The networks are linear if n is even."""
    taken = calibrated(drawn(4, n, 2, (2, 2)))
    fewer = [replace(taken, **{name: None}) for name in FIELDS]  # type: ignore[arg-type]
    every = [taken, *fewer, replace(taken, magnitude=taken.magnitude[:, :, :0])]
    for one in (*every, replace(taken, samples=("a", "b"))):
        save_calibration(one, tmp_path / "mine.npz")
        assert contents(load_calibration(tmp_path / "mine.npz")) == contents(one)
    assert len({one.digest for one in every}) == len(every)
    with np.load(tmp_path / "mine.npz") as archive:
        assert json.loads(str(archive["header"]))["format"] == "kvspec.triattention/3"


@TA
def test_a_digest_is_of_the_statistics_alone() -> None:
    """Check the digest: 8 hex digits that do not depend on the name. A change of one bit in a statistic changes it."""
    plain = Identity("other", TAKEN.identity.inv_freq)
    assert plain.rope == replace(plain, factor=1.0).rope
    assert re.fullmatch("[0-9a-f]{8}", TAKEN.digest)
    assert replace(TAKEN, identity=plain).digest == TAKEN.digest
    for name in ("mean", "magnitude", "head_scores", "filters"):
        changed = replace(TAKEN, **{name: np.nextafter(getattr(TAKEN, name), np.inf)})
        assert changed.digest != TAKEN.digest


@pytest.mark.parametrize("name", [pytest.param(name, marks=mark) for name, mark in MARKS.items()])
def test_another_models_calibration_is_refused_by_name(name: str) -> None:
    here = Identity("llama@1", TAKEN.identity.inv_freq, TAKEN.identity.factor)
    with pytest.raises(SpecError, match=r"calibration = 'drawn': was made for a different model, not for 'llama@1'"):
        policy_of(name, served=here)


@TA
@pytest.mark.parametrize("change", ["frequency", "factor", "fewer"])
def test_another_rotation_is_refused_by_name(change: str) -> None:
    """Check the last bit of one frequency, the factor, and the number of frequencies."""
    frequencies = TAKEN.identity.inv_freq.copy()
    if change == "frequency":
        frequencies[1] = np.nextafter(frequencies[1], 1.0)
    factor = TAKEN.identity.factor + (0.5 if change == "factor" else 0.0)
    here = Identity("drawn", frequencies[:1] if change == "fewer" else frequencies, factor)
    with pytest.raises(SpecError, match="different rotary frequencies") as caught:
        policy_of("triattention", served=here)
    assert caught.value.argument == "calibration"


@TA
@pytest.mark.parametrize("kind", ["text", "prose", "empty", "archive", "format", "frequencies", "scores"])
def test_a_file_that_is_no_calibration_is_refused(kind: str, tmp_path: Path) -> None:
    """Check that the error names the argument for each kind of file."""
    path = tmp_path / "mine.npz"
    save_calibration(TAKEN, path)
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


def refused(mark: pytest.MarkDecorator, act: Callable[[], object], words: str) -> Any:
    return pytest.param(act, words, marks=mark)


OTHER_HEADS, NO_NORMS = drawn(5, 12, 2, (3, 1)), TAKEN.magnitude[:, :, :0]
FIRST_LAYERS = replace(TAKEN, layers=(0, 7))
ONE_NETWORK, ONE_GATE = (
    kind(**{name: x[:1] for name, x in part.arrays.items()})
    for kind, part in ((Networks, TAKEN.networks), (Gates, TAKEN.gates))
)
GATES: dict[str, Any] = {
    "W_q": np.ones((2, 4, 4, 6)), "b_q": np.ones((2, 4, 4)), "W_k": np.ones((2, 2, 4, 6)), "norm_q": np.ones((2, 4)),
    "norm_k": np.ones((2, 4)), "base": np.ones((2, 2, 3, 4)), "bias": np.ones((2, 4)),
}
NETWORKS: dict[str, Any] = {"W_2": np.ones((2, 2, 3)), "b_2": np.ones((2, 2))}
THREE_HEADS = {"W_q": np.ones((2, 3, 4, 6)), "b_q": np.ones((2, 3, 4)), "bias": np.ones((2, 3))}


@pytest.mark.parametrize(("act", "words"), [
    refused(EA, lambda: decide("expected-attention-stats", replace(TAKEN, covariance=None)),
            "has no covariance: `kvspec calibrate TEXT --covariance`"),
    refused(EA, lambda: decide("expected-attention-stats", FIRST_LAYERS), "has no layer 1; run `kvspec calibrate`"),
    refused(EA, lambda: decide("expected-attention-stats", TAKEN, OTHER_HEADS), r"does not fit .* shape \(3, 12, 4\)"),
    refused(EA, lambda: decide("expected-attention-stats", N_sink=-1), "N_sink = -1: must be at least 0"),
    refused(EA, lambda: decide("expected-attention-stats", N_future=0), "N_future = 0: must be at least 1"),
    refused(EA, lambda: replace(TAKEN, covariance=TAKEN.covariance[:, :, :3]), r"n.covariance = .*\(2, 4, 4, 4\)"),
    refused(EA, lambda: replace(TAKEN, covariance=np.inf * TAKEN.covariance), r"n.covariance = .*must be finite"),
    refused(TA, lambda: decide("triattention", replace(TAKEN, magnitude=NO_NORMS)), "has no query stat"),
    refused(TA, lambda: replace(TAKEN, magnitude=NO_NORMS, covariance=None), r"calibration.magnitude = "),
    refused(TA, lambda: replace(TAKEN, magnitude=TAKEN.magnitude[:, :1]), r"calibration\.magnitude"),
    refused(QF, lambda: decide("q-filters", replace(TAKEN, filters=None)), "has no filters: `kvspec calibrate` writes"),
    refused(QF, lambda: decide("q-filters", FIRST_LAYERS), "has no filters for layer 1; run `kvspec calibrate`"),
    refused(QF, lambda: decide("q-filters", TAKEN, OTHER_HEADS), r"does not fit keys with shape \(3, 12, 4\)"),
    refused(QF, lambda: replace(TAKEN, filters=TAKEN.filters[:1]), r"n.filters = .*must have the shape \(2, 2, 4\)"),
    refused(QF, lambda: replace(TAKEN, filters=np.nan * TAKEN.filters), r"calibration.filters = .*must be finite"),
    refused(HEADS, lambda: decide("kvzip-heads", replace(TAKEN, head_scores=None)), "has no head scores"),
    refused(HEADS, lambda: replace(TAKEN, head_scores=np.ones((3, 2))), r"calibration\.head_scores"),
    refused(HEADS, lambda: replace(TAKEN, head_scores=np.nan * TAKEN.head_scores), r"calibration\.head_scores"),
    refused(HEADS, lambda: decide("kvzip-heads", N_sink=-1), "sink = -1"),
    refused(KVZAP, lambda: decide("kvzap", replace(TAKEN, networks=None)), "has no networks"),
    refused(KVZAP, lambda: replace(TAKEN, networks=ONE_NETWORK), r"calibration\.networks = 1: must be 2"),
    refused(KVZAP, lambda: with_hidden("kvzap", np.ones((12, 3))), "does not fit layer 1 of a model with 3 channels"),
    refused(KVZAP, lambda: with_hidden("kvzap", None), "hidden = None: is needed"),
    refused(KVZAP, lambda: with_hidden("kvzap", ..., 2), "does not fit layer 2"),
    refused(KVZAP, lambda: Networks(**NETWORKS | {"b_2": np.ones((2, 3))}), "must have the shapes"),
    refused(KVZAP, lambda: Networks(**NETWORKS, W_1=np.ones((2, 4, 5)), b_1=np.ones((2, 4))), "W_1"),
    refused(KVZAP, lambda: Networks(**NETWORKS, b_1=np.ones((2, 3))), "must have the shapes"),
    refused(KVZAP, lambda: Networks(**NETWORKS | {"W_2": np.full((2, 2, 3), np.inf)}), "must be finite"),
    refused(FAST, lambda: decide("fast-kvzip", replace(TAKEN, gates=None)), "has no gates"),
    refused(FAST, lambda: replace(TAKEN, gates=ONE_GATE), r"calibration\.gates = 1: must be 2"),
    refused(FAST, lambda: with_hidden("fast-kvzip", np.ones((12, 3))), "layer 1 of a model with 3 channels"),
    refused(FAST, lambda: Gates(**GATES | {"W_k": np.ones((2, 2, 4, 5))}), "must have the shapes"),
    refused(FAST, lambda: Gates(**GATES | {"bias": np.ones((2, 3))}), "must have the shapes"),
    refused(FAST, lambda: Gates(**GATES | {"base": np.ones((2, 2, 3, 5))}), "must have the shapes"),
    refused(FAST, lambda: Gates(**GATES | {"norm_q": np.full((2, 4), np.nan)}), "must be finite"),
    refused(FAST, lambda: Gates(**GATES | THREE_HEADS), "a multiple of 2 query heads"),
])
def test_what_does_not_fit_is_refused(act: Callable[[], object], words: str) -> None:
    assert Gates(**GATES).width == 6
    with pytest.raises(SpecError, match=words):
        act()


@pytest.mark.spec("PO-EXPECTED-ATTENTION")
@EA
def test_both_forms_share_the_weights() -> None:
    """Check that Expected Attention equals the calibrated form for the statistics of the prompt's own queries."""
    (view,) = drawn(3, 14, 1, (2, 2)).layers
    at, ahead, inv_freq = np.zeros(14, np.int64), np.arange(14, 19), np.array([1.0, 0.25])  # position 0: no rotation
    mean, covariance = query_statistics(np.asarray(view.q))
    more = (ahead, inv_freq, 1.0, view.scaling)
    ours = weights_from_statistics(mean, covariance, view.k, view.v, *more)
    assert np.array_equal(ours, expected_weights(view.q, view.k, view.v, at, *more))
    wanted = gaussian(
        view.k.tolist(), np.asarray(view.v).tolist(), mean.tolist(), [*map(products_with, covariance.tolist())], 14,
        [1.0, 0.25], 1.0, view.scaling, 0, 5,
    )
    assert all(scores_agree(*pair) for pair in zip(ours, wanted, strict=True))


@EA
def test_a_head_that_is_decided_alone_has_its_own_statistics() -> None:
    """Check a later turn in which each KV head stores different tokens."""
    inputs = drawn(1, 20, 2, (2, 2))
    taken: Any = calibrated(inputs)
    policy = expected_attention_stats(taken, identity(inputs), 1, 5)
    live = [np.array([0, *range(1 + g, 20)]) for g in range(4)]
    views = [
        replace(view, q=view.q[g % 2 * 2 :][:2], k=view.k[g % 2 :][:1, group], v=np.asarray(view.v)[g % 2 :][:1, group])
        for g, group in enumerate(live) for view in (inputs.layers[g // 2],)
    ]
    sets = [Observation(20, 1, None, {g // 2: view}, first=g) for g, view in enumerate(views)]
    kept = retain_turn(policy, Budget(count=6), live, sets, 2)
    for g, (group, view) in enumerate(zip(live, views, strict=True)):
        heads, values = slice(g % 2 * 2, g % 2 * 2 + 2), np.asarray(view.v)
        (row,) = gaussian(
            view.k.tolist(), values.tolist(), taken.mean[g // 2, heads].tolist(),
            [*map(products_with, taken.covariance[g // 2, heads].tolist())], 20, inputs.inv_freq.tolist(),
            inputs.factor, view.scaling, 1, 5,
        )
        best = sorted(range(1, len(group)), key=lambda i: -float(row[i] or 0.0))[:5]
        assert kept.group(g).tolist() == sorted([0, *group[best].tolist()])


@QF
@pytest.mark.parametrize("seed", range(6))
def test_filters_are_the_main_directions_of_the_queries(seed: int) -> None:
    """Compare with power iteration. The queries have one direction that is clearly the longest, of either sign."""
    rng = np.random.default_rng(seed)
    G = 1 + seed % 3
    q = rng.normal(size=(2 * G, 30, 6)) + 3 * rng.normal(size=(2 * G, 1, 6))
    q[:, :, 1] += 20 * rng.normal(size=(2 * G, 30))  # the longest direction is not that of the mean
    actual, wanted = query_filters(q, 2), np.array([main_direction(head.tolist()) for head in q])
    for row, filter_row in zip(actual, wanted.reshape(2, G, 6).mean(axis=1), strict=True):
        assert scores_agree(row, filter_row)
    for sign in (1.0, -1.0):
        assert (np.einsum("hmd,hd->h", sign * q[::G], query_filters(sign * q[::G], 2)) > 0).all()


@QF
def test_a_projection_counts_length_and_sign() -> None:
    k = np.array([[[2.0, 0.0], [0.0, 1.0], [-3.0, 1.0]], [[2.0, 0.0], [0.0, 1.0], [-3.0, 1.0]]])
    assert filter_score(k, np.array([[1.0, 0.5], [-1.0, 0.0]])).tolist() == [[2.0, 0.5, -2.5], [-2.0, 0.0, 3.0]]


@QF
def test_a_head_that_is_decided_alone_has_its_own_filter() -> None:
    """Check a later turn in which each KV head stores different tokens."""
    inputs = drawn(1, 20, 2, (2, 1))
    policy, given = q_filters(calibrated(inputs), identity(inputs)), calibrated(inputs).filters
    assert given is not None
    live = [np.array([g, *range(3 + g, 20)]) for g in range(4)]
    views = [
        replace(inputs.layers[g // 2], k=inputs.layers[g // 2].k[g % 2 :][:1, group]) for g, group in enumerate(live)
    ]
    sets = [Observation(20, 1, None, {g // 2: view}, first=g) for g, view in enumerate(views)]
    kept = retain_turn(policy, Budget(count=6), live, sets, 2)
    for g, group in enumerate(live):
        scores = views[g].k[0] @ given[g // 2, g % 2]
        assert kept.group(g).tolist() == sorted(group[np.argsort(-scores, kind="stable")[:6]].tolist())


@pytest.mark.parametrize(("name", "method"), [
    *(pytest.param(name, "q-filters", marks=QF) for name in ("QFilters", "QFilterPress", "Q-Filters", "qfilter")),
    pytest.param("FastKVzipPress", "fast-kvzip", marks=FAST),
])
def test_names_of_a_method(name: str, method: str) -> None:
    assert check_name(name) == check_name(method) == method


@KVZAP
def test_values_of_the_network() -> None:
    scores = kvzap_score(
        np.array([[2.0], [-2.0], [0.0]]), np.array([[1.0, 3.0]]), np.array([-4.0]), np.array([[1.0], [0.0]]),
        np.array([0.0, 1.0]),
    )
    half = 3 * 0.8413447460685429 - 4  # 3 GELU(1) - 4
    assert scores_agree(scores[0], [2 * 0.9772498680518208 + half, -2 * 0.0227501319481792 + half, half])
    assert kvzap_score(np.zeros((0, 1)), np.ones((2, 1)), np.zeros(2)).shape == (2, 0)


@KVZAP
def test_a_first_layer_alone_keeps_the_same_tokens() -> None:
    inputs = drawn(3, 12, 2, (2, 1))
    first = replace(inputs, layers=inputs.layers[:1])
    of_first = Networks(**{name: x[:1] for name, x in networks_of(inputs).arrays.items()})
    alone = kvzap(calibrated(replace(first, networks=of_first)), identity(inputs))
    assert decided(alone, first, 5) == decided(kvzap(calibrated(inputs), identity(inputs)), inputs, 5)[:2]


@KVZAP
@pytest.mark.spec("PO-RETAIN")
def test_hidden_states_that_are_not_declared_are_not_shown() -> None:
    inputs = drawn(2, 12, 1, (2, 1))
    given = observation(kvzap(calibrated(inputs), identity(inputs)), inputs)
    (shown,) = shown_to(Needs("all"), given).layers.values()
    with pytest.raises(SpecError, match=r"hidden = None: .*declare Needs\('all', ..., hidden=True\)"):
        np.asarray(shown.hidden)
    (shown,) = shown_to(Needs("all", hidden=True), given).layers.values()
    assert np.array_equal(np.asarray(shown.hidden), hidden_states(inputs.layers[0]))


@FAST
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


@FAST
def test_a_base_key_that_always_wins_gives_the_score_zero() -> None:
    one = np.ones((1, 1, 1))
    scores = gate_score(np.ones((2, 1)), one, np.zeros((1, 1)), one, np.ones(1), np.ones(1), 1e6 * one, np.zeros(1))
    assert scores.tolist() == [[0.0, 0.0]]
