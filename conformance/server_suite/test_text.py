"""Tests of a server that accepts only text. Without token ids, only the rule "eviction" can be decided."""

from typing import Any

import pytest

from conformance.server_suite.judge import RULES
from conformance.server_suite.text import evicts, questions
from spec.errors import SpecError

OTHERS = [rule for rule in RULES if rule != "eviction"]


@pytest.mark.row("server: eviction")
def test_greedy_answers_are_not_those_of_the_full_cache(witness: Any, tokenizer: Any) -> None:
    asked = questions(witness.model, tokenizer, witness.dtype, witness.seed)
    try:
        verdict, reason = evicts(asked, witness.server.complete_text)
    except SpecError as error:
        pytest.skip(str(error))
    if verdict is None:
        pytest.skip(reason)
    assert verdict, f"{reason}: nothing was evicted"


@pytest.mark.parametrize("rule", [pytest.param(rule, marks=pytest.mark.row(f"server: {rule}")) for rule in OTHERS])
def test_a_rule_needs_token_ids(rule: str) -> None:
    pytest.skip("the server accepts only text, or sends no token ids with log-probabilities (spec/witness.md)")
