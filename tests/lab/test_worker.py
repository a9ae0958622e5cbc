"""The worker that tries mutants, on a module of a few lines."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conformance.paths import ROOT

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
import json, sys; from dataclasses import asdict; from functools import partial; from pathlib import Path
import toy
from lab.mutants import worker
root = Path(sys.argv[1]); worker.LIMITS.update(dev=1.0, ci=1.0)
source = (root / "toy.py").read_text()
trials = [
    worker.Trial(key, lambda test: True, partial(exec, source.replace(*key.split(" -> ")), vars(toy)),
                 lambda test: test.name)
    for key in sys.argv[2:]
]
trials.append(worker.Trial("untested", lambda test: False, lambda: None, lambda test: test.name))
verdicts = worker.run(root, trials, ["test_toy.py"])
print(json.dumps({key: asdict(one) for key, one in verdicts.items()}))
"""


def tried(root: Path, tests: str, *keys: str) -> tuple[str, Any]:
    """Try mutants of the toy module in a separate process. Return its output, and the verdicts.

    Mutants that loop have a short time limit.
    """
    (root / "toy.py").write_text(TOY)
    (root / "test_toy.py").write_text(tests)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-c", TRY_ALL, str(root), *keys], cwd=root, env=environment, capture_output=True, text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.nightly
def test_outcomes_of_mutants_and_a_test_that_fails_without_a_mutant(tmp_path: Path) -> None:
    """Check that a test that fails without a mutant kills no mutant."""
    _, verdicts = tried(tmp_path, TESTS, *OUTCOMES)
    assert {key: one["outcome"] for key, one in verdicts.items()} == {**OUTCOMES, "untested": "survived"}
    assert verdicts["n + 2 -> n * 0"]["raised"].partition(":")[0] == "ZeroDivisionError"
    assert {one["profile"] for one in verdicts.values() if one["outcome"] != "assertion"} == {"ci"}
    assert verdicts["untested"]["ran"] == 0
    wrong = TESTS.replace("[2, 2, 3]", "[2, 2, 4]")
    output, verdicts = tried(tmp_path, wrong, "x < low -> x > low", "n + 2 -> n - 2")
    assert "judges nothing: test_toy.py::test_clamp" in output
    assert [one["outcome"] for one in verdicts.values()] == ["survived", "assertion", "survived"]
