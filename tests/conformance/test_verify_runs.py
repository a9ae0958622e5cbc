"""`kvspec verify` from options to exit code. `--check` names the differences, and asks before it runs a command."""

import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kvspec
from conformance.paths import ROOT
from conformance.verify import __main__ as verify_main
from conformance.verify import certificate, runs
from conformance.verify.certificate import write
from conformance.verify.outcomes import verdicts_of
from conformance.verify.request import parsed
from kvspec.cli.app import verify_here
from spec.errors import SpecError
from spec.files import check_results
from tests.conformance.test_verify import EXCEPTION, RIGHT, WRONG, certified
from tests.engine import forger

pytestmark = pytest.mark.law("figures-are-counted-right")

ENGINES = """
import os
from dataclasses import replace
from unittest import SkipTest
from reference.backend import BACKEND

class Zeros(type(BACKEND.crystal)):
    def score(self, D, *given):
        return 0.0 * D

class Death(type(BACKEND.crystal)):
    def score(self, *given):
        os._exit(3)

class Shy(type(BACKEND.crystal)):
    def score(self, D, *given):
        if len(D) > 3:
            raise SkipTest("backend 'x' has no stage family 'crystal'")
        return super().score(D, *given)

NONE = dict.fromkeys(("breath", "diversity", "nestedkv", "policies"))
WRONG, DEAD, SHY, RIGHT = (
    replace(BACKEND, name=kind.__name__, crystal=kind(), **NONE)
    for kind in (Zeros, Death, Shy, type(BACKEND.crystal))
)
"""
SUITE = """
from pathlib import Path

import pytest

import kvspec
from hypothesis import given
from hypothesis import strategies as st

from conformance.suite.test_diversity import test_larger_sets_are_those_of_algorithm_1
from conformance.suite.test_score import test_the_score_equals_the_brute_force

@pytest.mark.spec("CC-COUNT")
@given(x=st.integers(0, 2**40))
def test_draws(backend_under_test, x):
    with Path("draws.txt").open("a") as file:
        file.write(f"{x}\\\\n")

@pytest.mark.spec("CC-CUT")
@pytest.mark.parametrize("case", ["a", "b"])
def test_known(backend_under_test, case):
    assert case == "a"

@pytest.fixture
def broken():
    yield
    raise ValueError("afterwards")

@pytest.mark.spec("CC-MERGE")
def test_that_breaks_afterwards(backend_under_test, broken):
    pass
"""
KNOWN = """
[[exception]]
{grain} = "{subject}"
kind = "xfail"
reason = "known"
issue = "https://example.org/7"
expiry = 2999-01-01
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same_seeds: None) -> Path:
    """Return a folder with engines. A separate suite runs there with few examples."""
    (tmp_path / "suite").mkdir()
    (tmp_path / "suite/test_tiny.py").write_text(SUITE.replace("\\\\n", "\\n"), encoding="utf-8")
    wide = "def test_wide(backend_under_test):\n    assert False\n"
    (tmp_path / "suite/test_scale_tiny.py").write_text(wide, encoding="utf-8")
    (tmp_path / "engines.py").write_text(ENGINES, encoding="utf-8")
    for subject, grain in (("CC-CUT", "item"), ("test_tiny.py::test_known[c]", "test")):
        (tmp_path / f"{grain}.toml").write_text(KNOWN.format(grain=grain, subject=subject), encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("KVSPEC_PROFILE", "few")
    monkeypatch.setenv("PYTEST_ADDOPTS", "--no-such-option")  # These options of the user must not apply here.
    monkeypatch.setattr(runs, "SUITE", tmp_path / "suite")
    monkeypatch.setattr(runs, "SCALE", tmp_path / "suite/test_scale_*.py")
    monkeypatch.setattr("conformance.verify.runs.SUITE", tmp_path / "suite")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "engines", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def asked(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["verify", *words])
    return verify_main.main()


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), SystemExit(143)], ids=["Ctrl-C", "SIGTERM"])
def test_a_stopped_run_prints_the_items_decided_so_far(
    stop: BaseException, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    """Stop after both tests of CC-CUT, at the first test that begins after the failure of CC-SCORE."""
    received = runs._received

    def until_stop(*given: Any) -> Iterator[dict[str, Any]]:
        ended = set[str]()
        for line in received(*given):
            yield line
            ended |= {name for name in ("known[b]", "brute_force") if line.get("test", "").endswith(name)}
            if "began" in line and len(ended) == 2:
                raise stop

    monkeypatch.setattr(runs, "_received", until_stop)
    options = "--backend", "engines:WRONG", "--exceptions", "item.toml", "--out", "found"
    try:
        code: Any = asked(monkeypatch, *options)
    except SystemExit as ended:
        code = ended.code
    assert code == (130 if isinstance(stop, KeyboardInterrupt) else 143)
    printed = capsys.readouterr().err
    assert re.search(r"stopped after \d of \d tests; the items decided so far:\n", printed)
    assert re.search(r"\n  CC-SCORE fails: \S+", printed)
    assert "\n  excepted, in all tests of the item: CC-CUT\n" in printed
    assert "the process ended" not in printed
    assert not (folder / "found/certificate.toml").exists()


def test_a_wrong_engine_s_certificate_names_the_item_and_can_be_checked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    assert asked(monkeypatch, "--backend", "engines:WRONG", "--exceptions", "item.toml", "--out", "found") == 1
    printed, first = capsys.readouterr().out, (folder / "draws.txt").read_text(encoding="utf-8")
    record = tomllib.loads((folder / "found/certificate.toml").read_text(encoding="utf-8"))
    verdicts = {item: row["verdict"] for item, row in record["items"].items() if row["verdict"] != "not run"}
    assert verdicts == {
        "CC-SCORE": "fail", "CC-NORMALISED-IMPACT": "fail", "CC-COUNT": "pass", "CC-CUT": "excepted",
        "CC-MERGE": "fail", "DV-GREEDY": "not offered", "DV-COSINE": "not offered",
    }
    assert record["items"]["CC-COUNT"]["examples"] == len(first.splitlines()) == 12
    assert record["counts"]["failed"] > 1
    assert record["counts"]["not_run"] == 0
    row = record["items"]["CC-SCORE"]
    assert row["repeat"] == (
        f"kvspec verify --backend engines:WRONG --profile few --seed {record['run']['seed']}"
        " -- test_tiny.py::test_the_score_equals_the_brute_force"
    )
    assert "case=Case(" in row["input"]
    assert row["input"].splitlines()[1] in printed
    assert record["items"]["CC-MERGE"]["found"] == "ValueError: afterwards"
    assert {path.name for path in (folder / "found").iterdir()} == {
        "certificate.toml", "certificate.html", "badge.svg", "summary.md", "junit.xml", "log.txt",
    }

    assert asked(monkeypatch, "--check", "found/certificate.toml", "--out", "again", "--yes") == 0
    printed = capsys.readouterr().out
    assert "the certificate is true" in printed
    assert "the same with the seed of the certificate; now with --seed" in printed
    draws = (folder / "draws.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    assert "".join(draws[:24]) == 2 * first
    assert "".join(draws[24:]) != first

    (folder / "engines.py").write_text(f"{ENGINES}\n", encoding="utf-8")
    assert asked(monkeypatch, "--check", "found/certificate.toml", "--out", "again", "--yes") == 2
    assert "nothing was run" in capsys.readouterr().err


def test_an_engine_that_ends_the_process_fails_the_item_that_it_ended_in(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    assert asked(monkeypatch, "--backend", "engines:DEAD", "--out", "found") == 1
    assert "the process ended with 3 in this test" in capsys.readouterr().out


@pytest.mark.law("the-proof-has-teeth")
def test_an_engine_of_a_command_cannot_forge_its_outcomes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    """Check an engine that searches its inherited state.

    It also searches arguments, environments and open files of the parent process.
    """
    assert asked(monkeypatch, "--command", shlex.join([sys.executable, forger.__file__]), "--out", "found") == 1
    record = tomllib.loads((folder / "found/certificate.toml").read_text(encoding="utf-8"))
    assert record["verdict"] == "not certified"
    assert {"DV-GREEDY", "DV-COSINE"} <= {*record["failing"]}


@pytest.mark.parametrize(("results", "code", "words"), [
    ("a:passed b:passed", 0, ""), ("a:passed b:failed", 1, ""), ("a:failed", 1, ""), ("a:passed b:excepted", 0, ""),
    ("a:passed b:passed", 1, "ended with 1 (a test failed), but no result is a failure"),
    ("a:passed b:failed", 0, "ended with 0 (no test failed), but b failed"),
    ("a:failed a:passed b:passed", 0, "ended with 0 (no test failed), but a failed"),
    ("a:passed", 0, "1 tests have no result, b the first"),
    ("a:passed b:passed c:passed", 0, "of the test c, which pytest did not collect"),
])
def test_results_that_contradict_pytest_are_no_verdict(results: str, code: int, words: str) -> None:
    rows = [dict(zip(("test", "state"), one.split(":"), strict=True)) for one in results.split()]
    collected: dict[str, Any] = {"collected": {"a": {}, "b": {}}}
    reason = runs.contradiction([collected, *rows], code)
    assert words in reason
    assert bool(reason) is bool(words)
    assert runs.contradiction([collected, collected, *rows], code) == "pytest collected its tests 2 times"


def test_an_engine_that_skips_its_own_tests_fails_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    """Check that the engine uses the words with which the suite skips missing functions."""
    assert asked(monkeypatch, "--backend", "engines:SHY", "--out", "found", "--quick") == 1
    printed = capsys.readouterr().out
    assert "CC-SCORE fails" in printed
    assert f"crystal.score raised SkipTest at {folder}/engines.py:" in printed
    record = tomllib.loads((folder / "found/quick.toml").read_text(encoding="utf-8"))
    assert record["items"]["CC-SCORE"]["verdict"] == "fail"


def test_nothing_runs_after_the_first_failure_if_that_is_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two tests of this engine fail."""
    words = ("--backend", "engines:WRONG", "--exceptions", "item.toml", "--out", "found", "--quick", "--fail-fast")
    assert asked(monkeypatch, *words) == 1
    counts = tomllib.loads((folder / "found/quick.toml").read_text(encoding="utf-8"))["counts"]
    assert counts["failed"] == 1
    assert counts["not_run"] > 0


def test_a_quick_run_leaves_full_sizes_out_and_certifies_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    """The tiny suite decides only few items, so the exit code is 1."""
    assert asked(monkeypatch, "--backend", "engines:RIGHT", "--quick", "--seed", "7", "--exceptions", "item.toml") == 1
    printed = capsys.readouterr().out
    assert "this is no certificate" in printed
    assert "CC-MERGE fails" in printed
    assert "test_wide" not in Path("results/verify/log.txt").read_text(encoding="utf-8")
    assert {path.name for path in Path("results/verify").iterdir()} == {
        "log.txt", "quick.toml", "summary.md", "junit.xml",
    }


def test_a_run_replaces_the_log_of_a_run_without_tests(tmp_path: Path) -> None:
    """pytest may stop before it prints its first line, for example if a model is missing."""
    (tmp_path / "log.txt").write_bytes(runs.LOG + b"ERROR: no model\n")
    check_results("out", tmp_path, verify_main.FILES)
    (tmp_path / "log.txt").write_bytes(b"ERROR: no model\n")
    with pytest.raises(SpecError, match="kvspec did not make the file"):
        check_results("out", tmp_path, verify_main.FILES)


ABSTAINING = """
from typing import get_args

import pytest

from conformance.abstentions import State, abstain

WORDS = {
    "server: size": "model has no stage family", "server: masking": "budget: N/A",
    "server: policy": "model: not served", "server: eviction": "snapkv: not promised",
}

@pytest.mark.parametrize("group", ["recalled", "at once"])
@pytest.mark.parametrize("words", [pytest.param(words, marks=pytest.mark.row(row)) for row, words in WORDS.items()])
def test_rule(words, group):
    if group == "at once":
        pytest.skip(f"at once: server = 'http://127.0.0.1:1': answered 500 to 2 ids: {words}")

@pytest.fixture(scope="session")
def lacking(request):
    abstain("not offered", "backend 'mine' has no stage family 'breath'")

@pytest.mark.row("whole: fixture")
@pytest.mark.parametrize("time", [1, 2])
def test_fixture(lacking, time):
    pass

ROWS = {state: pytest.mark.row(f"whole: {state}") for state in get_args(State)}

@pytest.mark.parametrize("state", [pytest.param(state, marks=row) for state, row in ROWS.items()])
def test_state(state):
    abstain(state, f"the cache: {state}")
"""


def test_the_reason_of_a_skip_decides_no_state(folder: Path) -> None:
    """A server that fails with the words of an abstention is undecided. kvspec's abstentions have their states."""
    (folder / "suite/test_tiny.py").write_text(ABSTAINING, encoding="utf-8")
    record = runs.judged(parsed(["--backend", "numpy", "--quick"]), folder / "log.txt")
    verdicts = verdicts_of(record, engine=False)
    rules = ["server: eviction", "server: masking", "server: policy", "server: size"]
    assert (verdicts.missing, verdicts.certified) == (rules, False)
    assert {row: verdict for row, verdict in verdicts.items.items() if row not in rules} == {
        "whole: fixture": "not offered", "whole: not offered": "not offered", "whole: not served": "not served",
        "whole: not promised": "not promised", "whole: N/A": "N/A",
    }
    assert {one.reason for one in verdicts.outcomes if one.items == ["whole: N/A"]} == {"the cache: N/A"}


@pytest.mark.law("one-line-with-the-way-out")
def test_an_exception_for_a_case_that_is_not_there_ends_the_run_before_its_tests(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    assert asked(monkeypatch, "--backend", "engines:RIGHT", "--exceptions", "test.toml") == 2
    (output,) = capsys.readouterr().err.splitlines()
    assert "unknown test 'test_tiny.py::test_known[c]'" in output
    assert not Path("draws.txt").exists()


@pytest.mark.law("an-identity-tells-apart")
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

    first = certified(RIGHT)
    (line,) = certificate.differences(first, merged(first, change))
    assert line.partition(":")[0] == named


@pytest.mark.law("an-identity-tells-apart")
def test_day_machine_and_number_of_examples_are_no_difference() -> None:
    first = certified(RIGHT)
    other = {**first, "date": "2000-01-01", "device": {}, "counts": {**first["counts"], "examples": 1}}
    assert certificate.differences(first, other) == []


@pytest.mark.law("an-identity-tells-apart")
def test_a_check_repeats_the_run_that_the_certificate_tells_of(tmp_path: Path) -> None:
    (tmp_path / "known.toml").write_text(EXCEPTION, encoding="utf-8")
    options = ["--seed", "7", "--precision", "float64", "--profile", "few", "--as", "knorm"]
    record = certified(RIGHT, "--exceptions", str(tmp_path / "known.toml"), *options)
    asked = parsed(["--check", "c.toml"])
    actual = certificate.repeated(asked, Path("c.toml"), record)
    assert replace(actual, check=None) == parsed(
        ["--backend", "mine:MINE", *options, "--exceptions", "c.toml", "--out", str(asked.out)]
    )


@pytest.mark.law("an-identity-tells-apart")
def test_other_examples_are_checked_as_well() -> None:
    """A failure only on the new examples is a difference. Fewer failures are no difference."""
    right, wrong = certified(RIGHT, "--seed", "7"), certified(WRONG, "--seed", "8")
    reseeded = certified(RIGHT, "--seed", "8")
    assert certificate.new_failures(right, reseeded) == certificate.new_failures(wrong, right) == []
    actual = certificate.new_failures(right, wrong)
    assert [line.partition(" ")[0] for line in actual] == ["DV-COSINE", "DV-GREEDY"]
    assert "b is wrong\nx=0\nrepeat: kvspec verify --backend mine:MINE --seed 8 -- b" in actual[0]


STRANGER = "sh -c 'touch ran; ./engine'"


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Return a function that checks a certificate with a command. No part of the command may be started."""
    def asked(change: dict[str, Any], *words: str) -> int:
        record = certified(RIGHT, "--seed", "7")
        record["subject"] |= {"kind": "command", "named": STRANGER}
        whole = {name: value for name, value in (record | change).items() if value is not None}
        write(whole, tmp_path / "c.toml")
        monkeypatch.setattr("sys.argv", ["verify", "--check", "c.toml", *words])
        monkeypatch.setattr("conformance.verify.runs.subprocess.Popen", None)
        return verify_main.main()

    monkeypatch.chdir(tmp_path)
    return asked


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, in which two files would hide modules of Python."""
    for name in ("secrets", "typing"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'w').close()\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.law("an-object-proves-itself")
def test_no_file_beside_a_certificate_runs_before_the_question(
    hostile: Path, capfd: pytest.CaptureFixture[str],
) -> None:
    write(certified(RIGHT, "--seed", "7"), hostile / "c.toml")
    assert verify_here(["--check", "c.toml"]) == 2
    assert "this certificate runs code on this machine" in capfd.readouterr().out
    assert not (hostile / "ran").exists()


@pytest.mark.law("an-object-proves-itself")
def test_the_process_of_the_tests_imports_no_file_that_hides_a_module(hostile: Path) -> None:
    words = ["--backend", "numpy", "--", "-q", "--collect-only", "test_nestedkv.py::test_equal_keys_score_zero"]
    assert runs.selected(parsed(words)) == 0
    assert not (hostile / "ran").exists()


LATE = """
def MAKE(**constants):
    from kvspec_beside import POLICY
    return POLICY
"""


@pytest.mark.law("as-it-is-described")
def test_a_policy_imports_a_module_of_its_folder_late(hostile: Path) -> None:
    """Check the import in a function, which runs after the module of the policy was loaded."""
    (hostile / "kvspec_late.py").write_text(LATE, encoding="utf-8")
    beside = "from reference.policies.names import make_policy\nPOLICY = make_policy('knorm', {})\n"
    (hostile / "kvspec_beside.py").write_text(beside, encoding="utf-8")
    words = ["--policy", "kvspec_late:MAKE", "--as", "knorm", "--profile", "few", "--"]
    assert verify_here([*words, "-q", "test_method.py::test_the_kept_sets_are_those_of_the_method"]) == 0
    assert not (hostile / "ran").exists()


@pytest.mark.law("one-line-with-the-way-out")
@pytest.mark.parametrize("answer", [None, "", "n\n"])
def test_what_a_certificate_runs_is_shown_and_asked_for(
    answer: str | None, stranger: Callable[..., int], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: answer is not None, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: (answer or "").strip())
    assert stranger({}) == 2
    printed = capsys.readouterr()
    command = "kvspec verify --command 'sh -c '\"'\"'touch ran; ./engine'\"'\"'' --precision float64 --seed 7"
    assert command in printed.out
    assert ("add --yes" if answer is None else "was not run") in printed.err


@pytest.mark.law("an-identity-tells-apart")
def test_with_yes_nobody_is_asked(stranger: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    """The files differ, so nothing runs. An escape sequence in the command is shown as text."""
    record = {"kind": "command", "named": STRANGER, "digest": "\x1b[2J"}
    assert stranger({"run": {"profile": "ci", "model": "\x1b[2J"}, "subject": record}, "--yes") == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("kvspec: the files of sh -c 'touch ran; ./engine' (PATH/sh) differ from those of the")
    assert "restore the files, or make a new certificate: kvspec verify --command" in printed.err
    assert "--seed" not in printed.err
    assert "\\x1b[2J" in printed.out
    assert "\x1b" not in printed.out + printed.err


@pytest.mark.law("an-identity-tells-apart")
def test_another_version_of_the_specification_is_named_before_anything_runs(
    stranger: Callable[..., int], capsys: pytest.CaptureFixture[str],
) -> None:
    assert stranger({"schema": 1, "spec": "0.0.9", "kvspec": "0.0.9"}) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kvspec: the certificate is of specification 0.0.9, this is ")
    assert "nothing was run: check it with kvspec 0.0.9, or make a new one" in line


WRONG_OPTIONS: list[dict[str, Any]] = [
    {"methods": 5}, {"methods": [5]}, {"methods": "knorm"}, {"timeout": "1"}, {"timeout": 1e300},
    {"timeout": -1.0}, {"seed": -1}, {"seed": True},
    {"precision": "float8"}, {"model": 5}, {"positions": "text"},
]
WRONG_SUBJECTS: list[dict[str, Any]] = [{"kind": []}, {"named": 5}, {"digest": {}}]


@pytest.mark.law("an-identity-tells-apart")
@pytest.mark.parametrize("change", [
    {"verdict": "passes the quick profile"}, {"verdict": "passes the quick run"}, {"run": {"profile": "x"}},
    {"schema": 3},
    {"device": 1}, {"failing": 1}, {"items": {"CC-CUT": 1}}, {"items": {"CC-CUT": {"verdict": "pass"}}},
    {"verdict": None}, {"verdict": 1}, {"schema": [2]}, {"exception": 5}, {"exception": [5]}, {"run": {"profile": []}},
    *({"run": {"profile": "ci", **run}} for run in WRONG_OPTIONS),
    *({"subject": {"kind": "command", "named": "./engine", "digest": "0", **subject}} for subject in WRONG_SUBJECTS),
])
def test_what_is_no_certificate_of_a_whole_run_is_refused(
    change: dict[str, Any], stranger: Callable[..., int], capsys: pytest.CaptureFixture[str],
) -> None:
    assert stranger(change, "--yes") == 2
    assert " certificate of " in capsys.readouterr().err


@pytest.mark.law("one-line-with-the-way-out")
@pytest.mark.parametrize(("asked", "complaint"), [
    ("--backend numpy", "KVSPEC_PROFILE = 'weekly': must be one of few"),
    ("--cache mine:run", "needs torch, which is not installed: pip install 'kvspec[models]'"),
])
def test_an_unknown_profile_and_missing_torch_are_refused(
    asked: str, complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    if "--cache" in asked:
        monkeypatch.setattr("conformance.verify.subject.find_spec", lambda name: None)
    else:
        monkeypatch.setenv("KVSPEC_PROFILE", "weekly")
    monkeypatch.setattr("sys.argv", ["verify", *asked.split()])
    assert verify_main.main() == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.law("one-line-with-the-way-out")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "verify = None: give exactly one of backend, command, policy, cache"),
        ({"policy": "snapkv", "backend": "numpy"}, "give exactly one of"),
        ({"backend": "numpy", "precision": "float16"}, "precision = 'float16': must be one of float64, float32"),
        ({"policy": "snapkv", "profile": "fast"}, "profile = 'fast': must be one of few"),
        ({"cache": "a:B", "positions": "absolute"}, "positions = 'absolute': must be one of kept, renumbered"),
        ({"policy": "snapkv", "seed": "7"}, "seed = '7': must be a number"),
        ({"policy": "snapkv", "timeout": 3.0}, "timeout = 3.0: can be given only with command"),
        ({"policy": "snapkv", "method": "snapvk"}, "method = 'snapvk': is none of the"),
        ({"policy": "snapkv", "method": ["snapkv", "h2o"]}, "method = 'snapkv,h2o': must be one method"),
        ({"cache": "a:B", "method": "snapkv"}, "method = 'snapkv': can be given only with backend or command"),
        ({"policy": "nothing:HERE"}, "nothing:HERE"),
    ],
)
def test_the_function_raises_for_wrong_options(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=re.escape(words)):
        kvspec.verify(**options, out=tmp_path)
