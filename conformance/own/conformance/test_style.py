"""What users read keeps the rules of style, and each rule finds the sentence that breaks it."""

import argparse

import pytest

pytest.importorskip("proselint", reason="finds the words")
pytest.importorskip("griffe", reason="reads docstrings")
pytest.importorskip("typer", reason="has the help of the commands")

from conformance.assurance.style.__main__ import GROUPS, found_in
from conformance.assurance.style.rules import of_markdown, of_options, offences

pytestmark = pytest.mark.law("as-it-is-described")

BROKEN = {
    "length": "Each of the tokens that the policy keeps has a position, a key and a value for every layer and every"
              " head in all of the rows of a batch.",
    "parts": "It has two: keys; values.",
    "headless": "What evicts is named here.",
    "where": "Use it where memory is short.",
    "verbs": "The question stands at the end.",
    "private": "A saboteur fails.",
    "names": "The set comes from models_integration.sentence_ends(tokenizer).",
    "policy": "Choose your own method.",
}
KEPT = (
    "Which policy do you need?", "Open the folder where the file is.", "Read \"What stands where\" first.",
    "Use `where(lies, stands)`.", "A fraction must lie in (0, 1].", "You say which policy you know.",
)


@pytest.mark.parametrize("group", GROUPS)
def test_pages_help_docstrings_and_errors_break_no_rule(group: str) -> None:
    assert list(map(str, found_in(group))) == []


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_named_with_its_line(rule: str) -> None:
    page = f"# Heading\n\nA good sentence\non two lines. {BROKEN[rule]}\n\n```\nwhere it stands\n```\n"
    assert [(one.rule, one.line) for one in offences(of_markdown(page, "page.md", 1))] == [(rule, 4)]
    for cell in (f"- item\n- {BROKEN[rule]}", f"| a | b |\n|---|---|\n| c | {BROKEN[rule]} |"):
        assert [one.rule for one in offences(of_markdown(cell, "page.md", 1))] == [rule]


@pytest.mark.parametrize("sentence", KEPT)
def test_a_sentence_that_keeps_the_rules_is_not_named(sentence: str) -> None:
    assert list(offences(of_markdown(sentence, "page.md", 1))) == []


def test_help_of_options_is_read() -> None:
    parser = argparse.ArgumentParser(description="It says so.")
    parser.add_argument("--x", help="The number that it knows.")
    found = list(offences(of_options(parser, test_help_of_options_is_read)))
    assert [one.rule for one in found] == ["verbs", "verbs"]
    assert found[0].source == "conformance/own/conformance/test_style.py"
