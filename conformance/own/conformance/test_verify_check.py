"""`kvspec verify --check`: which differences are named, what is asked before anything runs, older certificates."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conformance.own.conformance.test_verify import EXCEPTION, RIGHT, WRONG, made
from conformance.paths import SPEC
from conformance.verify import __main__ as door
from conformance.verify import certificate
from conformance.verify.certificate import write
from conformance.verify.request import parsed

pytestmark = pytest.mark.law("an-identity-tells-apart")


@pytest.mark.parametrize(("change", "named"), [
    ({"verdict": "not certified"}, "verdict"), ({"spec": "0.2.0"}, "spec"), ({"failing": ["DV-GREEDY"]}, "failing"),
    ({"items": {"DV-GREEDY": {"verdict": "fail"}}}, "items.DV-GREEDY.verdict"),
    ({"subject": {"digest": "1" * 64}}, "subject.digest"), ({"run": {"seed": 7}}, "run.seed"),
    ({"unneeded_exceptions": ["DV-GREEDY"]}, "unneeded_exceptions"),
    ({"vectors": {"score-1": "fail"}}, "vectors.score-1"),
    ({"counts": {"tests": 2}}, "counts.tests"), ({"unproven": ["DV-GREEDY"]}, "unproven"),
    ({"items": {"DV-GREEDY": {"tests": 9}}}, "items.DV-GREEDY.tests"),
    ({"items": {"DV-GREEDY": {"passed": 9}}}, "items.DV-GREEDY.passed"),
    ({"items": {"DV-GREEDY": {"failed": 9}}}, "items.DV-GREEDY.failed"),
    ({"items": {"DV-GREEDY": {"not_run": 9}}}, "items.DV-GREEDY.not_run"),
    ({"items": {"DV-GREEDY": {"families": ["crystal"]}}}, "items.DV-GREEDY.families"),
    ({"exception": [{"item": "DV-GREEDY"}]}, "exception"),
])
def test_a_difference_is_named(change: dict[str, Any], named: str) -> None:
    def merged(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
        return {**a, **{key: merged(a[key], value) if isinstance(value, dict) else value for key, value in b.items()}}

    first = made(RIGHT)
    (line,) = certificate.differences(first, merged(first, change))
    assert line.partition(":")[0] == named


def test_day_machine_and_number_of_examples_are_no_difference() -> None:
    first = made(RIGHT)
    other = {**first, "date": "2000-01-01", "device": {}, "counts": {**first["counts"], "examples": 1}}
    assert certificate.differences(first, other) == []


def test_a_check_repeats_the_run_that_the_certificate_tells_of(tmp_path: Path) -> None:
    (tmp_path / "known.toml").write_text(EXCEPTION, encoding="utf-8")
    options = ["--seed", "7", "--precision", "float64", "--profile", "few"]
    told = made(RIGHT, "--exceptions", str(tmp_path / "known.toml"), *options)
    asked = parsed(["--check", "c.toml"])
    found = certificate.repeated(asked, Path("c.toml"), told)
    assert replace(found, check=None) == parsed(
        ["--backend", "mine:MINE", *options, "--exceptions", "c.toml", "--out", str(asked.out)]
    )


def test_other_examples_are_checked_as_well() -> None:
    """What fails on them alone is a difference; what they find less is none."""
    told, other = made(RIGHT, "--seed", "7"), made(WRONG, "--seed", "8")
    assert certificate.new_failures(told, made(RIGHT, "--seed", "8")) == certificate.new_failures(other, told) == []
    found = certificate.new_failures(told, other)
    assert [line.partition(" ")[0] for line in found] == ["DV-COSINE", "DV-GREEDY"]
    assert "b is wrong\nx=0\nrepeat: kvspec verify --backend mine:MINE --seed 8 -- b" in found[0]


STRANGER = "sh -c 'touch ran; ./engine'"


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Check a certificate that names a command; nothing of it may be started."""
    def asked(change: dict[str, Any], *words: str) -> int:
        told = made(RIGHT, "--seed", "7")
        told["subject"] |= {"kind": "command", "named": STRANGER}
        write(told | change, tmp_path / "c.toml")
        monkeypatch.setattr("sys.argv", ["verify", "--check", "c.toml", *words])
        return door.main()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("conformance.verify.runs.subprocess.Popen", None)
    return asked


@pytest.mark.law("one-line-with-the-way-out")
@pytest.mark.parametrize("answer", [None, "", "n\n"])
def test_what_a_certificate_runs_is_shown_and_asked_for(
    answer: str | None, stranger: Callable[..., int], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: answer is not None, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: (answer or "").strip())
    assert stranger({}) == 2
    said = capsys.readouterr()
    assert "kvspec verify --command 'sh -c '\"'\"'touch ran; ./engine'\"'\"'' --precision float64 --seed 7" in said.out
    assert ("add --yes" if answer is None else "nothing was run") in said.err


def test_with_yes_nobody_is_asked(stranger: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    """The files differ, so that nothing runs after all; an escape sequence in the command is shown as text."""
    told = {"kind": "command", "named": STRANGER, "digest": "\x1b[2J"}
    assert stranger({"run": {"profile": "ci", "model": "\x1b[2J"}, "subject": told}, "--yes") == 1
    said = capsys.readouterr().out
    assert "the files of sh" in said
    assert "\\x1b[2J" in said
    assert "\x1b" not in said


def test_another_version_of_the_specification_is_named_before_anything_runs(
    stranger: Callable[..., int], capsys: pytest.CaptureFixture[str],
) -> None:
    assert stranger({"spec": "0.0.9", "kvspec": "0.0.9"}) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("the certificate is of specification 0.0.9, this is ")
    assert "nothing was run: check it with kvspec 0.0.9, or make a new one" in line


@pytest.mark.parametrize("change", [
    {"verdict": "passes the quick profile"}, {"run": {"profile": "x"}}, {"schema": 3},
    {"device": 1}, {"failing": 1}, {"items": {"CC-CUT": 1}}, {"items": {"CC-CUT": {"verdict": "pass"}}},
])
def test_what_is_no_certificate_of_a_whole_run_is_refused(
    change: dict[str, Any], stranger: Callable[..., int], capsys: pytest.CaptureFixture[str],
) -> None:
    assert stranger(change, "--yes") == 2
    assert "must be a certificate of " in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "verdict"), [("policy", "keeps its promises"), ("backend", "certified")])
def test_a_certificate_of_schema_1_is_read_in_the_words_of_this_one(kind: str, verdict: str, tmp_path: Path) -> None:
    told = made(RIGHT)
    old = {**told, "schema": 1, "subject": {**told["subject"], "kind": kind}}
    for name in ("judged", "unproven"):
        del old[name]
    old["items"] = {item: {name: value for name, value in row.items() if name != "not_run"}
                    for item, row in told["items"].items()}
    write(old, tmp_path / "old.toml")
    found = certificate.read(tmp_path / "old.toml")
    assert (found["schema"], found["verdict"]) == (2, verdict)
    assert [line for line in certificate.differences(found, told) if kind == "backend"] == []
    schema = json.loads((SPEC / "certificate.schema.json").read_text(encoding="utf-8"))
    pytest.importorskip("jsonschema").validate(found, schema)
