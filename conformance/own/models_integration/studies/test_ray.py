"""The same sweep by actors of Ray, half of which are killed twice. `nox -s lab -- extra ray` runs this."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the sweep drives transformers models")
pytest.importorskip("ray", reason="actors of Ray: nox -s lab -- extra ray runs this")

from conformance.own.models_integration.studies.experiments import ROWS, RULES, SLOW, holders, measured
from conformance.paths import ROOT
from models_integration.studies.results import load_rows

pytestmark = pytest.mark.law("promised-is-there-forgotten-is-not")

def sweep(rules: Path, out: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "models_integration.cli", "sweep", str(rules), "--out", str(out), *options]
    path = os.pathsep.join([str(ROOT), str(rules.parent)])
    environment = {**os.environ, "PYTHONPATH": path, "RAY_worker_niceness": "0"}
    return subprocess.Popen(command, cwd=rules.parent, env=environment, stdout=subprocess.PIPE, text=True)


def test_killed_actors_make_the_rows_of_one_process(tmp_path: Path, one_thread: None) -> None:
    (tmp_path / "slow.py").write_text(SLOW, encoding="utf-8")
    (rules := tmp_path / "sweep.toml").write_text(RULES.replace('"streamingllm"', '"slow:POLICY"'), encoding="utf-8")
    alone, together = tmp_path / "alone", tmp_path / "together"
    sweep(rules, alone).communicate()
    running = sweep(rules, together, "--engine", "ray", "--workers", "4")
    killed: set[int] = set()
    for stored in (2, 5):
        while len(load_rows(together / "study.jsonl")) < stored or len(holders(together) - killed) < 2:
            assert running.poll() is None, running.communicate()
            time.sleep(0.02)
        for process in sorted(holders(together) - killed)[:2]:
            os.kill(process, signal.SIGKILL)
            killed.add(process)
    said, _ = running.communicate()
    assert running.returncode == 0, said
    assert measured(together) == measured(alone)
    assert len(measured(alone)) == ROWS
    assert len(killed) == 4
    assert not list(together.glob(".*.lease"))
    assert f"study.jsonl: {ROWS} of {ROWS} samples done, 0 failed" in said
