"""Results on disk: one JSON object a line, added by any number of processes, so that a run can be taken up again."""

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from spec.errors import SpecError

__all__ = ["Row", "append_row", "find_row", "load_rows", "taken_up"]

Row = dict[str, Any]
Cell = TypeVar("Cell")


def load_rows(path: Path) -> list[Row]:
    """The rows of a results file, oldest first; none if there is no file.

    A last line that a killed process has cut is left out: `append_row` sets it aside.

    Raises:
        SpecError: when any other line is no JSON object.
    """
    if not path.exists():
        return []
    with path.open("rb") as file:
        _lock(file, alone=False)
        *lines, last = file.read().split(b"\n")
    if _is_row(last):
        lines.append(last)
    return [_row(line, path, number) for number, line in enumerate(lines, 1)]


def append_row(path: Path, row: Row) -> None:
    """Add one row, on the disk when this returns. Processes may share the file: each waits until it is alone in it.

    A cut last line is first moved to a file beside this one, `.cut` behind its name, and a warning says so. Where there
    are no POSIX locks (Windows), one process at a time may write.

    Raises:
        OSError: from the file system.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        _lock(file, alone=True)
        _end_last_line(file, path)
        file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def find_row(rows: Sequence[Row], identity: Mapping[str, object]) -> Row | None:
    """The row that answers exactly this question, if it is there."""
    for row in rows:
        if all(row.get(key) == value for key, value in identity.items()):
            return row
    return None


def taken_up(
    path: Path, identities: Mapping[Cell, Mapping[str, object]], stored: Callable[[Cell], None],
    made: Callable[[Sequence[Cell]], Sequence[Row]],
) -> Iterator[Row]:
    """The row of each cell: those that are there, and those of the others, once they are made and added.

    Args:
        path: of the results file.
        identities: of the cells' rows.
        stored: is told of each cell whose row is there.
        made: gives the rows of those cells that have none, in their order.
    """
    known = load_rows(path)
    rows = {cell: find_row(known, identity) for cell, identity in identities.items()}
    missing = [cell for cell, row in rows.items() if row is None]
    for cell in (cell for cell in rows if cell not in missing):
        stored(cell)
    for cell, row in zip(missing, made(missing) if missing else [], strict=True):
        append_row(path, row)
        rows[cell] = row
    yield from (row for row in rows.values() if row is not None)


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
        raise SpecError("results", f"{path}:{number}", f"is no JSON: {error}") from error
    if not isinstance(row, dict):
        raise SpecError("results", f"{path}:{number}", "must be a JSON object")
    return row
