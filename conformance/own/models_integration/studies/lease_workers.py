"""What the processes do that share units of work."""

import os
import time
from pathlib import Path

from models_integration.studies import leases
from models_integration.studies.leases import Leases

__all__ = ["PATIENCE", "UNITS", "patient", "work"]

PATIENCE = 1.0
UNITS = [f"unit-{number}" for number in range(60)]


def patient(hours: int) -> None:
    """From here on this process is on a machine whose clock is so many hours ahead, and waits for no minute."""
    here = time.time

    def touched(lease: Path) -> None:
        now = time.time()
        os.utime(lease, (now, now))

    leases._BEAT, leases._PATIENCE, leases._PAUSE = PATIENCE / 10, PATIENCE, PATIENCE / 20
    time.time = lambda: here() + 3600 * hours
    Path.touch = touched  # type: ignore[assignment, method-assign]


def work(path: Path, hours: int) -> None:
    """Store a row for each unit, on a machine whose clock is so many hours ahead."""
    patient(hours)
    with Leases(path, lambda row: str(row["unit"])) as own:
        for unit in own.units(UNITS, lambda unit: None):
            time.sleep(0.05)
            own.add({"unit": unit, "pid": os.getpid()})
