"""Tests of the keys of rows: versions of user-defined policies and tasks, calibrations, and all inputs of a row."""

import json
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers", reason="the comparison drives transformers models")

from typer.testing import CliRunner

from experiments.studies.evidence import run as evidence_run
from experiments.studies.evidence.rules import PARTS, load_rules, rules_of
from experiments.studies.evidence.run import IDENTITY, Item
from experiments.studies.results import load_rows
from experiments.studies.subject import Loading
from experiments.tasks import Sample
from experiments.tasks.needle import part_of
from kvspec.cli.app import app
from reference.calibration import Calibration, Identity, load_calibration, save_calibration
from spec.errors import SpecError
from tests.experiments.studies.test_study import RULES, rules_file, study
from tests.test_documentation import commands, fences

pytestmark = pytest.mark.law("an-identity-tells-apart")

GUIDE = "docs/guide/own-policy.md"
TASK = """
from experiments.tasks import draw_sample
from dataclasses import replace

def NEEDLE(ground, length, index, seed):
    return [replace(draw_sample("needle", ground.tokenizer, length, index, seed), metadata={})]

def PARTLY(ground, length, index, seed):
    return [replace(NEEDLE(ground, length, index, seed)[0], metric="qa_f1")]

def NOWHERE(ground, length, index, seed):
    return [replace(NEEDLE(ground, length, index, seed)[0], needle=(0, 0))]
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the policy of the guide as mine.py in the current folder, together with a task."""
    (example,) = (one.text for one in fences(GUIDE) if one.language == "python" and "def value_norm" in one.text)
    file = tmp_path / "mine.py"
    file.write_text(example + TASK, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return file


def changed(file: Path) -> None:
    """Change the file, and import it again as a later process would."""
    file.write_text(file.read_text(encoding="utf-8") + "\n# changed\n", encoding="utf-8")
    del sys.modules["mine"]


@pytest.mark.law("as-it-is-described")
def test_the_guide_s_own_policy_is_compared_and_measured_anew_once_it_is_changed(mine: Path) -> None:
    (words,) = (words for words in commands(GUIDE) if "mine:POLICY,snapkv" in words)
    command = [*words[1:], "--tasks", "needle,mine:NEEDLE", "--backend", "numpy", "--samples", "1"]

    def compared() -> list[tuple[str, str, float]]:
        result = CliRunner().invoke(app, command)
        assert result.exit_code in (0, 1), result.output
        rows = load_rows(Path("results/study.jsonl"))
        cells = [(row["task"], cell["policy"], cell["mean_cache"]) for row in rows for cell in row["cells"]]
        return [cell for cell in cells if cell[1] in ("mine:POLICY", "snapkv")]

    first = compared()
    assert {cell[:2] for cell in first} == {
        (task, policy) for task in ("needle", "mine:NEEDLE") for policy in ("mine:POLICY", "snapkv")
    }
    assert all(cache < 256 + 50 for *_, cache in first)
    assert compared() == first
    changed(mine)
    assert compared() == [*first, *first]


def test_rules_and_options_tell_versions_apart(mine: Path) -> None:
    text = RULES.replace('["streamingllm"]\nb', '["streamingllm", "mine:POLICY"]\nb')
    text = text.replace('"prose_continuation"]', '"mine:NEEDLE"]')
    given = {"title": "t", "models": ["pocket"], "contexts": 1, "questions": 1, "seeds": [0], "lengths": [200]}

    def digests() -> tuple[str, str]:
        options = rules_of(**given, placements=["after"], tasks=["mine:NEEDLE"], policies=["knorm"], budgets=["0.5"])
        return options.digest, load_rules(rules_file(mine.parent, text)).digest

    before = digests()
    assert before == digests()
    changed(mine)
    assert all(one != other for one, other in zip(before, digests(), strict=True))


@pytest.mark.law("as-it-is-described")
def test_a_task_that_is_right_in_part_or_has_no_evidence_has_no_bounded_control(mine: Path, one_thread: None) -> None:
    command = ["compare", "--tasks", "mine:PARTLY,mine:NOWHERE", "--samples", "1", "--length", "200"]
    actual = CliRunner().invoke(app, [*command, "--policies", "snapkv,fullcache", "--budgets", "0.5"])
    assert actual.exit_code == 0, actual.output
    rows = load_rows(Path("results/study.jsonl"))
    assert [[cell["policy"] for cell in row["cells"]] for row in rows] == [["fullcache", "snapkv"]] * 2
    for task in ("needl", "mine:ABSENT"):
        refused = CliRunner().invoke(app, ["compare", "--tasks", task, "--out", "elsewhere"])
        assert isinstance(refused.exception, SpecError)
        assert (refused.exception.argument, refused.exception.value) == ("task", task)


def test_equal_rows_of_two_task_files_are_rows_of_their_own(tmp_path: Path, one_thread: None) -> None:
    """Check two names of one text, and one file with two metrics."""
    line = json.dumps({"input": "Tom went to the river.\nQuestion: Who?", "outputs": ["Tom", "He"]})
    paths = [tmp_path / name / "validation.jsonl" for name in ("qa_1", "qa_2")]
    for path in paths:
        path.parent.mkdir()
        path.write_text(f"{line}\n{line}", encoding="utf-8")
    tasks = [f"ruler-file:{paths[0]}", f"ruler-file:{paths[1]}", f"ruler-lm-eval-file:{paths[0]}"]
    text = RULES[RULES.index("[study]") :].replace("contexts = 4", "contexts = 2").replace("[1024]", "[160]")
    text = text.replace('"needle_in_prose", "prose_continuation"', ", ".join(map(json.dumps, tasks)))
    rules_file(tmp_path, text.replace(', "in_prompt"', ""))
    assert study(tmp_path, "all").exit_code == 0
    rows = load_rows(tmp_path / "study.jsonl")
    assert sorted((row["task"], row["index"]) for row in rows) == sorted((task, at) for task in tasks for at in (0, 1))
    assert {row["metric"] for row in rows} == {"string_match_part", "string_match_all"}


SAMPLE = Sample("qa", (1, 2, 3), (4,), "x", (0, 1), answer_ids=(5,))
ITEM = Item("qa", 3, 0, 0, "after", SAMPLE)
OTHER_FIELDS: dict[str, Any] = {
    "metric": "contains", "needle": (1, 2), "further": ((1, 2),), "references": ("y",), "choices": ("y",), "history": 1,
    "max_new_tokens": 7, "chat_template": "a", "dialect": "b", "metadata": {"depth": 0.5}, "expected": "y",
    "answer_ids": (6,), "context_ids": (1, 2, 9), "question_ids": (9,),
}
OTHER_ITEMS: dict[str, Any] = {
    "task": {"task": "qa_2"}, "length": {"length": 4}, "index": {"index": 1}, "question": {"question": 1},
    "placement": {"placement": "in_prompt"}, "seed": {"seed": 1}, "control": {"control": "window holds needle"},
    **{f"sample.{name}": {"sample": replace(SAMPLE, **{name: value})} for name, value in OTHER_FIELDS.items()},
}


def test_whatever_an_item_is_of_makes_another_unit(tmp_path: Path) -> None:
    subject, rules = Loading("pocket", "numpy").subject(), load_rules(rules_file(tmp_path))
    assert ITEM.unit(rules, subject) == replace(ITEM).unit(rules, subject)
    units = {name: replace(ITEM, **changes).unit(rules, subject) for name, changes in OTHER_ITEMS.items()}
    assert len({ITEM.unit(rules, subject), *units.values()}) == len(units) + 1, units


def test_whatever_a_study_is_of_makes_another_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check rules, model, calibration, backend and specification."""
    subject, rules = Loading("pocket", "numpy").subject(), load_rules(rules_file(tmp_path))
    statistics = Calibration(Identity("m", np.ones(1)), (0,), np.ones((1, 1, 2)), np.ones((1, 1, 1)))
    others = [replace(statistics, samples=("a",)), replace(statistics, magnitude=2 * statistics.magnitude)]
    subjects = [subject, replace(subject, label="b"), replace(subject, backend="numba")]
    subjects += [replace(subject, calibration=one) for one in (statistics, *others)]
    units = [ITEM.unit(rules, one) for one in subjects]
    units.append(ITEM.unit(replace(rules, digest="b"), subject))
    monkeypatch.setattr(evidence_run, "SPEC_VERSION", "0.0.9")
    units.append(ITEM.unit(rules, subject))
    assert len(set(units)) == len(units) == 8
    assert set(ITEM.identity(rules, subject)) == set(IDENTITY)


@pytest.mark.law("figures-are-counted-right")
def test_a_calibration_says_over_which_contexts_it_was_taken(tmp_path: Path, one_thread: None) -> None:
    """Check the list of contexts in a calibration.

    A calibration that is created from the rules lists a dev context. A list with a confirming context is refused.
    Without a list, the output states that the list is missing.
    """
    text = RULES[RULES.index("[study]") :].replace('["streamingllm"]', '["triattention@prompt"]')
    rules, file = rules_file(tmp_path, text.replace("contexts = 4", "contexts = 12")), tmp_path / "mine.npz"
    result = CliRunner().invoke(app, ["calibrate", str(rules), "--out", str(file), "--tokens", "256"])
    assert result.exit_code == 0, result.output
    calibration = load_calibration(file)
    assert calibration.samples is not None
    assert [part_of(context) for context in calibration.samples] == ["dev"]
    text = text.replace("[1024]", "[300]").replace(', "prose_continuation"', "").replace(', "in_prompt"', "")
    rules_file(tmp_path, text.replace("contexts = 4", "contexts = 1") + 'calibration = "mine.npz"')
    for part, (samples, controlled) in product(PARTS, ((calibration.samples, True), (None, False))):
        save_calibration(replace(calibration, samples=samples), file)
        folder = tmp_path / str(controlled)
        actual = CliRunner().invoke(app, ["study", "--rules", str(rules), "--out", str(folder), "--part", part])
        assert actual.exit_code == 0, actual.output
        pages = [path.read_text(encoding="utf-8") for path in folder.glob("*.md")]
        assert all(("Uncontrolled" in page) is not controlled for page in pages)
        for row in load_rows(folder / "study.jsonl"):
            assert row["calibration"] == {"digest": calibration.digest, "controlled": controlled}
    confirms = next(f"{digit}" * 64 for digit in "0123456789abcdef" if part_of(f"{digit}" * 64) == "confirm")
    save_calibration(replace(calibration, samples=(*calibration.samples, confirms)), file)
    assert confirms in str(study(tmp_path, "dev").exception)
