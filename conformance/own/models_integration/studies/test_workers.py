"""Workers that share a sweep: the same rows whoever makes them and whoever is killed, and errors that are rows too."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the sweep drives transformers models")

from typer.testing import CliRunner

from conformance.own.models_integration.studies.sweep_workers import sweep
from conformance.own.processes import started
from models_integration.cli.app import app
from models_integration.studies import leases
from models_integration.studies.evidence import measure as measures
from models_integration.studies.leases import Leases
from models_integration.studies.results import Row, load_rows, rows_behind, START
from models_integration.studies.status import status, summaries

pytestmark = pytest.mark.law("promised-is-there-forgotten-is-not")

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


@pytest.fixture
def rules(tmp_path: Path, one_thread: None) -> Path:
    path = tmp_path / "sweep.toml"
    path.write_text(RULES, encoding="utf-8")
    return path


def swept(rules: Path, out: Path, *options: str) -> Any:
    return CliRunner().invoke(app, ["sweep", str(rules), "--out", str(out), *options])


def measured(out: Path) -> dict[str, Row]:
    """What was measured of each sample, without how long it took and who did it; none of them twice."""
    rows = load_rows(out / "study.jsonl")
    found = {row["sample"]: {k: v for k, v in row.items() if k not in ("seconds", "pid")} for row in rows}
    assert len(found) == len(rows)
    return found


def test_killed_workers_make_the_rows_of_one_that_is_alone(rules: Path, tmp_path: Path) -> None:
    """Four workers on two machines whose clocks are an hour apart; twice, half of them are killed at work."""
    alone, together = tmp_path / "alone", tmp_path / "together"
    assert swept(rules, alone).exit_code == 0
    living = [started(sweep, rules, together, hours) for hours in (0, 0, 1, 1)]
    for stored in (2, 5):
        while len(load_rows(together / "study.jsonl")) < stored:
            time.sleep(0.02)
        for process in (living.pop(0), living.pop(1)):
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            process.join()
        living += [started(sweep, rules, together, hours) for hours in (1, 0)]
    for process in living:
        process.join()
        assert process.exitcode == 0
    assert measured(together) == measured(alone)
    assert len(measured(alone)) == ROWS
    assert len({row["pid"] for row in load_rows(together / "study.jsonl")}) >= 4
    assert not list(together.glob(".*.lease"))
