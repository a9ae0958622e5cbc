"""Texts of other people in results, rules, tasks and leases: nothing takes long, and errors are one line."""

import pytest

pytest.importorskip("transformers", reason="studies drive transformers models")

import io
import json
import lzma
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from conformance import exceptions
from conformance.paths import ROOT
from conformance.verify import certificate
from experiments.studies.evidence.audit import audit
from experiments.studies.evidence.kept import CONTROL_BOUNDS
from experiments.studies.evidence.rules import load_rules
from experiments.studies.evidence.run import merged
from experiments.studies.leases import Leases
from experiments.studies.papers import load_paper
from experiments.studies.papers.probes import read_locomo
from experiments.studies.report import control_table, progress_bar, say, table_of, title_of
from experiments.studies.results import Row, append_row, load_rows, load_study, parse_rows
from experiments.studies.workers import first_failure, status
from experiments.tasks import metrics
from experiments.tasks.metrics import _NUMBER, FIRST_NUMBER, judge
from experiments.tasks.questions import read_questions
from experiments.tasks.registry import resolve_task
from experiments.tasks.rows import open_rows
from kvspec.cli.checks import check_folder
from kvspec.cli.study_files import write_outputs, write_page
from kvspec.cli.study_runs import print_audit
from models_integration.policies.calibration import read_head_pattern, read_statistics, read_tensors
from models_integration.policies.networks import read_gates
from reference.calibration import load_calibration
from spec.errors import SpecError
from spec.files import read_text
from tests.experiments.studies.experiments import commit_all
from tests.experiments.studies.test_study import RULES
from tests.models_integration.session.families import build

pytestmark = pytest.mark.law("an-object-proves-itself")

HOSTILE = "a\x1b]0;x\x07[/red][link=x]b\\[red]"
SHOWN = r"a?]0;x?[/red][link=x]b\[red]"
DEEP = "[" * 100_000
GONE = object()


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


@pytest.mark.parametrize(("row", "words"), [
    ({}, "rules"), ({"cells": 3}, "cells"), ({"cells": [{"policy": "x"}]}, "budget"),
    ({"rules": "", "sample": "", "error": "x"}, "task"),
])
def test_the_report_and_the_status_name_a_malformed_row(row: Row, words: str, tmp_path: Path) -> None:
    about = {"rules": "", "model": "", "task": "", "part": "", "placement": "", "length": 3, "metadata": {}}
    append_row(tmp_path / "study.jsonl", {"again": True})  # the report leaves out this row, which counts as a line
    append_row(tmp_path / "study.jsonl", {**about, **row} if "cells" in row else row)
    message = rf"study\.jsonl:2': has no valid value of '{words}': remove the line, and the next run measures"
    with pytest.raises(SpecError, match=message):
        write_page(tmp_path, [])
    if "error" in row:
        with pytest.raises(SpecError, match=message):
            list(status(tmp_path))


@pytest.mark.parametrize(("line", "words"), [
    ("{", r"is not JSON \(.*\)"), ("", r"is not JSON \(.*\)"), ("3", "must be a JSON object"),
])
def test_a_line_that_is_no_row_is_named_with_what_to_do(line: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "study.jsonl").write_text(f'{{"again": true}}\n{line}\n', encoding="utf-8")
    with pytest.raises(SpecError, match=rf"study\.jsonl:2': {words}: remove the line, and the next run measures"):
        write_page(tmp_path, [])


def places_in(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value in a row, and of the first value in each list."""
    for key in value if isinstance(value, dict) else range(min(1, len(value))) if isinstance(value, list) else ():
        yield (*before, key)
        yield from places_in(value[key], (*before, key))


def test_a_wrong_value_in_a_row_is_one_sentence_or_is_shown(tmp_path: Path, one_thread: None) -> None:
    """Change or remove each value of a row. The report, the table and the status show the rows, or name the column."""
    path, table, page = tmp_path / "study.jsonl", tmp_path / "table.csv", tmp_path / "report.html"
    text = read_text("audit", ROOT / "docs" / "results" / "smollm2" / "h2o.jsonl.xz")
    first, second = parse_rows("\n".join(text.splitlines()[:2]), path)
    first["cells"], first["control"] = first["cells"][:3], None
    readers: tuple[Callable[[], object], ...] = (
        lambda: write_page(tmp_path, []), lambda: write_outputs(merged(load_study(path)), table, None),
        lambda: list(status(tmp_path)), lambda: first_failure(path),
    )
    shown, refusals = 0, list[str]()
    for place in places_in(first):
        for wrong in ("<script>\x1b[2J", [[]], float("nan"), 10**30, GONE):
            row = json.loads(json.dumps(first))
            *names, last = place
            where: Any = row
            for name in names:
                where = where[name]
            where[last] = wrong
            if wrong is GONE:
                del where[last]
            path.write_text(f"{json.dumps(row)}\n{json.dumps(second)}\n", encoding="utf-8")
            for read in readers:
                try:
                    read()
                    shown += 1
                except SpecError as error:
                    refusals.append(str(error))
                except Exception as error:
                    pytest.fail(f"{place} = {wrong!r}: {error!r}")
    assert not any("\n" in refusal for refusal in refusals)
    assert shown > 100
    assert "<script>\x1b" not in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(("row", "words"), [
    ({"cells": 3}, "cells"), ({"cells": [{"policy": 3, "budget": "1"}]}, "policy"),
    ({"seconds": {"a": 1e300}}, "seconds"),
    ({"cells": [{"policy": "x", "budget": "1"}], "error": "x", "task": 3, "index": 0}, "task"),
])
def test_the_status_names_a_line_with_a_wrong_value(row: Row, words: str, tmp_path: Path) -> None:
    append_row(tmp_path / "study.jsonl", {"rules": "", "sample": "", **row})
    with pytest.raises(SpecError, match=rf"study\.jsonl:1'.*has no valid value of '{words}'"):
        list(status(tmp_path))


def test_a_lease_of_other_people_stops_no_worker(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    (tmp_path / ".rows.jsonl-a.lease").write_text('{"deaths": "x"}', encoding="ascii")
    (tmp_path / ".rows.jsonl-b.lease").write_text('{"host": "h\\n  100 samples", "pid": "\\n"}', encoding="ascii")
    with Leases(path, lambda row: str(row["unit"])) as worker:
        assert worker.take("a")
        worker.add({"unit": "a"})
    (tmp_path / ".rows.jsonl-b.lease").rename(tmp_path / ".study.jsonl-b.lease")
    append_row(tmp_path / "study.jsonl", {"study": "injection", "entropy": [0.5]})  # of `kvspec paper`
    assert [line for line in status(tmp_path) if "samples" in line and "process" in line] == [
        "  under way: process of h 100 samples, since ?; DEAD: its sample is taken over"
    ]


def test_exceptions_with_a_key_of_many_dots_take_no_time(tmp_path: Path) -> None:
    path = tmp_path / "exceptions.toml"
    path.write_text("a." * 30_000 + "a = 1", encoding="utf-8")
    with pytest.raises(pytest.UsageError, match="a key has more than 32 parts"):
        exceptions.read(path, frozenset(), frozenset())


def test_the_audit_prints_no_control_characters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "\x1b[2Jrules"
    (tmp_path / f"{name}.toml").write_text(RULES, encoding="utf-8")
    row = {"part": "confirm", "rules": "0" * 64, "commit": "x"}
    (tmp_path / f"{name}.jsonl.xz").write_bytes(lzma.compress(f"{json.dumps(row)}\n".encode()))
    commit_all(tmp_path)
    print_audit(tmp_path)
    assert "?[2Jrules.toml" in (output := capsys.readouterr().out)
    assert "\x1b" not in output


READERS: dict[str, Callable[[Path], object]] = {
    "r.toml": load_rules, "p.toml": lambda path: load_paper(str(path)), "study.jsonl": load_rows,
    "q.jsonl": lambda path: read_questions(path, None, "f1"), "b.jsonl": lambda path: open_rows(path, {}),
    "study.jsonl.cut": lambda path: check_folder("out", path.parent, "study.jsonl"),
    "worker-2.log": lambda path: check_folder("out", path.parent, "study.jsonl"),
    **{f".study.jsonl-0.{kind}": lambda path: list(status(path.parent)) for kind in ("lease", "plan")},
    "c.npz": load_calibration, "locomo10.json": read_locomo, "certificate.toml": certificate.read,
    "heads.tsv": lambda path: read_head_pattern(path, build("llama")),
    "stats.pt": lambda path: read_statistics(path, build("llama")),
    "gates.safetensors": lambda path: read_gates(path, build("llama")),
    "filters.safetensors": lambda path: read_tensors(path, build("llama")), "text.txt": partial(read_text, "PROMPT"),
}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs")
@pytest.mark.parametrize("kind", ["a FIFO", "a device"])
@pytest.mark.parametrize(("name", "load"), READERS.items(), ids=READERS)
def test_a_fifo_and_a_device_are_not_waited_for(
    name: str, load: Callable[[Path], object], kind: str, tmp_path: Path,
) -> None:
    path = tmp_path / name
    if kind == "a FIFO":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")

    def stop(*_: object) -> None:
        pytest.fail("the reader waits")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(20)
    try:
        if name == "text.txt" and kind == "a FIFO":  # a pipe without a writer is at its end
            assert load(path) == ""
        else:
            with pytest.raises((SpecError, OSError), match=r"must be a|cannot be read|symbolic link|needs nltk"):
                load(path)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.skipif(not os.path.isdir("/dev/fd"), reason="needs /dev/fd")
def test_a_text_may_come_from_a_pipe() -> None:
    """Check a writer that is slower than the reader, as in `kvspec explain <(pdftotext paper.pdf -)`."""
    ours, theirs = os.pipe()
    with subprocess.Popen(["sh", "-c", "printf long; sleep 0.5; printf er"], stdout=theirs):
        os.close(theirs)
        assert read_text("PROMPT", Path(f"/dev/fd/{ours}")) == "longer"
    os.close(ours)


def test_a_search_that_takes_long_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judge("regular expression", "is 7492.", [r"\b9", r"^is \d{4}"]) == 1
    assert judge("regular expression", "\udcff\0\n", [r"7492"]) == 0
    monkeypatch.setattr(metrics, "SEARCH_SECONDS", 2)
    with pytest.raises(SpecError, match=r"answer = '\(a\+\)\+b': takes more than 2 s .*: write a\+ in place of"):
        judge("regular expression", "a" * 40, ["(a+)+b"])


@pytest.mark.parametrize("pattern", ["(" * 5000 + ")" * 5000, "a{" + "9" * 30 + "}", "(?u)(?a)x"])
def test_a_pattern_that_python_refuses_is_one_sentence(pattern: str, tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps({"text": "t", "question": "q", "answer": pattern}), encoding="utf-8")
    with pytest.raises(SpecError, match="is not a regular expression"):
        read_questions(path, None, "regex")


@pytest.mark.parametrize(("name", "data", "words"), [
    ("q.csv", "text,question,answer,Answer,answer \nt,q,a,b,c\n", r"has two columns 'answer': .* a list of answers"),
    ("q.csv", "text,question,answer\nt,q,a\nt,q,b\nt,q,a\n", "row 3.*is the same as row 1, and would count twice"),
    ("q.jsonl", '{"text": "t", "question": "q", "answer": "a", "answer": "b"}', "the key 'answer' is given twice"),
    ("q.jsonl", '{"text": "t", "question": "q", "answer": {"a": 1}}', "row 1': has {'a': 1} in 'answer': write a text"),
    ("q.jsonl", '{"text": "t", "question": "q", "answer": [["a"]]}', r"has \['a'\] in 'answer'"),
    ("q.jsonl", '{"text": "t", "question": "q", "answer": NaN}', "has nan in 'answer'"),
    ("q.jsonl", '{"text": "t", "question": "\\ud800", "answer": "a"}', "has half of a character in 'question'"),
])
def test_an_ambiguous_question_is_refused(name: str, data: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(data, encoding="utf-8")
    with pytest.raises(SpecError, match=words):
        read_questions(tmp_path / name, None, "f1")


@pytest.mark.parametrize(("name", "load"), [
    ("r.toml", load_rules), ("p.toml", lambda path: load_paper(str(path))), ("s.jsonl", load_rows),
    ("q.jsonl", lambda path: read_questions(path, None, "f1")), ("b.jsonl", lambda path: open_rows(path, {})),
    ("locomo10.json", read_locomo),
])
def test_a_deeply_nested_file_is_one_sentence(name: str, load: Callable[[Path], object], tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(f"x = {DEEP}" if path.suffix == ".toml" else f"{DEEP}\n", encoding="utf-8")
    with pytest.raises(SpecError, match=r"must be a TOML file|is not JSON|must be a JSON object|must be LoCoMo|nltk"):
        load(path)
    with pytest.raises(SpecError, match="must be a task name"):
        resolve_task(f"needle(depth={DEEP})")
