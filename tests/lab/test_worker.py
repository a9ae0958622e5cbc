"""The worker that tries mutants, on a module of a few lines."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from conformance.paths import ROOT
from lab.mutants.results import Result, append, read

TOY = '''
def clamp(x, low):
    if low < 0:
        raise ValueError(low)
    return low if x < low else x


def spin(n):
    while n > 0:
        n -= 1
    return 10 // (n + 2)
'''

TESTS = '''
import pytest, toy

def test_clamp():
    assert [toy.clamp(x, 2) for x in (1, 2, 3)] == [2, 2, 3]
    with pytest.raises(ValueError):
        toy.clamp(1, -1)

def test_spin():
    assert toy.spin(3) == 5
'''

OUTCOMES = {
    "x < low -> x <= low": "survived", "x < low -> x > low": "assertion", "low < 0 -> low < -9": "assertion",
    "n -= 1 -> n += 1": "timeout", "n + 2 -> n - 2": "assertion", "n + 2 -> n * 0": "error",
}
TRY_ALL = """
import sys; from functools import partial; from pathlib import Path
import toy
from lab.mutants import results, worker
root, folder = map(Path, sys.argv[1:3]); worker.LIMITS.update(dev=1.0, ci=1.0)
source = (root / "toy.py").read_text()
trials = [
    results.Trial(key, "text", lambda test: True, partial(exec, source.replace(*key.split(" -> ")), vars(toy)),
                  lambda test: test.name)
    for key in sys.argv[3:]
]
trials.append(results.Trial("untested", "text", lambda test: False, lambda: None, lambda test: test.name))
results.run(root, trials, ["test_toy.py"], folder)
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tree")
    (root / "toy.py").write_text(TOY)
    (root / "test_toy.py").write_text(TESTS)
    return root


def try_all(tree: Path, folder: Path) -> str:
    """Try all mutants of the toy module in a separate process. Mutants that loop have a short time limit."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-c", TRY_ALL, str(tree), str(folder), *OUTCOMES], cwd=tree, env=environment,
        capture_output=True, text=True, check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def stored(folder: Path) -> dict[str, Result]:
    return read(folder, dict.fromkeys([*OUTCOMES, "untested"], "text"))


@pytest.fixture(scope="module")
def verdicts(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verdicts")
    try_all(tree, folder)
    return folder


@pytest.mark.nightly
def test_worker_tells_killed_survived_and_timed_out_apart(verdicts: Path) -> None:
    results = stored(verdicts)
    assert {key: one.outcome for key, one in results.items()} == {**OUTCOMES, "untested": "survived"}
    assert results["n + 2 -> n * 0"].raised.partition(":")[0] == "ZeroDivisionError"
    assert {one.profile for one in results.values() if not one.killed} == {"ci"}
    assert results["untested"].ran == 0


@pytest.mark.nightly
def test_run_continues_after_an_incomplete_line(tree: Path, verdicts: Path, tmp_path: Path) -> None:
    """Check that a truncated line is tried again, and that complete lines are not."""
    lines = (verdicts / "results.jsonl").read_text().splitlines()
    killed = [line for line in lines if '"assertion"' in line]
    others = [line for line in lines if '"assertion"' not in line]
    (tmp_path / "results.jsonl").write_text("\n".join([*others, *killed[1:], killed[0][:20]]) + "\n")
    number = len(OUTCOMES) + 1
    assert f"{number} mutants, {number - 1} tried before, 1 to try" in try_all(tree, tmp_path)
    assert {key: one.outcome for key, one in stored(tmp_path).items()} == {**OUTCOMES, "untested": "survived"}


@pytest.mark.nightly
def test_test_that_fails_without_mutant_kills_nothing(tree: Path, tmp_path: Path) -> None:
    shutil.copytree(tree, tmp_path / "tree")
    (tmp_path / "tree" / "test_toy.py").write_text(TESTS.replace("[2, 2, 3]", "[2, 2, 4]"))
    assert "judges nothing: test_toy.py::test_clamp" in try_all(tmp_path / "tree", tmp_path / "verdicts")
    results = stored(tmp_path / "verdicts")
    assert results["x < low -> x > low"].outcome == "survived"
    assert results["n + 2 -> n - 2"].outcome == "assertion"


def test_verdict_holds_for_one_digest(tmp_path: Path) -> None:
    result = Result("key", "new", "survived", "ci", "", "", 3, 0.5)
    append(tmp_path, replace(result, key="old", digest="gone"))
    append(tmp_path, result)
    append(tmp_path, replace(result, outcome="assertion"))
    assert read(tmp_path, {"old": "new", "key": "new"}) == {"key": replace(result, outcome="assertion")}
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    assert [json.loads(line)["key"] for line in lines] == ["old", "key", "key"]
