"""The number of answer tokens that a rule of spec/witness.md covers, and statements that leave out most tokens."""

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the witness runs a transformers model")

from conformance.paths import SPEC
from conformance.server_suite.judge import RULES
from conformance.server_suite.test_server import decided_tokens
from conformance.verify.certificate import certificate, differences
from conformance.verify.outcomes import verdicts_of
from conformance.verify.request import parsed
from conformance.verify.subject import Subject
from conformance.witness.statement import parse_statement

pytestmark = pytest.mark.law("figures-are-counted-right")

SUBJECT = Subject("server", "tiny", "", "http://127.0.0.1:1", "GET /v1/models and /version", "0" * 64)


def reading(until: int | None) -> Any:
    """Return an answer of 12 tokens after 40 prompt tokens, of which 34 were evicted."""
    body = {
        "witness": 1, "policy": "streamingllm", "budget": "6", "positions": "kept", "prompt_ids": [5] * 40,
        "answer_ids": [7] * 12, "logprobs": [-1.0] * 12,
        "evictions": [{"seen": 40, "sets": [[[0, 4], [38, 40]]], "layers": [[0]], "digest": "0"}],
        **({} if until is None else {"until": until}),
    }
    return SimpleNamespace(answer=SimpleNamespace(stated=body), statement=parse_statement(body, {}))


@pytest.mark.parametrize(("until", "tokens"), [(None, 12), (60, 12), (50, 11), (45, 6), (44, 0), (41, 0)])
def test_a_statement_that_leaves_out_most_of_the_answer_passes_no_rule(
    until: int | None, tokens: int, monkeypatch: pytest.MonkeyPatch,
) -> None:
    passed: Callable[[Any], None] = [].append
    monkeypatch.setitem(RULES, "masking", passed)
    if tokens:
        assert decided_tokens("masking", reading(until)) == tokens
        return
    with pytest.raises(pytest.skip.Exception, match="answer tokens, and leaves out more"):
        decided_tokens("masking", reading(until))


def wrong(reading: Any) -> None:
    raise AssertionError("the set is wrong")


def test_an_answer_that_breaks_a_rule_fails_also_if_most_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "masking", wrong)
    with pytest.raises(AssertionError, match="the set is wrong"):
        decided_tokens("masking", reading(41))


def record(*tokens: int) -> dict[str, Any]:
    """Return the certificate of tests of one row, each with its number of answer tokens. Test 0 is skipped."""
    names = [f"t{at}" for at in range(len(tokens))]
    lines: list[dict[str, Any]] = [{"collected": {
        name: {"items": ["server: masking"], "exceptions": []} for name in names
    }}]
    for at, (name, number) in enumerate(zip(names, tokens, strict=True)):
        lines.append({"began": name})
        lines.append({"test": name, "state": "passed" if at else "skipped", "examples": 1, "answer_tokens": number})
    request = parsed(["--server", SUBJECT.named, "--model", "tiny", "--seed", "1", "--profile", "ci"])
    return certificate(request, SUBJECT, verdicts_of([*lines, {"ended": 0}], (), engine=False))


def test_a_row_of_a_server_has_the_number_of_answer_tokens() -> None:
    actual = record(100, 24, 36)
    assert actual["items"]["server: masking"]["answer_tokens"] == 60
    assert "answer_tokens" not in record(100, 0)["items"]["server: masking"]
    assert differences(actual, record(100, 23, 36)) == []
    row = json.loads((SPEC / "certificate.schema.json").read_text(encoding="utf-8"))["$defs"]["row"]
    assert actual["items"]["server: masking"].keys() <= row["properties"].keys()
