"""Workers that share a study write the same rows as one process, even if a worker is killed. Errors are rows too.

`nox -s lab -- extra ray` runs the tests with actors of Ray.
"""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers", reason="the study drives transformers models")

from typer.testing import CliRunner

from conformance.paths import ROOT
from experiments.studies import answers
from experiments.studies.evidence import run as of_study
from experiments.studies.evidence.measure import measure
from experiments.studies.evidence.rules import load_rules
from experiments.studies.leases import Leases
from experiments.studies.report import progress_bar
from experiments.studies.results import ERROR, START, Row, append_row, load_rows, rows_behind
from experiments.studies.subject import Loading
from experiments.studies.workers import Launch, _Worker, run_actors, status
from kvspec.cli.app import app
from models_integration.cache.atomic_file import publish_readable
from models_integration.session.method import method_of
from reference.policies import policy_from_score
from spec.budget import parse_budget
from spec.errors import SpecError
from spec.policy import Needs, Selection
from tests.experiments.studies.experiments import ROWS, RULES, SLOW, command, holders, measured, sweep
from tests.processes import started
from tests.test_documentation import fences

pytestmark = pytest.mark.law("promised-is-there-forgotten-is-not")

STUDY = ("study", "--part", "all")


@pytest.fixture
def rules(tmp_path: Path, one_thread: None) -> Path:
    """Return the rules file of a small study."""
    path = tmp_path / "sweep.toml"
    path.write_text(RULES, encoding="utf-8")
    return path


def of_file(path: Path) -> list[Row]:
    """Return all rows of a file of results, including errors."""
    return rows_behind(path, START)[0]


def swept(rules: Path, out: Path, *options: str) -> Any:
    return CliRunner().invoke(app, [*STUDY, "--rules", str(rules), "--out", str(out), *options])


def test_killed_workers_make_the_rows_of_one_that_is_alone(rules: Path, tmp_path: Path) -> None:
    """Run four workers. Twice, kill two busy workers."""
    alone, together = tmp_path / "alone", tmp_path / "together"
    assert swept(rules, alone).exit_code == 0
    most = tmp_path / "most"
    publish_readable(most, b"0")
    workers = [started(sweep, rules, together) for _ in range(4)]
    for begun in (3, 10 * ROWS):
        while len(at_work := [process for process in workers if process.pid in holders(together)]) < 2:
            assert all(process.is_alive() for process in workers)
            time.sleep(0.02)
        for process in at_work[:2]:
            process.kill()
            process.join()
            workers[workers.index(process)] = started(sweep, rules, together)
        publish_readable(most, str(begun).encode())
    for process in workers:
        process.join()
        assert process.exitcode == 0
    assert measured(together) == measured(alone)
    assert len(measured(alone)) == ROWS
    assert not list(together.glob(".*.lease"))


def test_workers_are_processes_of_the_same_command(rules: Path, tmp_path: Path) -> None:
    """`--workers 2` starts a second process.

    If the second process is killed, the first process measures its samples.
    """
    (tmp_path / "slow.py").write_text(SLOW, encoding="utf-8")
    text = rules.read_text(encoding="utf-8").replace('"snapkv", "streamingllm"', '"slow:POLICY"')
    rules.write_text(text, encoding="utf-8")
    (tmp_path / "wait").touch()
    out = tmp_path / "out"
    first = started(command, tmp_path, *STUDY, "--rules", str(rules), "--out", "out", "--workers", "2")
    while len(at_work := holders(out)) < 2:
        assert first.is_alive()
        time.sleep(0.02)
    (second,) = at_work - {first.pid}
    os.kill(second, signal.SIGKILL)
    (tmp_path / "wait").unlink()
    first.join()
    assert first.exitcode == 0
    assert len(measured(out)) == ROWS
    assert f"samples, 0 of them stored in {Path('out') / 'study.jsonl'}" in (out / "worker-2.log").read_text()
    assert not list(out.glob(".*.lease"))


def started_by_hand(rules: Path, out: Path, *options: str) -> subprocess.Popen[str]:
    """Run `kvspec study` with the rules. Its processes import modules from the folder of the rules."""
    command = [sys.executable, "-m", "kvspec", *STUDY, "--rules", str(rules), "--out", str(out), *options]
    path = os.pathsep.join([str(ROOT), str(rules.parent)])
    environment = {**os.environ, "PYTHONPATH": path, "RAY_worker_niceness": "0"}
    return subprocess.Popen(command, cwd=rules.parent, env=environment, stdout=subprocess.PIPE, text=True)


def test_killed_actors_of_ray_make_the_rows_of_one_process(rules: Path, tmp_path: Path) -> None:
    """Kill half of the actors, twice."""
    pytest.importorskip("ray", reason="actors of Ray: nox -s lab -- extra ray runs this")
    (tmp_path / "slow.py").write_text(SLOW, encoding="utf-8")
    rules.write_text(rules.read_text(encoding="utf-8").replace('"streamingllm"', '"slow:POLICY"'), encoding="utf-8")
    alone, together = tmp_path / "alone", tmp_path / "together"
    started_by_hand(rules, alone).communicate()
    running = started_by_hand(rules, together, "--engine", "ray", "--workers", "4")
    killed: set[int] = set()
    for stored in (2, 5):
        while len(load_rows(together / "study.jsonl")) < stored or len(holders(together) - killed) < 2:
            assert running.poll() is None, running.communicate()
            time.sleep(0.02)
        for process in sorted(holders(together) - killed)[:2]:
            os.kill(process, signal.SIGKILL)
            killed.add(process)
    message, _ = running.communicate()
    assert running.returncode == 0, message
    assert measured(together) == measured(alone)
    assert len(measured(alone)) == ROWS
    assert len(killed) == 4
    assert not list(together.glob(".*.lease"))
    assert f"study.jsonl: {ROWS} of {ROWS} samples done, 0 failed" in message


def test_what_cannot_be_measured_is_a_row_with_its_error(
    rules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One sample runs out of memory, and one raises an error. All other samples are measured.

    With `--again`, the two failed samples are measured too.
    """
    rules.write_text(rules.read_text(encoding="utf-8").replace("contexts = 8", "contexts = 3"), encoding="utf-8")
    errors = [MemoryError("no room"), None, SpecError("budget", 3, "must be more")]

    def failing(*arguments: Any) -> Row:
        if errors and (error := errors.pop(0)) is not None:
            raise error
        return measure(*arguments)

    monkeypatch.setattr(of_study, "measure", failing)
    monkeypatch.setattr("kvspec.cli.study_runs.progress_bar", partial(progress_bar, every=0.0, after=0.0))
    first, path = swept(rules, tmp_path), tmp_path / "study.jsonl"
    assert first.exit_code == 1
    assert f"2 samples in {path} failed, the first by MemoryError: no room; --again makes them again" in first.output
    assert "FAILED" in first.output
    assert [row[ERROR] for row in of_file(path) if ERROR in row] == [
        "MemoryError: no room", "spec.errors.SpecError: budget = 3: must be more",
    ]
    assert len(of_file(path)) == 3
    assert len(load_rows(path)) == len(measured(tmp_path)) == 1
    lines = list(status(tmp_path))
    assert lines[0].endswith("study.jsonl: 1 of 3 samples done, 2 failed")
    assert sum("failed: needle_in_prose, number" in line for line in lines) == 2
    assert swept(rules, tmp_path).exit_code == 1
    assert len(of_file(path)) == 3
    assert swept(rules, tmp_path, "--again").exit_code == 0
    assert swept(rules, tmp_path, "--again").exit_code == 0
    assert len(measured(tmp_path)) == 3
    assert list(status(tmp_path)) == [f"{path}: 3 of 3 samples done, 0 failed"]
    with pytest.raises(SpecError, match=r"status = '.*nosuch': must be the --out folder of a run, but has no study"):
        list(status(tmp_path / "nosuch"))


def test_a_policy_that_keeps_more_than_it_promises_is_caught(
    rules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check that samples of this policy are errors that name the policy."""

    def newest(observation: Any) -> Any:
        return np.tile(np.arange(observation.seen, dtype=np.float64), (observation.groups, 1))

    def greedy(scores: Any, budgets: Any, protected: Any) -> Selection:
        """Keep five tokens more than the budget in each kept set."""
        n = scores.offsets[-1]
        each = [np.arange(n - budget - 5, n) for budget in budgets.tolist()]
        return Selection(np.concatenate(each), np.cumsum([0, *map(len, each)]))

    honest, methods = policy_from_score(newest, needs=Needs()), of_study.methods
    text = rules.read_text(encoding="utf-8").replace("contexts = 8", "contexts = 1")
    rules.write_text(text, encoding="utf-8")
    for policy, errors in ((replace(honest, selector=greedy), 1), (honest, 0)):
        method = method_of(policy, parse_budget("0.5"))
        monkeypatch.setattr(
            "kvspec.cli.study_runs.methods",
            lambda *given, method=method: {**methods(*given), "streamingllm": method},
        )
        out = tmp_path / str(errors)
        assert swept(rules, out).exit_code == errors
        (row,) = of_file(out / "study.jsonl")
        assert row.get(ERROR, "").count("must not be exceeded, but newest keeps 517") == errors


def test_a_unit_that_kills_its_workers_is_left_alone(tmp_path: Path) -> None:
    """The kernel kills processes that use too much memory. The fourth worker does not try the unit."""
    path, tried = tmp_path / "rows.jsonl", list[int]()

    def make_row() -> Row:
        tried.append(1)
        return {"right": 1}

    for deaths in range(4):
        worker = Leases(path, lambda row: str(row["unit"]))
        assert worker.take("a")
        assert worker.deaths == deaths
        row = answers.attempted(make_row, worker)
        worker._held[1].close()  # type: ignore[index]  # the end of a process closes its files
    assert len(tried) == 3
    assert row == {ERROR: "3 workers died while they made it: out of memory, or killed"}


def test_only_what_failed_and_nobody_holds_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for unit in "abc":
        append_row(path, {"unit": unit, **({ERROR: "no room", "traceback": "..."} if unit != "b" else {})})
    with Leases(path, lambda row: str(row["unit"])) as one, Leases(path, lambda row: str(row["unit"])) as other:
        one.again("ab")
        other.again("ab")
        assert one.stored() == other.stored() == {"b", "c"}
        assert other.take("a")
        one.again("ac")
        assert one.stored() == {"b"}
        other.add({"unit": "a"})
        one.again("ab")
        assert one.stored() == {"a", "b"}
    assert [row["unit"] for row in load_rows(path)] == ["b", "a"]


def test_the_status_names_who_is_at_work_and_who_is_dead(tmp_path: Path) -> None:
    path = tmp_path / "study.jsonl"
    names = ("rules", "model", "sample", "placement")
    rows = [{**dict.fromkeys(names, "x"), "sample": at, "seconds": {"prefill": 60, "reading": 40}} for at in range(4)]
    units = [str(of_study.study_unit(row)) for row in rows]
    with of_study.leases(path) as alive:
        assert alive.take(units[0])
        alive.add(rows[0])
        assert alive.take(units[1])
        dead = tmp_path / f".study.jsonl-{units[2]}.lease"
        dead.write_text('{"pid": 0, "host": "here", "since": "noon"}', encoding="ascii")
        alive.plan(units)
        lines = list(status(tmp_path))
    assert lines[0] == f"{path}: 1 of 4 samples done, 0 failed"
    assert sorted("DEAD" in line for line in lines[1:3]) == [False, True]
    assert sum(f"under way: process {os.getpid()} of " in line for line in lines[1:3]) == 1
    assert "  under way: process 0 of here, since noon; DEAD: its sample is taken over" in lines[1:3]
    assert lines[3:] == ["  0:05:00 to go with 1 at work"]


def test_actors_that_still_load_their_models_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    """Replace Ray: at the first check no worker has ended, and at the second check all have ended."""
    path, looks = tmp_path / "study.jsonl", [False, True]

    def wait(logs: list[str], timeout: float) -> tuple[list[str], list[str]]:
        if not looks.pop(0):
            return [], logs
        append_row(path, {})
        return logs, []

    def actor() -> Any:
        return SimpleNamespace(work=SimpleNamespace(remote=lambda arguments, folder, log: log))

    folders: list[Path] = []
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != os.getcwd()])
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(
        init=lambda **_: folders.append(Path.cwd()), shutdown=lambda: None, wait=wait, get=lambda log: 0,
        remote=lambda **_: lambda kind: SimpleNamespace(remote=actor),
    ))
    run_actors([], 2, "", tmp_path, "cpu")
    assert capsys.readouterr().out == f"{path}: 0 samples done, 0 failed\n"
    assert folders != [Path.cwd()], "Ray puts this folder first in sys.path of all actors"


@pytest.mark.law("as-it-is-described")
def test_the_guide_s_rules_are_one_file_of_fifteen_lines(tmp_path: Path) -> None:
    """Check eight policies, four budgets and three tasks. A model with rotary positions supports all of them."""
    text, claims = (fence.text for fence in fences("docs/guide/compare.md") if fence.language == "toml")
    assert len(text.splitlines()) <= 15
    path = tmp_path / "sweep.toml"
    path.write_text(text.replace("path/or/name", "pocket"), encoding="utf-8")
    rules = load_rules(path)
    assert (len(rules.policies), len(rules.budgets), len(rules.tasks)) == (8, 4, 3)
    served = list(of_study.methods(rules, Loading("pocket", "numpy").subject()))
    assert served == [*rules.policies, "random-trunks"]
    path.write_text(f"{text.replace('path/or/name', 'pocket')}\n{claims}", encoding="utf-8")
    assert [claim.difference for claim in load_rules(path).claims] == [0.1, -0.05]


@pytest.mark.law("an-object-proves-itself")
def test_a_worker_imports_no_file_that_hides_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "typing.py").write_text("open('ran', 'w').close()\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["kvspec"])
    log = tmp_path / "worker-2.log"
    with Launch(workers=2).started(tmp_path, "cpu"):
        while not (log.exists() and log.read_bytes()):
            time.sleep(0.02)
    assert b"No such option: --workers" in log.read_bytes()
    assert not (tmp_path / "ran").exists()


@pytest.mark.law("an-object-proves-itself")
def test_an_actor_of_ray_imports_no_file_that_hides_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, paths = Path.cwd(), list[list[str]]()
    monkeypatch.chdir(before)  # the folder after the test
    monkeypatch.setattr(sys, "argv", ["kvspec"])
    monkeypatch.setattr("experiments.studies.workers.run_module", lambda *_, **__: paths.append([*sys.path]))
    assert _Worker().work(["tasks"], str(tmp_path), str(tmp_path / "worker-1.log")) == 0
    assert paths == [[*sys.path, str(tmp_path)]]
