"""Tests that the evictions of a server are those that it states (spec/witness.md)."""

from typing import Any

import pytest

from conformance.server_suite.judge import RULES

GROUPS = ("lengths", "shared prefixes", "recalled", "at once", "cancelled", "long answers")


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("rule", [pytest.param(rule, marks=pytest.mark.row(f"server: {rule}")) for rule in RULES])
def test_an_answer_keeps_the_rule(witness: Any, rule: str, group: str) -> None:
    undecided = []
    for reading in (readings := witness.readings(group)):
        try:
            RULES[rule](reading)
        except pytest.skip.Exception as reason:
            undecided.append(str(reason))
    if len(undecided) == len(readings):
        pytest.skip(f"{group}: no answer decides; {undecided[0]}")


@pytest.mark.row
def test_how_many_requests_run_at_once(witness: Any, at_once: dict[str, int]) -> None:
    """Measure the number for the certificate. The test passes for any number."""
    at_once["requests"] = witness.running_at_once()
