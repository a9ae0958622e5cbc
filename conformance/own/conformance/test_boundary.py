"""What the judged code raises: a failure with its file and line, or a refusal that names argument, value and bound."""

import ast
import unittest
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis.errors import UnsatisfiedAssumption

from conformance.checks.refusals import SubjectFailure, boundary, guarded, refused, tells
from conformance.paths import ROOT
from conformance.policy_suite import test_promises
from conformance.verify import outcomes
from conformance.verify.outcomes import failure
from reference.backend import BACKEND
from reference.policies import policy_from_score
from spec.errors import SpecError
from spec.parameters import PAPER
from spec.policy import Promises


def skips() -> None:
    pytest.skip("not served")


def leaves() -> None:
    raise SystemExit(0)


def fails_expectedly() -> None:
    pytest.xfail("known")


def ends_all() -> None:
    pytest.exit("done", returncode=0)


def skips_quietly() -> None:
    raise unittest.SkipTest("backend 'x' has no stage family 'crystal'")


def assumes() -> None:
    """As `hypothesis.assume(False)` in a property."""
    raise UnsatisfiedAssumption


WAYS = [skips, leaves, fails_expectedly, ends_all, skips_quietly, assumes]


@pytest.mark.law("the-proof-has-teeth")
@pytest.mark.parametrize("way", WAYS)
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


@pytest.mark.law("the-proof-has-teeth")
def test_refusals_and_what_has_a_meaning_pass() -> None:
    for error in (SpecError("k", 1, "no"), NotImplementedError("later"), KeyboardInterrupt()):
        with pytest.raises(type(error)), boundary("it", NotImplementedError):
            raise error


@pytest.mark.law("the-proof-has-teeth")
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
    error = ValueError("x" * 900)
    error.add_note("Falsifying example: test_x(\n    judged=Backend(\n        None),\n    x=0,\n)")
    grouped = ExceptionGroup("two", [ExceptionGroup("one", [error]), TypeError()])
    assert failure(grouped, ["judged"]) == {"input": "test_x(\n    x=0,\n)", "found": f"ValueError: {'x' * 228} ..."}


@pytest.mark.law("as-it-is-described")
def test_a_bare_assertion_tells_what_must_hold_and_the_values_in_it() -> None:
    """And a case its parameters; of a vector its inputs."""
    limit, found = 1e-6, np.array([0.5, 1.583])
    with pytest.raises(AssertionError) as caught:
        assert np.abs(found - 0.5).max() < limit
    told = failure(caught.value, [], {"q": [1, 2], "case": "a\nb"})
    lines = told["found"].splitlines()
    assert "must hold: np.abs(found - 0.5).max() < limit" in lines
    assert {"found = array([0.5 , 1.583])", "limit = 1e-06"} <= set(lines)
    assert told["input"] == "    q=[1, 2]\n    case='a\\nb'"
    vector = {"group": {"operation": "score", "parameters": {"alpha": 1}}, "test": {"tcId": 3, "inputs": {"D": [0.5]}}}
    told = failure(caught.value, [], vector)
    assert told["input"] == "    vector='score-3'\n    parameters={'alpha': 1}\n    D=[0.5]"
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
    """An engine's own error, whose message is not ours."""

    def __str__(self) -> str:
        return f"engine E17, {self.argument}: {self.bound}"


@pytest.mark.parametrize("value", [BAD, BAD[0, 1], (1, 2), [1, 2], BAD.dtype, "float32", "ndarray", np.ndarray, 1])
def test_the_words_of_a_refusal_are_free(value: object) -> None:
    """An array is told by itself, an element, its shape, its type, its kind or its length."""
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
    assert tells(value, given) is right
