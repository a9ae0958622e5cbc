"""Published methods by name: sets that their equations admit, wrong readings, and arguments of `--as`."""

import inspect
import json
import random
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis.errors import UnsatisfiedAssumption

from conformance.checks.failing_input import code_of
from conformance.engine.methods import DECODED, FAMILY, method_ops
from conformance.engine.process import Engine, hello_of, outcome
from conformance.engine.serve import answer
from conformance.methods import brutes
from conformance.methods.method import METHODS, Method, asked, method_of, on_backend, rounded, span_of
from conformance.oracles.box import DOUBLE, SINGLE, Box, Undecided, rounding
from conformance.oracles.boxes import dot, fsum, largest, least, leaves
from conformance.oracles.choices import fits, ordered, places, surely
from conformance.paths import SPEC
from conformance.policy_suite import test_method
from conformance.policy_suite.explanations import explanations
from conformance.strategies.policy_inputs import (
    Inputs,
    Kept,
    decided,
    drawn,
    in_chunks,
    model_constants,
    named,
    with_sinks,
    without_sinks,
)
from reference.policies import policy_from_score
from reference.policies.names import POLICIES
from reference.policies.protections import SinkAndRecent
from spec.backend import resolve
from spec.errors import SpecError
from spec.policy import Cadence, Needs, Observation, Policy, Rehearsal

BARE = replace(resolve("numpy"), name="bare", policies=None, scores={})
MEASURED = ("snapkv", "h2o", "keydiff", "adakv", "rkv", "chunkkv", "kvzip")
PROTOCOL = (SPEC / "protocol.md").read_text(encoding="utf-8")


def subject(make: Callable[[Inputs], Policy]) -> Any:
    return lambda method, inputs, B: decided(make(inputs), inputs, B)


def on_random_inputs(method: Method, keeps: Any) -> None:
    """Run the property without explanations of failures, which take half a minute."""
    test_method.test_the_kept_sets_are_those_of_the_method(method, keeps, "float64", {str(method): []}, set())


def on_fixed_inputs(method: Method, keeps: Any, scored: set[str] | None = None) -> int:
    """Run the property on its fixed inputs alone, and return the number of inputs that the property accepts.

    If rounding decides the kept sets, the property rejects the input.
    """
    accepted = 0
    on_input = test_method.test_the_kept_sets_are_those_of_the_method.hypothesis.inner_test  # type: ignore[attr-defined]
    for draw in test_method.SMALL:
        with suppress(UnsatisfiedAssumption):
            on_input(method, keeps, "float64", {str(method): []}, set() if scored is None else scored, draw)
            accepted += 1
    return accepted


def swapped(kept: Kept, n: int, rng: random.Random) -> Kept | None:
    """Replace one token of one kept set by a different token."""
    g = rng.randrange(len(kept))
    out = sorted({*range(n)} - {*kept[g]})
    if not out or not kept[g]:
        return None
    return [*kept[:g], sorted({*kept[g]} - {rng.choice(kept[g])} | {rng.choice(out)}), *kept[g + 1 :]]


@pytest.mark.parametrize("unit", [DOUBLE, SINGLE])
@pytest.mark.parametrize("name", MEASURED)
def test_an_answer_is_admitted_and_with_one_token_swapped_refused(name: str, unit: float) -> None:
    """Check 24 inputs with the small constants."""
    brute, rng, swaps, admitted, undecided = METHODS[name], random.Random(name), 0, 0, 0
    for seed in range(24):
        inputs = rounded(drawn(seed, 8 + seed % 12 + brute.floor, 1 + seed % 2, (1 + seed % 2, 2)))
        B = max(1, brute.floor) + seed % 7
        kept = decided(brute.policy(inputs), inputs, B)
        try:
            with rounding(unit):
                wanted = brute.expected(inputs, B)
        except Undecided:
            undecided += 1
            continue
        assert all(map(fits, kept, wanted))
        other = swapped(kept, inputs.n, rng)
        swaps += other is not None
        admitted += other is not None and all(map(fits, other, wanted))
    assert (undecided, admitted) == (0, 0)
    assert swaps > 18


def key_norms(observation: Observation, sign: float = -1.0) -> Any:
    return np.concatenate([sign * np.linalg.norm(view.k, axis=2) for view in observation.layers.values()])


KNORM = policy_from_score(key_norms, needs=Needs("all"))
LOUD = policy_from_score(partial(key_norms, sign=1.0), needs=Needs("all"), protection=SinkAndRecent(0, 32))


@pytest.mark.spec("PO-KNORM", "PO-SNAPKV")
def test_a_right_score_passes_and_a_snapkv_of_key_norms_does_not() -> None:
    on_random_inputs(Method("knorm"), subject(lambda inputs: KNORM))
    refused = "not snapkv(W=32, kernel=7) with 36 tokens, capped logits, B = 34"
    with pytest.raises(AssertionError, match=re.escape(refused)) as refusal:
        on_fixed_inputs(Method("snapkv"), subject(lambda inputs: LOUD))
    again: dict[str, Any] = {}
    exec(code_of(refusal.value), again)
    assert (again["inputs"].n, again["B"]) == (36, 34)
    sentences = test_method.difference([[0], [1]], [[0]]), test_method.difference([[0, 0]], [[0]])
    assert sentences == (
        "it has 2 kept sets, and must have 1", "kept set 0 of 1 is [0, 0], and must have each position once",
    )
    sets = [[0], [1], [2], [3]]
    assert test_method.difference(sets, [*sets[:3], [4]], 2) == (
        "kept set 3 of 4 (layer 1, KV head 1) keeps [3] in place of [4]"
    )
    assert test_method.difference([[0]], [[0, 5]]) == (
        f"kept set 0 of 1 has 1 token, and must have 2: it lacks [5]; {test_method.ONLY_SIZES}"
    )
    assert test_method.difference([[0, 5], [3]], [[0], [4]], 2) == (
        "kept set 0 of 2 (layer 0) has 2 tokens, and must have 1: it also keeps [5]"
    )
    assert test_method.difference(sets, [[0], [2], *sets[2:]], 4) == (
        "kept set 1 of 4 (layer 1) keeps [1] in place of [2]"
    )


@pytest.mark.spec("PO-SNAPKV")
def test_budgets_that_differ_by_layer_are_told_before_the_tokens() -> None:
    """Check SnapKV with the layer budgets of PyramidKV: the scores are right, so only the sizes differ."""
    def pyramid(method: Method, inputs: Inputs, B: int) -> Kept:
        return decided(Method("snapkv/layers=pyramid").reference(inputs), inputs, B)

    method, inputs = Method("snapkv"), rounded(drawn(1, 60, 2, (2, 1)))
    words = r"kept set 0 of 4 \(layer 0, KV head 0\) has (\d+) tokens, and must have 40: it also keeps .*; all differ"
    with pytest.raises(AssertionError, match=words):
        test_method.compared(method, pyramid, (inputs, 40), DOUBLE, {str(method): []}, set(), "60 tokens")


def halved_keys(observation: Observation) -> Any:
    """Return the right scores, and halve the keys of the caller."""
    result = key_norms(observation)
    for view in observation.layers.values():
        view.k[...] *= 0.5
    return result


@pytest.mark.spec("PO-KNORM")
def test_a_policy_that_changes_the_keys_of_the_caller_is_refused() -> None:
    halved = policy_from_score(halved_keys, needs=Needs("all"))
    with pytest.raises(AssertionError, match="the subject changed k of layer 0 in place"):
        on_fixed_inputs(Method("knorm"), subject(lambda inputs: halved))


@pytest.mark.spec("PO-H2O", "PO-STEP")
@pytest.mark.parametrize(("first", "words"), [
    (0, "after the prompt, kept set 0 of 2"), (2, "after decode step 2 of 3, kept set 0 of 2"),
])
def test_a_difference_names_the_first_decode_step(first: int, words: str) -> None:
    """Check a policy that is wrong from decode step `first` on: it then keeps the newest tokens."""
    method, inputs = Method("h2o"), replace(rounded(drawn(1, 12, 1, (2, 1))), steps=3)

    def late(_: Method, seen: Inputs, B: int) -> Kept:
        right = decided(method.reference(seen), seen, B)
        return right if seen.steps < first else [list(range(seen.n - B, seen.n)) for _ in right]

    with pytest.raises(AssertionError, match=re.escape(f"not h2o with 12 tokens: {words} (layer 0, KV head 0) keeps")):
        test_method.compared(method, late, (inputs, 5), DOUBLE, {"h2o": []}, set(), "12 tokens")


def test_the_first_inputs_tell_a_policy_without_sinks() -> None:
    """Check that the first inputs, which every run has, detect a policy without sinks."""
    def without(method: Method, inputs: Inputs, B: int) -> Kept:
        return decided(named("snapkv", inputs), without_sinks(inputs), B)

    with pytest.raises(AssertionError, match="attention sinks"):
        on_fixed_inputs(Method("snapkv"), without)


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("snapkv", {"kernel": 5}, "snapkv(W=8, kernel=5)"), ("snapkv", {"W": 16}, "snapkv(W=16, kernel=7)"),
    ("rkv", {"lam": 0.5}, "rkv(W=8, kernel=7, lam=0.5)"),
    ("streamingllm", {"N_sink": 1}, "streamingllm(N_sink=1)"), ("morphkv", {"fusion": "max"}, 'fusion="max"'),
    ("chunkkv", {"c": 20}, "c=20"), ("pyramidkv", {"beta": 10}, "beta=10"),
]


@pytest.mark.parametrize(("name", "constants", "message"), WRONG)
def test_another_constant_fails_and_is_named(name: str, constants: dict[str, Any], message: str) -> None:
    """Check wrong constants, with short windows, because windows of 32 queries take seconds."""
    method = Method(name, {"W": 8} if "W" in Method(name).constants else {})
    other = method.changed(**constants)
    actual = explanations(lambda inputs, B: decided(other.reference(inputs), inputs, B), method)
    assert any(message in one for one in actual), actual


@pytest.mark.parametrize("brute", brutes(), ids=lambda one: one.name)
def test_every_method_can_be_named_and_its_equation_evaluated(brute: Any) -> None:
    method = method_of(str(Method(brute.name)))
    assert method.constants == Method(brute.name).constants
    inputs = rounded(drawn(3, span_of(method) + 9, 1, (1, 1)))
    B = method.floor(inputs) + 2
    assert all(map(fits, decided(named(brute.name, inputs), inputs, B), method.wanted(inputs, B)))


def test_a_process_and_a_backend_are_judged_as_a_policy_is() -> None:
    engine = Engine(shlex.join([sys.executable, "-m", "conformance.engine.serve", "numpy"]), 60.0)
    try:
        inputs, B, scored = with_sinks(rounded(drawn(1, 70, 1, (2, 1))), 0), 66, set[str]()
        for op in method_ops():
            method = Method(op.partition(".")[2])
            each = replace(inputs, steps=3 * (method.name in DECODED))
            if "chunk" in method.constants:
                each = in_chunks(each, Rehearsal(**{**method.constants, "chunk": 30}))
            wanted = method.wanted(each, max(B, method.floor(each)))
            for kept in (partial(asked, engine), partial(on_backend, "numpy")):
                actual = kept(method, each, max(B, method.floor(each)))
                assert not test_method.difference(actual, wanted), op
                assert not test_method.other_score(method, actual, wanted, scored), op
        unscored = re.search(r"more or less than one score: (.*?)\.\n", PROTOCOL, re.DOTALL)
        assert unscored is not None
        assert len(scored) == len(method_ops()) - len(DECODED) - len(re.findall(r"`[\w-]+`", unscored[1]))
        engine.hello = replace(engine.hello, families={FAMILY: ["h2o"]})
        with pytest.raises(SpecError, match="as = 'kvzip': is not offered by the engine numpy; the engine offers h2o"):
            asked(engine, Method("kvzip"), inputs, B)
        with pytest.raises(SpecError, match=re.escape("as = 'knorm': is not offered by backend") + ".* nestedkv, "):
            on_backend(f"{__name__}:BARE", Method("knorm"), inputs, B)
    finally:
        engine.stop()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("snapkw", "as = 'snapkw'"), ("fullcache", "is not a method that kvspec can compare"),
        ("snapkv(W=16", "must be a method, such as"),
        ("snapkv(w=16)", "not a constant or reading of snapkv; choose one of W, kernel, pooling, sinks, softmax, ties"),
        ('snapkv(pooling="min")', "must be one of max, average"), ('adakv(safeguard="x")', "must be a fraction"),
    ],
)
def test_what_is_no_method_is_refused(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        method_of(text)


def test_boxes_hold_what_rounding_makes_of_an_expression() -> None:
    with rounding(DOUBLE):
        a, b, c = leaves(np.array([0.1, 0.2, 0.3]))
        assert a + b > 0.3 - 1e-12
        assert not a - a
        assert a / a == 1.0
        with pytest.raises(Undecided):
            assert a + b < c
        with pytest.raises(Undecided):
            a / (a + b - c)
        assert largest([a, b, c]) is c
        assert least([a, b, c]) is a
        assert isinstance(largest([a + b, c]), Box)
        assert places([c, b, a, b]) == [(0, 0), (1, 1), (3, 3), (2, 2)]
        assert places([a + b, c]) == [(0, 1), (0, 1)]
        assert [x.lo <= y <= x.hi for x, y in zip(ordered([a, c, b]), (0.3, 0.2, 0.1), strict=True)] == [True] * 3
        total = fsum([a] * 10)
        assert total.lo < sum([0.1] * 10) < total.hi
        assert dot([a, b], [b, c]).lo < 0.1 * 0.2 + 0.2 * 0.3 < dot([a, b], [b, c]).hi
    with rounding(DOUBLE, first="any"):
        b = leaves(np.array([1.0]))[0]
        assert places([b, b]) == [(0, 1), (0, 1)]


def test_tokens_that_tie_may_be_exchanged_in_a_last_choice_alone() -> None:
    inputs = drawn(0, 3, 1, (1, 1))
    one, tenth = (replace(inputs, layers=[replace(x, k=size * np.ones_like(x.k)) for x in inputs.layers])
                  for size in (1, 0.1))
    with rounding(DOUBLE):
        (exact,), (kept,) = (METHODS["knorm"].kept(each, 1) for each in (one, tenth))
    assert fits([2], kept)
    assert not fits([0, 1], kept)
    assert [fits([token], exact) for token in range(3)] == [True, False, False]
    with pytest.raises(Undecided):
        surely(kept)


READINGS: dict[str, list[tuple[str, ...]]] = {
    kind: [tuple(row) for row in rows]
    for kind, rows in tomllib.loads(Path(__file__).with_name("readings.toml").read_text(encoding="utf-8")).items()
}
SENT = READINGS["sent"]


def first_by_day(rows: Sequence[tuple[str, ...]], slow: Sequence[str] = ()) -> list[Any]:
    """Return one row for each published policy that is not slow.

    The remaining rows run in the nightly profile, because they test only the suite.
    """
    first: dict[str, tuple[str, ...]] = {}
    for row in rows:
        first.setdefault(row[0], row)
    by_day = [row for name, row in first.items() if name not in slow]
    return [pytest.param(*row, marks=() if row in by_day else pytest.mark.nightly) for row in rows]


def edited(name: str, old: str, new: str) -> Any:
    """Return the function that makes a policy, compiled from the edited source of the module."""
    make = POLICIES[name].make
    source = inspect.getsource(sys.modules[make.__module__])
    assert old in source
    unnamed = source.replace("from reference.policies.named import named", "named = lambda *_, **__: lambda make: make")
    names: dict[str, Any] = {"__name__": make.__module__}
    exec(unnamed.replace(old, new), names)
    return names[make.__name__]


@pytest.mark.parametrize(  # These two have many readings, which take seconds each.
    ("name", "old", "new", "message"), first_by_day(READINGS["explained"], slow=("adakv", "chunkkv")),
)
def test_another_reading_is_named(name: str, old: str, new: str, message: str) -> None:
    short = {"W": 8} if "W" in Method(name).constants else {}
    policy = edited(name, old, new)(**short)
    policy = replace(policy, cadence=Cadence() if "never" in message else policy.cadence)
    actual = explanations(lambda inputs, B: decided(policy, inputs, B), Method(name, short))
    assert any(message in one for one in actual), actual
    assert on_fixed_inputs(method_of(f"{name}({message})").changed(**short), subject(lambda inputs: policy))


def test_no_reading_is_named_that_the_failing_input_refutes() -> None:
    """Check that the report on SnapKV without soft caps does not name rounding or ties as the reason."""
    def uncapped(method: Method, inputs: Inputs, B: int) -> Kept:
        layers = [replace(view, softcap=None) for view in inputs.layers]
        return decided(method.reference(inputs), replace(inputs, layers=layers), B)

    method = Method("snapkv", {"W": 8, "kernel": 3})  # a short window, because a long one takes half a minute
    with pytest.raises(AssertionError, match="not snapkv") as failure:
        test_method.test_the_kept_sets_are_those_of_the_method(method, uncapped, "float64", {}, set())
    assert "it agrees" not in str(failure.value)


DECLARED = [
    (name, reading, value) for name, brute in METHODS.items()
    for reading, values in brute.readings.items() for value in values[1:]
]


@pytest.mark.parametrize(("name", "reading", "value"), DECLARED)
def test_a_fixed_input_separates_each_reading(name: str, reading: str, value: str) -> None:
    """Check that the equation of a different reading fails on an input that every run has."""
    method = Method(name, {"pin_prompt": 2} if reading == "prompt" else {})  # The reading is about pinned tokens.
    other = method.changed(**{reading: value})
    for draw in test_method.SMALL:
        inputs, B = test_method.on_draw(method, draw)
        with suppress(Undecided):
            if test_method.difference(other.wanted(inputs, B), method.wanted(inputs, B)):
                return
    pytest.fail(f"no fixed input separates {other} from {method}")


def refused(name: str, keeps: Any) -> None:
    """Check that a subject is rejected as the method."""
    method = Method(name, {"N_future": 8} if name == "expected-attention" else {})
    words = rf"not {re.escape(str(method))} with |budget = .*must be at least|(budgets|protection) = .*use "
    with pytest.raises((AssertionError, SpecError), match=words):
        on_fixed_inputs(method, keeps)
        on_random_inputs(method, keeps)  # Ties of some sizes show only there.


@pytest.mark.parametrize(("name", "old", "new"), first_by_day(READINGS["planted"] + SENT))
def test_a_wrong_reading_does_not_conform(name: str, old: str, new: str) -> None:
    cheap, wrong = {"N_future": 8} if name == "expected-attention" else {}, edited(name, old, new)
    refused(name, subject(lambda inputs: wrong(**model_constants(name, inputs), **cheap)))


class Served(Engine):
    """The reference as an engine that answers line by line in this process."""

    def __init__(self) -> None:
        self.hello = hello_of(json.loads(answer(resolve("numpy"), "float64", '{"id": 0, "op": "hello"}'))["result"])

    def ask(self, op: str, arguments: Any, read: Any) -> Any:
        line = json.dumps({"id": 1, "op": op, "arguments": arguments})
        return outcome(answer(resolve("numpy"), "float64", line).encode(), 1, read)


@pytest.mark.parametrize(("name", "old", "new"), first_by_day(SENT))
def test_an_engine_with_a_wrong_reading_does_not_conform(
    name: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(POLICIES, name, replace(POLICIES[name], make=edited(name, old, new)))
    refused(name, partial(asked, Served()))


class Scaled(Served):
    """Engine whose scores are multiplied by a factor. With None, scores are omitted."""

    def __init__(self, times: float | None) -> None:
        super().__init__()
        self.times = times

    def ask(self, op: str, arguments: Any, read: Any) -> Any:
        actual = super().ask(op, arguments, read)
        return replace(actual, scores=None if self.times is None else self.times * actual.scores)


@pytest.mark.spec("PO-KNORM")
def test_scores_that_an_engine_answers_are_compared() -> None:
    for times, scored in ((1.0, {"knorm"}), (None, set[str]())):
        there = set[str]()
        assert on_fixed_inputs(Method("knorm"), partial(asked, Scaled(times)), there)
        assert there == scored
    with pytest.raises(AssertionError, match=r"not knorm with 2 tokens, B = 2, .*: kept set 0 of 1 has the score"):
        on_fixed_inputs(Method("knorm"), partial(asked, Scaled(1 + 2.0**-40)))
