"""A user's own policies and tasks in comparisons, sweeps and studies: named with their version, taken up by it."""

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the comparison drives transformers models")

from typer.testing import CliRunner

from conformance.own.documentation import commands, fences
from conformance.own.models_integration.studies.test_study import RULES, rules_file
from models_integration.cli.app import app
from models_integration.studies.evidence.rules import load_rules
from models_integration.studies.results import load_rows
from models_integration.studies.subject import Loading, policy_in_rows, task_in_rows
from models_integration.studies.sweep.plan import Plan
from spec.errors import SpecError

pytestmark = pytest.mark.law("an-identity-tells-apart")

GUIDE = "docs/guide/policies.md"
TASK = """
from models_integration.tasks import draw_sample
from dataclasses import replace

def NEEDLE(ground, length, index, seed):
    return [replace(draw_sample("needle", ground.tokenizer, length, index, seed), metadata={})]

def PARTLY(ground, length, index, seed):
    return [replace(NEEDLE(ground, length, index, seed)[0], metric="qa_f1")]

def NOWHERE(ground, length, index, seed):
    return [replace(NEEDLE(ground, length, index, seed)[0], needle=(0, 0))]
"""
DIGEST = "@[0-9a-f]{8}"


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The guide's own policy as mine.py of the current folder, and a task beside it."""
    (example,) = (one.text for one in fences(GUIDE) if one.language == "python" and "def value_norm" in one.text)
    file = tmp_path / "mine.py"
    file.write_text(example + TASK, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return file


def changed(file: Path) -> None:
    """As another process finds the file later."""
    file.write_text(file.read_text(encoding="utf-8") + "\n# changed\n", encoding="utf-8")
    del sys.modules["mine"]


@pytest.mark.law("as-it-is-described")
def test_the_guide_s_own_policy_is_compared_and_taken_up_by_its_version(mine: Path) -> None:
    (words,) = (words for words in commands(GUIDE) if "mine:POLICY,snapkv" in words)
    command = [*words[1:], "--tasks", "needle,mine:NEEDLE", "--backend", "numpy", "--samples", "1"]

    def compared() -> list[tuple[str, str, float]]:
        result = CliRunner().invoke(app, command)
        assert result.exit_code in (0, 1), result.output
        rows = load_rows(Path("results/results.jsonl"))
        return [(row["policy"], row["task"], row["mean_cache"]) for row in rows if not row["control"]]

    rows = compared()
    names = {(policy, task) for policy, task, _ in rows}
    assert len(names) == len(rows) == 4
    own, task = policy_in_rows("mine:POLICY"), task_in_rows("mine:NEEDLE")
    assert re.fullmatch(f"mine:POLICY{DIGEST}", own)
    assert names == {(own, "needle"), (own, task), ("snapkv", "needle"), ("snapkv", task)}
    assert all(cache < 200 + 50 for _, _, cache in rows)
    assert compared() == rows
    changed(mine)
    assert len(compared()) == len(rows) + 3


def test_sweeps_and_studies_tell_versions_apart(mine: Path) -> None:
    subject = Loading("pocket", "numpy").subject()
    text = RULES.replace('["streamingllm"]\nb', '["streamingllm", "mine:POLICY"]\nb')
    text = text.replace('"prose_continuation"]', '"mine:NEEDLE"]')

    def identities() -> tuple[object, str]:
        sweep = Plan(tasks=("mine:NEEDLE",), length=200).identity("PAPER", "mine:NEEDLE", subject)
        return sweep["task"], load_rules(rules_file(mine.parent, text)).digest

    before = identities()
    assert before == identities()
    changed(mine)
    assert all(one != other for one, other in zip(before, identities(), strict=True))


@pytest.mark.law("refused-before-anything-changes")
def test_a_task_that_is_not_right_or_wrong_is_not_compared(mine: Path) -> None:
    subject = Loading("pocket", "numpy").subject()
    for task in ("mine:PARTLY", "mine:NOWHERE"):
        with pytest.raises(SpecError, match="kvspec study takes any") as caught:
            subject.sample(task, 200, 0, 0)
        assert caught.value.value == task
    for task in ("needl", "mine:ABSENT"):
        with pytest.raises(SpecError) as caught:
            Plan(tasks=(task,))
        assert (caught.value.argument, caught.value.value) == ("task", task)
