"""Mistakes that are made in processes are named by the items that they break; the examples conform."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from conformance.own.engine.judge import SELECTED
from conformance.own.engine.planted import EVERY
from conformance.paths import DOCS, ROOT

pytestmark = pytest.mark.law("the-proof-has-teeth")

Reports = Mapping[str, Any]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """All engines judged by one process: its imports take longer than most of its tests."""
    home = tmp_path_factory.mktemp("engines")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    report, examples = home / "report.json", []
    if shutil.which("cc"):
        source = str(DOCS / "examples" / "c" / "engine.c")
        subprocess.run(["cc", "-O2", "-std=c99", source, "-o", str(home / "engine"), "-lm"], check=True)
        examples.append(f"c={home / 'engine'}")
    if shutil.which("node"):
        examples.append(f"javascript={shlex.join(['node', str(DOCS / 'examples' / 'javascript' / 'engine.mjs')])}")
    done = subprocess.run(
        [sys.executable, "-m", "conformance.own.engine.judge", str(report), *examples], cwd=ROOT, text=True,
        env={**clean, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, capture_output=True, check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: Reports = json.loads(report.read_text(encoding="utf-8"))
    return found


def test_the_reference_passes_as_a_process(reports: Reports) -> None:
    """Every test that names a mistake below."""
    assert reports["RIGHT"]["failed"] == {}
    assert reports["RIGHT"]["passed"] >= sum(map(len, SELECTED.values()))
    assert reports["RIGHT"]["code"] == 0


@pytest.mark.parametrize(
    ("engine", "item"),
    [("TIES", "DV-GREEDY"), ("BUDGET", "CC-ALLOCATE"), ("FLOAT32", "CC-ATTENTION"), ("CRASHING", "PO-TOP-UNITS"),
     ("MANY_HEADS", "PO-OBSERVED-ATTENTION")],
)
def test_a_mistake_is_named_by_its_item(reports: Reports, engine: str, item: str) -> None:
    failed = reports[engine]["failed"]
    assert failed
    assert all(item in test["items"] for test in failed.values())
    assert reports[engine]["code"] == 1


def test_a_crash_names_its_request_and_the_rest_is_judged(reports: Reports) -> None:
    """The engine is started again: of the calls, one in a hundred fails."""
    found = reports["CRASHING"]
    calls = len(found["failed"]) + found["passed"]
    for test in found["failed"].values():
        for said in ("EngineCrash: ended with exit code 3", f'{{"id": {EVERY}, "op": "policies.best_tokens"',
                     "standard error: out of scratch memory"):
            assert said in test["text"]
    assert calls == 120
    assert 1 <= len(found["failed"]) <= 2 * calls // EVERY


def test_what_is_wrong_in_many_heads_alone_is_right_in_few(reports: Reports) -> None:
    assert reports["MANY_HEADS"]["passed"] == 1


@pytest.mark.parametrize(("example", "needs"), [("c", "cc"), ("javascript", "node")])
def test_the_examples_conform(reports: Reports, example: str, needs: str) -> None:
    """On what they offer: tests of their families, and all their vectors."""
    if example not in reports:
        pytest.skip(f"{needs} is not installed")
    assert reports[example]["failed"] == {}
    assert reports[example]["passed"] > 80
