"""No command overwrites an input file, or replaces a user's file without --force. Texts are read without changes."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the commands drive transformers models")

from typer.testing import CliRunner

import kvspec
from experiments.studies.evidence.rules import rules_text
from experiments.studies.results import load_rows
from experiments.studies.subject import SHIPPED
from experiments.tasks.registry import files_of
from kvspec import cli
from kvspec.cli.app import app
from kvspec.cli.checks import check_folder
from kvspec.cli.study_files import check_outputs, write_outputs
from models_integration.pocket import load_pocket_tokenizer
from spec.errors import SpecError
from spec.files import check_output, check_results, read_text

pytestmark = pytest.mark.law("one-line-with-the-way-out")

OURS = b"somebody's own work, of a week"
READ, KEPT = "is a file that the command reads", "kvspec did not make the file"
Refusal = Callable[[str], str]


@pytest.fixture
def refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refusal:
    """Run a command in a folder with files of the user, and return the line of the error. The files must not change."""
    study = {"title": "t", "models": ["/nowhere"], "contexts": 1, "questions": 1, "tasks": ["needle"],
             "policies": ["knorm"], "budgets": ["0.5"], "lengths": [200], "seeds": [42], "placements": ["after"]}
    names = ("own.html", "own.npz", "own.pt", "own.csv", "own.tex", "own.svg", "own.toml", "text.txt", "heads.tsv")
    folders = ("report.html", "paper.html", "tables.csv", "table-5.tex", "table-13.tex", "summary.md", "log.txt")
    for name in names:
        (tmp_path / name).write_bytes(OURS)
    for name in folders:
        (tmp_path / "mine" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "mine" / name).write_bytes(OURS)
    (tmp_path / "done").mkdir()
    (tmp_path / "done" / "study.jsonl").write_bytes(b"{}\n")
    (tmp_path / "rules.toml").write_text(rules_text(**study), encoding="utf-8")
    (tmp_path / "link.html").symlink_to(tmp_path / "text.txt")
    monkeypatch.chdir(tmp_path)

    def run(line: str) -> str:
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        monkeypatch.setattr(sys, "argv", ["kvspec", *line.split()])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        assert stopped.value.code == 2
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
        return capsys.readouterr().err

    return run


@pytest.mark.parametrize(("line", "word"), [
    ("explain text.txt --out text.txt", READ), ("explain text.txt --out link.html", READ),
    ("explain text.txt --out own.html", KEPT), ("explain text.txt --out text.txt --force", READ),
    ("explain text.txt --beside triattention --calibration own.npz --out own.npz", READ),
    ("calibrate text.txt --out text.txt", READ), ("calibrate heads.tsv --out heads.tsv", READ),
    ("calibrate rules.toml --out rules.toml", READ), ("calibrate own.pt --out own.pt --force", READ),
    ("calibrate text.txt --out own.npz", KEPT), ("calibrate text.txt --out own.pt", KEPT),
    ("compare --model /nowhere --out new --table own.csv", KEPT), ("compare --out new --table own.tex", KEPT),
    ("compare --model /nowhere --out new --figure own.svg", KEPT), ("compare --write-rules own.toml", KEPT),
    ("compare --model /nowhere --out mine", KEPT), ("demo --model /nowhere --out mine", KEPT),
    ("compare --calibration own.toml --write-rules own.toml --force", READ),
    ("study --rules rules.toml --out mine", KEPT), ("study --rules rules.toml --out new --figure own.svg", KEPT),
    ("report done --out done/study.jsonl --force", READ), ("report done --rules rules.toml --out rules.toml", READ),
    ("report done --out own.html", KEPT), ("report done --table own.csv", KEPT), ("report mine", KEPT),
    ("paper crystalcache --model /nowhere --out mine", KEPT), ("paper injection --model /nowhere --out mine", KEPT),
])
def test_no_file_of_the_user_is_replaced(line: str, word: str, refusal: Refusal) -> None:
    message = refusal(line)
    assert word in message
    assert ("--force" in message) is (word == KEPT)
    assert message.count("\n") == 1


@pytest.mark.parametrize("check", [False, True])
def test_a_verdict_replaces_no_file_of_the_user(check: bool, tmp_path: Path) -> None:
    from conformance.verify.__main__ import CHECKS, FILES, check_out
    from conformance.verify.request import parsed

    (tmp_path / "c.toml").write_bytes(OURS)
    subject = ["--check", str(tmp_path / "c.toml")] if check else ["--backend", "numpy"]
    for name in CHECKS if check else FILES:
        folder = tmp_path / name.replace(".", "-")
        folder.mkdir()
        (folder / name).write_bytes(OURS)
        with pytest.raises(SpecError, match=KEPT):
            check_out(parsed([*subject, "--out", str(folder)]))
        check_out(parsed([*subject, "--out", str(folder), "--force"]))
    if not check:
        with pytest.raises(SpecError, match=KEPT):
            kvspec.verify(backend="numpy", quick=True, out=tmp_path / "log-txt")


def test_the_certificate_of_another_subject_is_not_replaced(tmp_path: Path) -> None:
    from conformance.verify.__main__ import check_out
    from conformance.verify.certificate import certificate, write
    from conformance.verify.outcomes import verdicts_of
    from conformance.verify.request import parsed
    from conformance.verify.subject import of_backend

    same = ["--backend", "numpy", "--as", "snapkv(W=16)", "--seed", "3", "--out", str(tmp_path)]
    ran = verdicts_of([{"precision": "float64", "spec": "", "collected": {}}])
    written = certificate(parsed(same), of_backend("numpy"), ran)
    write(written, tmp_path / "certificate.toml")
    check_out(parsed([*same[:4], "--seed", "4", "--out", str(tmp_path)]))
    others = [["--backend", "numba", "--as", "snapkv(W=16)"], ["--policy", "snapkv"], ["--backend", "numpy"], same[:2]]
    for words in [*others, [*same[:3], "snapkv"], ["--backend", "numpy", "--quick"]]:
        with pytest.raises(SpecError, match=r"is the certificate of --backend numpy '--as=snapkv\(W=16.*add --force"):
            check_out(parsed([*words, "--out", str(tmp_path)]))
        check_out(parsed([*words, "--out", str(tmp_path), "--force"]))
    with pytest.raises(SpecError, match="is the certificate of backend numpy"):
        kvspec.verify(policy="snapkv", quick=True, out=tmp_path)


def test_two_options_cannot_have_one_file(tmp_path: Path) -> None:
    """The answers once replaced the table."""
    outputs = {"table": tmp_path / "a.csv", "figure": None, "answers": tmp_path / "x" / ".." / "a.csv"}
    with pytest.raises(SpecError, match=r"answers = .*is also the file of --table"):
        check_outputs(outputs, (), force=True)


def test_a_benchmark_file_with_brackets_in_its_name_is_read(tmp_path: Path) -> None:
    assert files_of(f"ruler-file:{tmp_path}/a(1).jsonl") == [tmp_path / "a(1).jsonl"]
    assert files_of("mine:TASKS") == files_of("needle(depth=0.5)") == []


@pytest.mark.parametrize("target", ["own.html", "nothing"])
@pytest.mark.parametrize("name", [
    "report.html", "study.jsonl", "study.jsonl.cut", "worker-2.log", ".study.jsonl-x.plan", ".study.jsonl-x.lease",
])
def test_no_file_outside_of_a_folder_of_results_is_written(name: str, target: str, tmp_path: Path) -> None:
    """Links in a folder that kvspec recognises were once followed."""
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "study.jsonl").touch()
    (tmp_path / "own.html").write_bytes(OURS)
    (folder / name).unlink(missing_ok=True)
    check_folder("out", folder, "study.jsonl", ["report.html"])
    (folder / name).symlink_to(tmp_path / target)
    with pytest.raises(SpecError, match=f"{name}.* is a symbolic link"):
        check_folder("out", folder, "study.jsonl", ["report.html"], force=True)


@pytest.mark.parametrize("check", [False, True])
def test_a_verdict_follows_no_link(check: bool, tmp_path: Path) -> None:
    from conformance.verify.__main__ import CHECKS, FILES, check_out
    from conformance.verify.request import parsed

    (tmp_path / "own.txt").write_bytes(OURS)
    for name in CHECKS if check else FILES:
        folder = tmp_path / name.replace(".", "-")
        folder.mkdir()
        (folder / "quick.toml").write_bytes(b'schema = 2\nverdict = "x"\n[subject]\n')
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(tmp_path / "own.txt")
        subject = ["--check", "c.toml"] if check else ["--backend", "numpy"]
        with pytest.raises(SpecError, match=f"{name}.* is a symbolic link"):
            check_out(parsed([*subject, "--out", str(folder), "--force"]))


@pytest.mark.parametrize("folder", [False, True])
def test_an_impossible_path_is_refused(folder: bool, tmp_path: Path) -> None:
    """The error of the operating system was once raised."""
    name = "a" * 300
    with pytest.raises(SpecError, match=r"out = .*is not a possible path \(File name too long\); choose"):
        check_results("out", tmp_path / name, ["a.html"]) if folder else check_output("out", tmp_path / name)


def test_an_exceptions_file_is_not_replaced(tmp_path: Path) -> None:
    from conformance.verify.__main__ import check_out
    from conformance.verify.request import parsed

    file = tmp_path / "quick.toml"
    file.write_bytes(b"[[exception]]\n")
    with pytest.raises(SpecError, match=READ):
        check_out(parsed(["--backend", "numpy", "--exceptions", str(file), "--out", str(tmp_path), "--force"]))


def test_what_kvspec_made_is_made_again(tmp_path: Path) -> None:
    """Check that a run is resumed with its report, tables and figures. A page and a calibration are replaced."""
    pytest.importorskip("matplotlib")
    files = [tmp_path / f"made.{kind}" for kind in ("csv", "svg", "tex", "png", "pdf")]
    asked = ["compare", "--length", "200", "--samples", "1", "--tasks", "needle", "--budgets", "0.9", "--policies",
             "knorm", "--backend", "numpy", "--table", str(files[0]), "--figure", str(files[1]), "--out", str(tmp_path)]
    for _ in range(2):
        assert CliRunner().invoke(app, asked).exit_code in (0, 1)
    rows = load_rows(tmp_path / "study.jsonl")
    write_outputs(rows, files[2], files[3])
    write_outputs(rows, None, files[4])
    for file in (*files, tmp_path / "report.html"):
        check_output("out", file)
    (tmp_path / "study.jsonl").unlink()
    check_results("out", tmp_path, ["report.html"])
    (tmp_path / "text.txt").write_text("One sentence. Another sentence. " * 60, encoding="utf-8")
    for command, name, more in (("explain", "page.html", ["--backend", "numpy"]), ("calibrate", "c.npz", [])):
        for _ in range(2):
            line = [command, str(tmp_path / "text.txt"), "--out", str(tmp_path / name), *more]
            result = CliRunner().invoke(app, line)
            assert result.exit_code == 0, result.output


def test_force_replaces_a_file_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_bytes(OURS)
    line = ["compare", "--write-rules", str(tmp_path / "rules.toml"), "--force"]
    assert CliRunner().invoke(app, line).exit_code == 0
    assert (tmp_path / "rules.toml").read_text(encoding="utf-8").startswith("[study]")


@pytest.mark.law("figures-are-counted-right")
def test_positions_are_those_of_the_file(tmp_path: Path) -> None:
    r"""Check text with \r\n, which has more than one token in many vocabularies. With \n, positions would differ."""
    data = b"A line of a file.\r\nAnother line.\rA third one.\r\n" * 6
    (tmp_path / "crlf.txt").write_bytes(data)
    assert read_text("PROMPT", tmp_path / "crlf.txt").encode() == data
    ids = load_pocket_tokenizer(SHIPPED["pocket"])(data.decode()).input_ids
    assert len(ids) > len(load_pocket_tokenizer(SHIPPED["pocket"])(data.decode().replace("\r\n", "\n")).input_ids)
    line = ["keep", str(tmp_path / "crlf.txt"), "--policy", "streamingllm", "--format", "json"]
    assert json.loads(CliRunner().invoke(app, line).stdout)["seen"] == len(ids)
