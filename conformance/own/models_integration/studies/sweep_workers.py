"""What the processes do that share one sweep."""

import os
import time
from pathlib import Path
from typing import Any

from conformance.own.models_integration.studies.lease_workers import patient

__all__ = ["PAUSE", "sweep"]

PAUSE = 0.25
"""Seconds that a sample takes at least, so that there is somebody to kill."""


def sweep(rules: Path, out: Path, hours: int) -> None:
    """`kvspec sweep RULES`, on a machine whose clock is so many hours ahead."""
    import torch

    from models_integration.cli.study import ALL, run
    from models_integration.studies.evidence import run as of_study
    from models_integration.studies.subject import Loading

    torch.set_num_threads(1)
    patient(hours)
    measure = of_study.measure

    def slowly(*arguments: Any) -> Any:
        time.sleep(PAUSE)
        return {**measure(*arguments), "pid": os.getpid()}

    of_study.measure = slowly
    run(rules, ALL, out, 12, Loading(), again=False)
