"""Texts of other people in results, rules, tasks and leases: nothing takes long, and errors are one line."""

import pytest

pytest.importorskip("transformers", reason="studies drive transformers models")

import io
import json
import lzma
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.console import Console

from experiments.studies.evidence.audit import audit
from experiments.studies.evidence.kept import CONTROL_BOUNDS
from experiments.studies.evidence.rules import load_rules
from experiments.studies.papers import load_paper
from experiments.studies.report import control_table, progress_bar, say, table_of, title_of
from experiments.studies.results import append_row, load_rows
from experiments.studies.workers import status
from experiments.tasks.metrics import _NUMBER, FIRST_NUMBER, judge
from experiments.tasks.questions import read_questions
from experiments.tasks.registry import resolve_task
from experiments.tasks.rows import open_rows
from kvspec.cli.study_runs import print_audit
from spec.errors import SpecError
from tests.experiments.studies.experiments import commit_all
from tests.experiments.studies.test_study import RULES

pytestmark = pytest.mark.law("an-object-proves-itself")

HOSTILE = "a\x1b]0;x\x07[/red][link=x]b\\[red]"
SHOWN = r"a?]0;x?[/red][link=x]b\[red]"
DEEP = "[" * 100_000


@pytest.mark.parametrize(("task", "title"), [
    ('questions(file="q.csv", grade="f1")', "q.csv (f1)"), ('questions(file="q.csv", text="t.txt")', "q.csv"),
    ('questions(file="a\\"b.csv")', 'a"b.csv'), ("questions(3)", "questions(3)"),
    ("needle_in_prose", "Needle in prose"),
    *((one, one) for one in ('questions(file="' + 'grade="' * 30_000, f"questions(x={DEEP}")),
])
def test_the_title_of_any_task(task: str, title: str) -> None:
    assert title_of(task) == title


def test_a_number_of_an_answer_is_the_number_of_the_definition() -> None:
    """Compare with the pattern without bounds on a number's start, on random texts and on a long word."""
    rng, letters = np.random.default_rng(0), list("ab1٣7_+-., é")
    plain = re.compile(r"[+-]?[^\W_]*\d[^\W_]*(?:[.,]\d+)*")
    for _ in range(3000):
        answer = "".join(rng.choice(letters, size=rng.integers(1, 12)))
        expected, actual = (match and match.span() for match in (plain.search(answer), _NUMBER.search(answer)))
        assert actual == expected, answer
    assert judge(FIRST_NUMBER, "a" * 1_000_000 + " 7", ["7"]) == 1


def printed(width: int = 200) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, width=width, force_terminal=True, no_color=True, legacy_windows=False), file


def test_tables_and_progress_show_texts_as_they_are() -> None:
    console, file = printed()
    console.print(table_of(HOSTILE, ["policy", HOSTILE], [["one", HOSTILE]]))
    row = {"policy": next(iter(CONTROL_BOUNDS)), "task": HOSTILE, "accuracy": 0.0, "correct": 0, "n": 1}
    console.print(control_table([row]))
    say(f"{HOSTILE}\nnext", console)
    assert file.getvalue().count(SHOWN) == 5
    assert "\x1b]" not in file.getvalue()
    with progress_bar(console, 2, after=0.0) as progress:
        progress(HOSTILE[:30])
        progress("b")
    assert "\x1b]" not in file.getvalue()


def test_the_status_of_a_run_has_no_control_characters(tmp_path: Path) -> None:
    path = tmp_path / "study.jsonl"
    append_row(path, {"rules": "", "sample": "", "task": HOSTILE, "index": "\x1b[2J", "error": "1\n\x1b[31m2"})
    for name, text in {"0.lease": json.dumps({"pid": "\x1b[2J"}), "1.lease": "[1]", "2.lease": DEEP}.items():
        (tmp_path / f".study.jsonl-{name}").write_text(text, encoding="utf-8")
    (tmp_path / ".study.jsonl-0.plan").write_bytes(b"\xff")
    lines = list(status(tmp_path))
    assert all(line.isprintable() for line in lines)
    assert f"  failed: {SHOWN}, number ?[2J: 1 ?[31m2" in lines


@pytest.mark.parametrize(("row", "words"), [
    ("[]", "must be a JSON object"), (DEEP, "is not JSON"), ("{}", "must be a row of a study, with part and rules"),
    ('{"part": "confirm", "rules": 3}', "must be a row of a study, with part and rules"),
])
def test_the_audit_names_a_malformed_row(row: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_text(RULES, encoding="utf-8")
    (tmp_path / "rules.jsonl.xz").write_bytes(lzma.compress(f"{row}\n".encode()))
    commit_all(tmp_path)
    with pytest.raises(SpecError, match=rf"rules\.jsonl\.xz:1.*{words}"):
        audit(tmp_path)


def test_the_audit_prints_no_control_characters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "\x1b[2Jrules"
    (tmp_path / f"{name}.toml").write_text(RULES, encoding="utf-8")
    row = {"part": "confirm", "rules": "0" * 64, "commit": "x"}
    (tmp_path / f"{name}.jsonl.xz").write_bytes(lzma.compress(f"{json.dumps(row)}\n".encode()))
    commit_all(tmp_path)
    print_audit(tmp_path)
    assert "?[2Jrules.toml" in (output := capsys.readouterr().out)
    assert "\x1b" not in output


@pytest.mark.parametrize(("name", "load"), [
    ("r.toml", load_rules), ("p.toml", lambda path: load_paper(str(path))), ("s.jsonl", load_rows),
    ("q.jsonl", lambda path: read_questions(path, None, "f1")), ("b.jsonl", lambda path: open_rows(path, {})),
])
def test_a_deeply_nested_file_is_one_sentence(name: str, load: Callable[[Path], object], tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(f"x = {DEEP}" if path.suffix == ".toml" else f"{DEEP}\n", encoding="utf-8")
    with pytest.raises(SpecError, match=r"must be a TOML file|is not JSON|must be a JSON object"):
        load(path)
    with pytest.raises(SpecError, match="must be a task name"):
        resolve_task(f"needle(depth={DEEP})")
