"""Tests that the report of a rejected subject names the step that differs, and no step that does not differ."""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from conformance.checks.prefill_checks import AGREES, prefill_complaints
from conformance.methods.method import Method, method_of
from conformance.oracles.box import DOUBLE
from conformance.policy_suite import slips, test_method
from conformance.strategies.model_shapes import SHAPES
from conformance.strategies.policy_inputs import Inputs, Kept, altered, decided, drawn
from conformance.strategies.prompts import random_prompt
from conformance.suite import test_diversity
from reference.backend import BACKEND
from reference.crystalcache import prefill
from spec.parameters import TINY
from spec.policy import LayerView

pytestmark = [pytest.mark.law("the-proof-has-teeth"), pytest.mark.usefixtures("reference_items")]

Array = np.ndarray[Any, Any]
SNAPKV = Method("snapkv", {"W": 8, "kernel": 3})
TIED = (altered(drawn(0, 60, 1, (2, 2)), "axes", 0), 20)
"""Inputs in which equal keys have equal scores."""


def attention(view: LayerView, W: int, causal: bool) -> Array:
    """Return the attention weights of the last W queries, (H, W, n)."""
    n, group = view.k.shape[1], len(view.q) // len(view.k)
    logits = view.scaling * np.einsum("hqd,hkd->hqk", view.q[:, -W:], np.repeat(view.k, group, axis=0))
    if view.softcap is not None:
        logits = view.softcap * np.tanh(logits / view.softcap)
    if causal:
        logits = np.where(np.arange(n) <= np.arange(n - W, n)[:, None], logits, -np.inf)
    beside = np.full(len(view.q), -np.inf) if view.sinks is None else np.asarray(view.sinks)
    top = np.maximum(logits.max(axis=2), beside[:, None])[:, :, None]
    powers = np.exp(logits - top)
    actual: Array = powers / (powers.sum(axis=2, keepdims=True) + np.exp(beside[:, None, None] - top))
    return actual


def pooled(rows: Array, kernel: int, shift: int) -> Array:
    """Return the largest value of the tokens around each token, or around a neighbouring token."""
    half, n = kernel // 2, rows.shape[1]
    wide = np.pad(rows, ((0, 0), (half + 1, half + 1)), constant_values=-np.inf)
    actual: Array = np.stack([wide[:, 1 + shift + at : 1 + shift + at + n] for at in range(kernel)]).max(axis=0)
    return actual


def snapkv_set(row: Array, n: int, B: int, higher: bool) -> list[int]:
    """Return the window and the best scored tokens."""
    past = len(row)
    order = sorted(range(past), key=lambda i: (-row[i], -i if higher else i))
    return sorted([*order[: B - (n - past)], *range(past, n)])


def snapkv(
    inputs: Inputs, B: int, W: int = 8, kernel: int = 3, *, pool_first: bool = True, group: str = "mean",
    shift: int = 0, causal: bool = True, window_kept: bool = True, higher: bool = False,
) -> Kept:
    """Return the kept sets of SnapKV, with one step that can differ."""
    actual = Kept()
    for view in inputs.layers:
        n, heads = view.k.shape[1], len(view.k)
        sums = attention(view, W, causal).sum(axis=1)[:, : n - W if window_kept else n]
        rows = pooled(sums, kernel, shift) if pool_first else sums
        each = rows.reshape(heads, -1, rows.shape[1])
        one = {"mean": each.mean(axis=1), "maximum": each.max(axis=1), "first head": each[:, 0]}[group]
        one = one if pool_first else pooled(one, kernel, shift)
        actual += [snapkv_set(row, n, B, higher) for row in one]
    return actual


STEPS: Mapping[str, tuple[dict[str, Any], str]] = {
    "mean before the pool": ({"pool_first": False}, "order: the group, then pool instead of pool, then the group"),
    "maximum over a group": ({"group": "maximum"}, "group: maximum instead of mean"),
    "first head of a group": ({"group": "first head"}, "group: first head instead of mean"),
    "pool of the previous token": ({"shift": -1}, "pooled: around the previous token instead of around the token"),
    "pool of the next token": ({"shift": 1}, "pooled: around the next token instead of around the token"),
    "no causal mask": ({"causal": False}, "mask: none instead of causal"),
    "window scored": ({"window_kept": False}, "window: scored instead of kept"),
    "ties upwards": ({"higher": True}, "ties: higher instead of lower"),
}
CAPPED = (
    replace(drawn(8, 60, 1, (2, 2)), layers=[replace(x, softcap=2.0) for x in drawn(8, 60, 1, (2, 2)).layers]), 20,
)
SCALED = (
    replace(drawn(8, 60, 1, (2, 2)), layers=[replace(x, scaling=0.2) for x in drawn(8, 60, 1, (2, 2)).layers]), 20,
)


@pytest.fixture
def no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable explanations by documented values and readings, because they take seconds."""
    monkeypatch.setattr(slips, "explanations", lambda *given: [])


@pytest.mark.spec("PO-SNAPKV")
@pytest.mark.usefixtures("no_reading")
@pytest.mark.parametrize("step", STEPS)
def test_the_step_that_differs_is_named(step: str) -> None:
    given, words = STEPS[step]
    failing = TIED if step == "ties upwards" else None
    actual = slips.reasons(partial(snapkv, **given), SNAPKV, DOUBLE, failing)
    assert actual == [f"the step that differs: {words}"]
    inputs, B = TIED
    assert not test_method.difference(snapkv(inputs, B), SNAPKV.wanted(inputs, B))


@pytest.mark.spec("PO-SNAPKV")
@pytest.mark.usefixtures("no_reading")
@pytest.mark.parametrize(("failing", "seen", "message"), [
    (SCALED, {"scaling": 0.5}, "scaling: 1 / sqrt(width) instead of the layer's"),
    (CAPPED, {"softcap": None}, "softcap: none instead of the layer's"),
])
def test_an_error_in_what_a_method_is_shown_is_named(
    failing: tuple[Inputs, int], seen: dict[str, Any], message: str,
) -> None:
    def wrong(inputs: Inputs, B: int) -> Kept:
        return snapkv(replace(inputs, layers=[replace(view, **seen) for view in inputs.layers]), B)

    assert slips.reasons(wrong, SNAPKV, DOUBLE, failing) == [f"the step that differs: {message}"]


@pytest.mark.spec("PO-SNAPKV")
def test_an_error_that_no_known_one_explains_is_not_named() -> None:
    def newest(inputs: Inputs, B: int) -> Kept:
        return [list(range(max(0, inputs.n - B), inputs.n)) for _ in range(inputs.H_kv * len(inputs.layers))]

    assert slips.reasons(newest, SNAPKV) == []


@pytest.mark.spec("PO-SNAPKV")
@pytest.mark.usefixtures("no_reading")
def test_the_nearest_known_error_is_named_with_its_distance() -> None:
    """Check the first head of a group instead of the mean, with one token of the first set exchanged."""
    def wrong(inputs: Inputs, B: int) -> Kept:
        first, *others = snapkv(inputs, B, group="first head")
        return [[*first[1:], min({*range(inputs.n)} - {*first})], *others]

    (message,) = slips.reasons(wrong, SNAPKV)
    assert message.startswith("the nearest known error: group: first head instead of mean (")


@pytest.mark.spec("CC-PREFILL")
def test_crystalcache_by_name_passes_and_another_one_fails() -> None:
    method = method_of("crystalcache")
    inputs, B = method.adapted(SHAPES[2].inputs()), 400
    wanted = method.wanted(inputs, B)
    assert not test_method.difference(decided(method.reference(inputs), inputs, B), wanted)
    for constants in ({"s": 1.0}, {"M_max": 2.0}, {"T_max": 8}):
        other = decided(method.changed(**constants).reference(inputs), inputs, B)
        assert re.match(r"kept set 0 of 1 (has|keeps) ", test_method.difference(other, wanted))


def fused(q: Array, k: Array, ids: Array, ends: Any, held: Any, B: int, p: Any, *options: Any, **ignored: Any) -> Any:
    """Return the retention of the single stages, with other values of the arguments in `ignored`."""
    scaling, softcap, _, sinks = options
    given = {"scaling": scaling, "softcap": softcap, "sinks": sinks, **ignored}
    return prefill(q, k, ids, frozenset({*ids[ends].tolist(), 99}), B, p, BACKEND, **given)


@pytest.mark.spec("CC-PREFILL")
@pytest.mark.parametrize(("ignored", "words"), [
    ({"scaling": None}, f"{AGREES}; it is as if `prefill` ignored scaling"),
    ({"softcap": None}, f"{AGREES}; it is as if `prefill` ignored softcap"),
    ({"sinks": None}, f"{AGREES}; it is as if `prefill` ignored sinks"),
    ({"scaling": None, "sinks": None}, f"{AGREES}; it is as if `prefill` ignored scaling and sinks"),
    ({"scaling": 0.7}, AGREES), ({}, ""),
])
def test_a_fused_prefill_that_differs_from_the_stages_is_told(ignored: dict[str, Any], words: str) -> None:
    prompt = random_prompt(np.random.default_rng(3), TINY, 20)
    inputs = replace(prompt.inputs, scaling=1.0, softcap=2.0, sinks=np.array([1, 0, 3, -1], np.float32))
    prompt, backend = replace(prompt, inputs=inputs), replace(BACKEND, prefill=partial(fused, **ignored))
    result = prefill(**prompt.arguments, backend=backend)
    assert next(iter(prefill_complaints(result, prompt, backend, "float64")), "") == words


@pytest.mark.spec("CC-PREFILL")
def test_wrong_stages_are_not_told_as_a_wrong_prefill() -> None:
    """Check a result of wrong stages: with and without a fused function, the complaint is of the stage."""
    prompt = random_prompt(np.random.default_rng(3), TINY, 20)
    right = prefill(**prompt.arguments, backend=BACKEND)
    wrong = replace(right, scores=right.scores + 1)
    assert prefill_complaints(wrong, prompt, BACKEND, "float64")[0].startswith("S5: score of trunk")


@pytest.mark.spec("DV-GREEDY", "DV-COSINE")
def test_signatures_in_float32_are_not_told_as_another_order_of_channels() -> None:
    class Rounded(type(BACKEND.diversity)):  # type: ignore[misc]
        def diverse(self, s: Array, V: Array, *given: Any) -> Any:
            return super().diverse(s, V.astype(np.float32).astype(np.float64), *given)

    order = [1.0] * 24, [1 + 2.0**-52], [1.0] + [2.0**-53] * 23
    assert BACKEND.diversity is not None
    test_diversity.test_products_are_added_in_the_order_of_channels(BACKEND.diversity, 3, *order)
    with pytest.raises(AssertionError, match="rounded below float64, as in float32"):
        test_diversity.test_products_are_added_in_the_order_of_channels(Rounded(), 3, *order)
