"""Tests that the evictions of a server are those that it states (spec/witness.md)."""

from typing import Any

import pytest

from conformance.server_suite.judge import RULES

GROUPS = ("lengths", "shared prefixes", "recalled", "at once", "cancelled", "long answers")


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("rule", [pytest.param(rule, marks=pytest.mark.row(f"server: {rule}")) for rule in RULES])
def test_an_answer_keeps_the_rule(witness: Any, rule: str, group: str, answer_tokens: dict[str, int]) -> None:
    undecided = []
    for reading in (readings := witness.readings(group)):
        try:
            answer_tokens["count"] = answer_tokens.get("count", 0) + decided_tokens(rule, reading)
        except pytest.skip.Exception as reason:
            undecided.append(str(reason))
    if len(undecided) == len(readings):
        pytest.skip(f"{group}: no answer decides; {undecided[0]}")


def decided_tokens(rule: str, reading: Any) -> int:
    """Check an answer, and return the number of answer tokens that the rule covers.

    If the statement leaves out more than half of the answer, the rule can fail, and otherwise the answer is undecided.
    """
    RULES[rule](reading)
    if reading.answer.stated is None:
        return len(reading.answer.answer_ids or ())
    one = reading.statement
    if one.left_out > len(one.answer_ids):
        pytest.skip(f"{reading}: the statement ends after {len(one.answer_ids)} answer tokens, and leaves out more")
    return len(one.answer_ids)


@pytest.mark.row
def test_how_many_requests_run_at_once(witness: Any, at_once: dict[str, int]) -> None:
    """Measure the number for the certificate. The test passes for any number."""
    at_once["requests"] = witness.running_at_once()
