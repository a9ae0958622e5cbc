"""What the suite asks of a refusal: argument, value and bound, in anybody's words."""

import ast
from typing import Any

import numpy as np
import pytest

from conformance.checks.refusals import refused, tells
from conformance.paths import ROOT
from spec.errors import SpecError

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
