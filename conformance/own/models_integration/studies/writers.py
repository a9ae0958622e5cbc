"""What the processes do that share one results file."""

import os
import resource
import signal
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path

from models_integration.studies.results import append_row

__all__ = ["die_in_a_row", "write_rows", "write_until_killed"]


def write_rows(path: Path, writer: int, rows: int, together: Barrier) -> None:
    """Add this writer's rows, once all others are ready."""
    together.wait()
    for at in range(rows):
        append_row(path, {"writer": writer, "at": at, "text": "x" * (997 * at % 9000)})


def write_until_killed(path: Path, ready: Connection) -> None:
    """Add long rows; `ready` gets a byte before the first."""
    ready.send_bytes(b"x")
    while True:
        append_row(path, {"pid": os.getpid(), "text": "x" * 1_000_000})


def die_in_a_row(path: Path, room: int) -> None:
    """Add a row that is longer than the room which the kernel leaves in the file: it kills the process there."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    size = path.stat().st_size + room
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    append_row(path, {"text": "x" * 2 * room})
