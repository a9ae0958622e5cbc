"""An exception of judged code is a failure with file and line, or an error that names argument, value and bound.

The boundary also detects stages that return the right result but break a rule of calls. It accepts correct stages.
"""

import ast
import os
import random
import unittest
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis.errors import UnsatisfiedAssumption

from conformance.calls import TWICE, held_to_rules, in_turns, side_by_side
from conformance.checks.refusals import SubjectFailure, boundary, describes_value, guarded, refused
from conformance.paths import ROOT
from conformance.policy_suite import test_promises
from conformance.verify import outcomes
from conformance.verify.recording import failure
from reference.backend import BACKEND
from reference.policies import policy_from_score
from spec.errors import SpecError
from spec.parameters import PAPER
from spec.policy import Promises

pytestmark = pytest.mark.law("the-proof-has-teeth")


def raising(error: type[BaseException], *given: object) -> Callable[[], None]:
    def way() -> None:
        raise error(*given)

    return way


WAYS: Mapping[str, Callable[[], Any]] = {
    "skips": lambda: pytest.skip("not served"), "leaves": raising(SystemExit, 0),
    "fails expectedly": lambda: pytest.xfail("known"), "ends all": lambda: pytest.exit("done", returncode=0),
    "skips quietly": raising(unittest.SkipTest, "backend 'x' has no stage family 'crystal'"),
    "assumes": raising(UnsatisfiedAssumption),  # as `hypothesis.assume(False)`
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_no_exception_of_the_judged_code_ends_a_test_otherwise_than_failed(way: Callable[[], Any]) -> None:
    class Mine(type(BACKEND.require_crystal())):  # type: ignore[misc]
        def score(self, *given: Any) -> Any:
            way()

    mine = guarded(replace(BACKEND, name="mi\nne", crystal=Mine()))
    with pytest.raises(SubjectFailure, match=r"^crystal\.score raised \w+ at \S+:\d+\n"):
        mine.require_crystal().score(np.zeros(1), np.zeros(1), np.zeros(1, dtype=np.bool_), PAPER)
    assert mine.name == "mi ne"

    def scorer(*given: Any) -> Any:
        way()

    policy = replace(policy_from_score(scorer), promises=Promises(budget_exact="yes"))
    with pytest.raises(SubjectFailure, match=r"^the policy raised "):
        test_promises.test_a_promise_holds("budget exact", lambda inputs: policy)


def test_refusals_and_what_has_a_meaning_pass() -> None:
    for error in (SpecError("k", 1, "no"), NotImplementedError("later"), KeyboardInterrupt()):
        with pytest.raises(type(error)), boundary("it", NotImplementedError):
            raise error


def test_the_line_is_of_the_judged_code_and_not_of_what_it_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = "import json\n\ndef run():\n    return [json.loads('{') for _ in range(1)]\n"
    (tmp_path / "subjects.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    import subjects  # type: ignore[import-not-found]

    with pytest.raises(SubjectFailure, match=r"it raised JSONDecodeError at \S+/subjects\.py:4\n"), boundary("it"):
        subjects.run()


@pytest.mark.law("figures-are-counted-right")
def test_an_assertion_is_told_in_short_where_that_says_enough() -> None:
    origin = "\n  +  where False = all()\n  +    and   0 = f()"
    telling = "assert ['token 1: 3, not 4 (of very many more)'] == []"
    for more in ("", origin, f"\n  \n  Left contains one more item{origin}"):
        assert failure(AssertionError(telling + more), [])["found"] == telling
    assert failure(AssertionError(f"assert False{origin}"), [])["found"] == f"assert False{origin}"
    error = ValueError("x" * 1900)
    error.add_note("Falsifying example: test_x(\n    judged=Backend(\n        None),\n    x=0,\n)")
    grouped = ExceptionGroup("two", [ExceptionGroup("one", [error]), TypeError()])
    assert failure(grouped, ["judged"]) == {"input": "test_x(\n    x=0,\n)", "found": f"ValueError: {'x' * 988} ..."}


@pytest.mark.law("as-it-is-described")
def test_a_bare_assertion_tells_what_must_hold_and_the_values_in_it() -> None:
    """Check the message of an assertion, with the parameters of a case and the inputs of a vector."""
    limit, actual = 1e-6, np.array([0.5, 1.583])
    with pytest.raises(AssertionError) as caught:
        assert np.abs(actual - 0.5).max() < limit
    message = failure(caught.value, [], {"q": [1, 2], "case": "a\nb"})
    lines = message["found"].splitlines()
    assert "must hold: np.abs(actual - 0.5).max() < limit" in lines
    assert {"actual = array([0.5 , 1.583])", "limit = 1e-06"} <= set(lines)
    assert message["input"] == "    q=[1, 2]\n    case='a\\nb'"
    vector = {"group": {"operation": "score", "parameters": {"alpha": 1}}, "test": {"tcId": 3, "inputs": {"D": [0.5]}}}
    message = failure(caught.value, [], vector)
    assert message["input"] == "    vector='score-3'\n    parameters={'alpha': 1}\n    D=[0.5]"
    assert failure(AssertionError("\x1b[2J"), [])["found"] == "?[2J"


@pytest.mark.law("as-it-is-described")
def test_the_sentence_of_a_refusal_is_told_where_a_refusal_fails() -> None:
    refusal = outcomes.must("CC-COATTENTION", {"test": "test_x.py::test_a_bad_lse_is_refused_by_name", "found": ""})
    assert refusal.startswith("refuse with `SpecError`")
    assert outcomes.must("CC-COATTENTION", {"test": "test_x.py::test_y", "found": "DID NOT RAISE"}) == refusal
    asked = outcomes.must("CC-COATTENTION", {"test": "test_x.py::test_y", "found": "1, not 2"})
    assert asked.startswith("take `q (H, n")


BAD = np.array([[0.5, np.nan]], dtype=np.float32)


class Reworded(SpecError):
    """Error of an engine, with a message that differs from kvspec's message."""

    def __str__(self) -> str:
        return f"engine E17, {self.argument}: {self.bound}"


@pytest.mark.parametrize("value", [BAD, BAD[0, 1], (1, 2), [1, 2], BAD.dtype, "float32", "ndarray", np.ndarray, 1])
def test_the_words_of_a_refusal_are_free(value: object) -> None:
    """Check errors that show an array by its values, an element, its shape, dtype, type or length."""
    with refused("lse", BAD):
        raise Reworded("lse", value, "all of it must be numbers")


@pytest.mark.parametrize(
    "error",
    [
        SpecError("q", BAD, "must be finite"), SpecError("lse", 7.0, "must be finite"), SpecError("lse", BAD, " "),
        SpecError("lse", None, "must be finite"), SpecError("lse", BAD, None),  # type: ignore[arg-type]
    ],
)
def test_a_refusal_without_argument_value_or_bound_is_none(error: SpecError) -> None:
    with pytest.raises(AssertionError), refused("lse", BAD):
        raise error


def test_the_suite_asks_for_no_words() -> None:
    asking = [
        f"{path.name}:{node.lineno}" for path in (ROOT / "conformance" / "suite").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.keyword) and node.arg == "match"
    ]
    assert asking == []


def test_another_error_is_no_refusal() -> None:
    with pytest.raises(ValueError, match="bad"), refused("lse"):
        raise ValueError("bad")
    with pytest.raises(pytest.fail.Exception), refused("lse"):
        pass


@pytest.mark.parametrize(
    ("value", "given", "right"),
    [
        (0.5, 0.5, True), (0.25, 0.5, False), (float("nan"), float("nan"), True), (None, None, True), ([], set(), True),
        (".", {"."}, True), ("NoneType", None, True), ("half", "half", True), (np.array([1]), [1], True),
        ((2,), [1], False),
    ],
)
def test_a_value_stands_for_what_came(value: Any, given: Any, right: bool) -> None:
    assert describes_value(value, given) is right


Array = np.ndarray[Any, Any]
Decay = Callable[[Array, Array, Any], Array]
RIGHT: Decay = BACKEND.require_breath().decay
BUFFER, SCRATCH = np.zeros(1_000), np.zeros(1_000)
MEMORY: dict[Any, Array] = {}


def reused(D: Array, M: Array, p: Any) -> Array:
    BUFFER[: len(D)] = RIGHT(D, M, p)
    return BUFFER[: len(D)]


def by_pointer(D: Array, M: Array, p: Any) -> Array:
    key = D.__array_interface__["data"][0], len(D)
    if key not in MEMORY:
        MEMORY[key] = RIGHT(D, M, p)
    return MEMORY[key].copy()


def by_identity(D: Array, M: Array, p: Any) -> Array:
    """Return a cached result if the arrays are identical objects. Only the last arrays are cached."""
    if MEMORY.get("D") is not D or MEMORY.get("M") is not M:
        MEMORY.update(D=D, M=M, found=RIGHT(D, M, p))
    return MEMORY["found"].copy()


def by_shape_when_large(D: Array, M: Array, p: Any) -> Array:
    return RIGHT(D, M, p) if len(D) < 500 else MEMORY.setdefault(len(D), RIGHT(D, M, p)).copy()


def by_content(D: Array, M: Array, p: Any) -> Array:
    key = D.tobytes(), M.tobytes()
    return MEMORY.setdefault(key, RIGHT(D, M, p))


def not_to_be_written(D: Array, M: Array, p: Any) -> Array:
    actual = RIGHT(D, M, p)
    actual.flags.writeable = False
    return actual


def argument_locked(D: Array, M: Array, p: Any) -> Array:
    D.flags.writeable = False
    return RIGHT(D, M, p)


def argument_written(D: Array, M: Array, p: Any) -> Array:
    if D.flags.writeable:
        D[0] = 0.25
    return RIGHT(D, M, p)


def shared_scratch(D: Array, M: Array, p: Any) -> Array:
    SCRATCH[: len(D)] = M
    before = np.zeros_like(D)
    for at, one in enumerate(D):  # This loop takes as long as a real stage. Meanwhile a different thread may write.
        before[at] = one
    return RIGHT(before, SCRATCH[: len(D)].copy(), p)


def order_of_memory(D: Array, M: Array, p: Any) -> Array:
    """Read rows at the places that they would have in a contiguous array."""
    flat = M if M.strides[0] == 8 else np.lib.stride_tricks.as_strided(M[:1], M.shape, (0,))
    return RIGHT(D, flat, p)


def after(effect: Callable[[], object]) -> Decay:
    """Return a right stage that first has an effect on the process."""
    return lambda D, M, p: (effect(), RIGHT(D, M, p))[1]


VALUES = "array_equal"  # The result is wrong.
WRONG: Mapping[str, tuple[Decay, str]] = {
    "reused": (reused, "returned the memory|changed the result"), "by pointer": (by_pointer, VALUES),
    "by identity": (by_identity, VALUES), "by shape when large": (by_shape_when_large, VALUES),
    "by content": (by_content, "returned"), "not to be written": (not_to_be_written, "read-only"),
    "argument locked": (argument_locked, "flags.writeable"),
    "argument written": (argument_written, "wrote into an argument"), "shared scratch": (shared_scratch, VALUES),
    "order of memory": (order_of_memory, VALUES),
    "quiet": (after(lambda: np.seterr(under="raise" if np.geterr()["under"] == "ignore" else "ignore")),
              "NumPy's error state"),
    "seeded": (after(np.random.random), "NumPy's random state"),
    "reseeded": (after(lambda: np.random.seed(0)), "NumPy's random state"),
    "drawn": (after(random.random), "the random state"),
    "announced": (after(lambda: os.environ.update(KVSPEC_CALLED="yes")), "the environment"),
    "counted": (
        after(lambda: os.environ.update(KVSPEC_CALLS=str(int(os.environ.get("KVSPEC_CALLS", "0")) + 1))),
        "the environment",
    ),
}


def judge(stage: Decay) -> None:
    """Call a stage as tests do: with 64 to 119 trunks, with ten calls of equal size, and with 600 trunks at times.

    Each result is compared.
    """
    stages = held_to_rules(replace(BACKEND, breath=SimpleNamespace(decay=stage))).require_breath()
    numbers, size = np.random.default_rng(5), 0
    for at in range(400):
        size = int(numbers.integers(64, 120)) if at % 10 == 0 else size
        m = 600 if at % 40 == 39 else size
        D, M = numbers.random(m), 15 * numbers.random(m)
        kept = D.copy(), M.copy()
        assert np.array_equal(stages.decay(D, M, PAPER), RIGHT(*kept, PAPER))
        assert np.array_equal(D, kept[0])


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Restore the state of the process that wrong stages change. No type check draws samples in these tests."""
    monkeypatch.setattr("conformance.calls.checkers_draw", lambda: False)
    for name in ("KVSPEC_CALLS", "KVSPEC_CALLED"):
        monkeypatch.delenv(name, raising=False)
    MEMORY.clear()
    with np.errstate():
        yield


@pytest.mark.parametrize(("stage", "words"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_beside_the_result_is_found(stage: Decay, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        judge(stage)


@pytest.mark.parametrize("stride", [1, 3])
def test_a_scratch_array_of_all_threads_is_found(stride: int) -> None:
    m = 6
    calls = (np.full(m, 0.5), np.ones(m), PAPER), (np.full(m, 0.25), 9 * np.ones(m), PAPER)
    wanted = [RIGHT(*call) for call in calls]
    assert all(map(np.array_equal, in_turns(RIGHT, calls, stride), wanted))
    assert not all(map(np.array_equal, in_turns(shared_scratch, calls, stride), wanted))


def test_a_lock_ends_the_turns() -> None:
    lock = Lock()

    def locked(D: Array, M: Array, p: Any) -> Array:
        with lock:
            return RIGHT(D, M, p)

    call = np.full(6, 0.5), np.ones(6), PAPER
    assert all(np.array_equal(actual, RIGHT(*call)) for actual in in_turns(locked, (call, call), 1))


def test_what_a_thread_raises_is_told() -> None:
    def fails() -> Array:
        raise ZeroDivisionError

    actual = in_turns(fails, ((), ()), 1) + [one for _, one in side_by_side(fails, ((), ()), 0.01)]
    assert len(actual) == 4
    assert all(isinstance(one, ZeroDivisionError) for one in actual)


def test_a_right_stage_passes() -> None:
    judge(RIGHT)
    judge(lambda D, M, p: RIGHT(np.ascontiguousarray(D), np.ascontiguousarray(M), p))


def test_the_caller_has_results_of_its_own() -> None:
    """Check that an argument that is returned as the result is copied, such as W of a static graph.

    The next call must not change the result.
    """
    stages = held_to_rules(replace(BACKEND, breath=SimpleNamespace(decay=lambda D, M, p: D))).require_breath()
    first = stages.decay(np.full(600, 0.5), np.ones(600), PAPER)
    stages.decay(np.full(600, 0.25), np.ones(600), PAPER)
    assert (first == 0.5).all()


def test_calls_are_chosen_by_their_numbers_alone() -> None:
    """Check that the repeated calls are the same in each run, even for NaN, whose hash is an address."""
    values, held = [], []  # Held objects move the next NaN to a different address.
    for _ in range(2):
        sizes: list[int] = []
        judged = SimpleNamespace(decay=lambda D, M, p, sizes=sizes: sizes.append(len(D)))
        stages = held_to_rules(replace(BACKEND, breath=judged), together=False).require_breath()
        for n in range(1, 12 * TWICE):
            held.append(n + 0.5)
            stages.decay(np.array([float("nan")] * n), np.ones(n), PAPER)
        values.append(sizes)
    assert values[0] == values[1]
    assert len(values[0]) > 12 * TWICE
