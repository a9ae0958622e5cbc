"""What the processes do that share one results file."""

import os
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path

from models_integration.studies.results import append_row

__all__ = ["write_rows", "write_until_killed"]


def write_rows(path: Path, writer: int, rows: int, together: Barrier) -> None:
    """Add this writer's rows, once all others are ready."""
    together.wait()
    for at in range(rows):
        append_row(path, {"writer": writer, "at": at, "text": "x" * (997 * at % 9000)})


def write_until_killed(path: Path, ready: Connection) -> None:
    """Add long rows; `ready` gets a byte before the first."""
    ready.send_bytes(b"x")
    while True:
        append_row(path, {"pid": os.getpid(), "text": "x" * 3_000_000})
