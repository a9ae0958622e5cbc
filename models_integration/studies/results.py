"""Results on disk: one JSON object a line, added by any number of processes, so that a run can be taken up again."""

import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from spec.errors import SpecError

__all__ = [
    "AGAIN", "ERROR", "START", "STUDY", "Place", "Row", "append_row", "find_row", "load_rows", "rows_behind",
]

STUDY = "study.jsonl"
"""Where every command stores what it measured: a row a sample, with all its cells."""

Row = dict[str, Any]
ERROR, AGAIN = "error", "again"
"""What a row has in place of results: why they could not be made, or that another attempt is wanted."""


class Place(NamedTuple):
    """How far a results file was read: whole lines."""

    bytes: int
    lines: int


START = Place(0, 0)


def load_rows(path: Path) -> list[Row]:
    """The results in a file, oldest first; none if there is no file.

    A last line that a killed process has cut is left out: `append_row` sets it aside.

    Raises:
        SpecError: when any other line is no JSON object.
    """
    return [row for row in rows_behind(path, START)[0] if not {ERROR, AGAIN} & row.keys()]


def rows_behind(path: Path, place: Place) -> tuple[list[Row], Place]:
    """All rows that were added since, errors too, and the place behind those that are whole lines."""
    if not path.exists():
        return [], place
    with path.open("rb") as file:
        _lock(file, alone=False)
        file.seek(place.bytes)
        *lines, last = file.read().split(b"\n")
    rows = [_row(line, path, number) for number, line in enumerate(lines, place.lines + 1)]
    place = Place(place.bytes + sum(len(line) + 1 for line in lines), place.lines + len(lines))
    return rows + ([json.loads(last)] if _is_row(last) else []), place


def append_row(path: Path, row: Row, allowed: Callable[[], bool] = lambda: True) -> bool:
    """Add one row, on the disk when this returns. Processes may share the file: each waits until it is alone in it.

    Whether it is `allowed` is asked then; where it is not, nothing is written. Returns whether the row was added.

    A cut last line is first moved to a file beside this one, `.cut` behind its name, and a warning says so. Where there
    are no POSIX locks (Windows), one process at a time may write.

    Raises:
        OSError: from the file system.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        _lock(file, alone=True)
        if not allowed():
            return False
        _end_last_line(file, path)
        file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    return True


def find_row(rows: Sequence[Row], identity: Mapping[str, object]) -> Row | None:
    """The row that answers exactly this question, if it is there."""
    for row in rows:
        if all(row.get(key) == value for key, value in identity.items()):
            return row
    return None


def _lock(file: BinaryIO, alone: bool) -> None:
    """Wait for other processes' rows; held until the file is closed."""
    if sys.platform != "win32":
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)


def _end_last_line(file: BinaryIO, path: Path) -> None:
    """Leave whole lines: a row that only lacks its end gets one, any other rest goes to the file beside."""
    rest = _last_line(file)
    if _is_row(rest):
        file.write(b"\n")
    elif rest:
        aside = path.with_name(f"{path.name}.cut")
        with aside.open("ab") as kept:
            kept.write(rest + b"\n")
        file.truncate(file.seek(0, os.SEEK_END) - len(rest))
        logging.getLogger(__name__).warning(
            "%s: its last line was cut, after %d bytes; it is now in %s", path, len(rest), aside.name
        )


def _last_line(file: BinaryIO, step: int = 1 << 16) -> bytes:
    """What stands behind the last newline."""
    start, rest = file.seek(0, os.SEEK_END), b""
    while start and b"\n" not in rest:
        size = min(step, start)
        start = file.seek(start - size)
        rest = file.read(size) + rest
    return rest.rpartition(b"\n")[2]


def _is_row(line: bytes) -> bool:
    """Whether a line without an end is a whole row: no shorter part of a JSON object is one."""
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _row(line: bytes, path: Path, number: int) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise SpecError("results", f"{path}:{number}", f"is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise SpecError("results", f"{path}:{number}", "must be a JSON object")
    return row
