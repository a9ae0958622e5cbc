"""A small sweep, what the processes do that share it, and what they made."""

import os
import time
from pathlib import Path
from typing import Any

from conformance.own.models_integration.studies.lease_workers import patient
from models_integration.studies.leases import holder_of
from models_integration.studies.results import Row, load_rows

__all__ = ["ROWS", "RULES", "holders", "measured", "sweep"]

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
PAUSE = 0.25
"""Seconds that a sample takes at least, so that there is somebody to kill."""


def sweep(rules: Path, out: Path, hours: int) -> None:
    """`kvspec sweep RULES`, on a machine whose clock is so many hours ahead."""
    import torch

    from models_integration.cli.study import ALL, run
    from models_integration.studies.evidence import measure as measures
    from models_integration.studies.evidence import run as of_study
    from models_integration.studies.subject import Loading

    torch.set_num_threads(1)
    patient(hours)

    def slowly(*arguments: Any) -> Any:
        time.sleep(PAUSE)
        return {**measures.measure(*arguments), "pid": os.getpid()}

    setattr(of_study, "measure", slowly)  # noqa: B010  # for mypy it is not this module's to give
    run(rules, ALL, out, 12, Loading(), again=False)


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
