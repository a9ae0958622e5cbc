"""Verdicts of the witness on a group of requests, and checks of these verdicts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from conformance.server_suite.judge import RULES, Reading, Witness

__all__ = ["check_fault_is_named", "check_right", "verdict", "verdicts"]


def verdicts(witness: Witness, group: str) -> dict[str, list[str]]:
    """Return the result of each answer of a group, by rule: the error, "undecided" or "passed"."""
    try:
        readings = witness.readings(group)
    except pytest.skip.Exception as reason:  # The witness skips a test if a server does not answer.
        raise AssertionError(str(reason)) from reason
    return {rule: [verdict(check, reading) for reading in readings] for rule, check in RULES.items()}


def verdict(check: Callable[[Reading], Any], reading: Reading) -> str:
    """Return the result of a rule: the error, "undecided" or "passed"."""
    try:
        check(reading)
    except pytest.skip.Exception:
        return "undecided"
    except AssertionError as error:
        return str(error)
    return "passed"


def check_right(actual: Mapping[str, Sequence[str]]) -> None:
    """Check that no rule is broken, and that each rule is decided for some answer."""
    for rule, outcome in actual.items():
        assert set(outcome) <= {"passed", "undecided"}, (rule, outcome)
        assert "passed" in outcome, (rule, outcome)


def check_fault_is_named(actual: Mapping[str, Sequence[str]], words: str) -> None:
    """Check that the error of some rule names a fault with these words."""
    wrong = [one for outcome in actual.values() for one in outcome if one not in ("passed", "undecided")]
    assert any(words in one for one in wrong), wrong
