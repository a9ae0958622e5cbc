"""A small sweep, what the processes do that share it, and what they made."""

import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import torch

from conformance.paths import ROOT
from models_integration.cli.study import Running, run
from models_integration.studies import leases
from models_integration.studies.evidence import measure as measures
from models_integration.studies.evidence import run as of_study
from models_integration.studies.evidence.rules import load_rules
from models_integration.studies.leases import holder_of
from models_integration.studies.results import STUDY, Row, load_rows
from models_integration.studies.subject import Loading

__all__ = ["PATIENCE", "ROWS", "RULES", "SLOW", "command", "holders", "measured", "sweep"]

RULES = """
[study]
title = "Small"
model = "pocket"
contexts = 12
questions = 1
seed = 3
lengths = [1024]
placements = ["after"]
tasks = ["needle_in_prose"]
policies = ["snapkv", "streamingllm"]
budgets = ["0.5", "0.8"]
"""
ROWS = 12
PATIENCE = 1.0
SLOW = """
import time
from pathlib import Path

import numpy as np

from models_integration.studies import leases
from reference.policies import policy_from_score
from spec.policy import Needs

leases._BEAT, leases._PATIENCE, leases._PAUSE = 0.1, 1.0, 0.05

def newest(observation):
    while Path("wait").exists():
        time.sleep(0.02)
    time.sleep(0.5)
    return np.tile(np.arange(observation.seen, dtype=np.float64), (observation.groups, 1))

POLICY = policy_from_score(newest, needs=Needs())
"""
"""A module whose policy takes its time, for commands: their workers wait for no minute either."""


def patient(hours: int) -> None:
    """From here on this process is on a machine whose clock is so many hours ahead, and waits for no minute."""
    here = time.time

    def touched(lease: Path) -> None:
        now = time.time()
        os.utime(lease, (now, now))

    leases._BEAT, leases._PATIENCE, leases._PAUSE = PATIENCE / 10, PATIENCE, PATIENCE / 20
    time.time = lambda: here() + 3600 * hours
    Path.touch = touched  # type: ignore[assignment, method-assign]


def sweep(rules: Path, out: Path, hours: int) -> None:
    """`kvspec sweep RULES`, on a machine whose clock is so many hours ahead; no more rows than the file `most` says."""
    torch.set_num_threads(1)
    patient(hours)

    def slowly(*arguments: Any) -> Any:
        while len(load_rows(out / STUDY)) >= int(rules.with_name("most").read_text(encoding="ascii")):
            time.sleep(0.02)
        return {**measures.measure(*arguments), "pid": os.getpid()}

    setattr(of_study, "measure", slowly)  # noqa: B010  # for mypy it is not that module's to give
    run(load_rules(rules), Loading(), Running(out))


def command(folder: Path, *words: str) -> None:
    """`kvspec WORDS`, started in a folder."""
    os.chdir(folder)
    os.environ["PYTHONPATH"] = str(ROOT)
    sys.path.insert(0, str(folder))
    sys.argv = ["kvspec", *words]
    runpy.run_module("models_integration.cli", run_name="__main__")


def measured(out: Path) -> dict[str, Row]:
    """What was measured of each sample, without how long it took and who did it; none of them twice."""
    rows = load_rows(out / "study.jsonl")
    found = {row["sample"]: {k: v for k, v in row.items() if k not in ("seconds", "pid")} for row in rows}
    assert len(found) == len(rows)
    return found


def holders(out: Path) -> set[int]:
    """Processes that hold a sample."""
    found = [holder_of(lease).get("pid") for lease in out.glob(".study.jsonl-*.lease")]
    return {pid for pid in found if pid is not None}
