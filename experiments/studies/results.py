"""Results on disk: JSON objects, one per line. Several processes can append, and a run can be continued later."""

import hashlib
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from experiments.studies.columns import check_row, missing_column
from spec.errors import SpecError
from spec.files import read_bytes, regular

__all__ = [
    "AGAIN", "ERROR", "START", "STUDY", "Place", "Row", "append_row", "check_columns", "load_rows", "load_study",
    "lock_at_once", "parse_rows", "rows_behind", "unit_named",
]

STUDY = "study.jsonl"
"""Name of the file in which every command stores its results: one row per sample, with all cells."""

Row = dict[str, Any]
ERROR, AGAIN = "error", "again"
"""Keys of a row without results: the error, or the request for a new attempt."""


class Place(NamedTuple):
    """Place in a results file up to which whole lines were read."""

    bytes: int
    lines: int


START = Place(0, 0)


def load_rows(path: Path) -> list[Row]:
    """Return the results in a file, oldest first, or [] if the file does not exist.

    An incomplete last line of a killed process is left out. `append_row` moves such a line to a second file.

    Raises:
        SpecError: if a different line is not a JSON object, or has an invalid value of a sample's column.
    """
    return [row for row in rows_behind(path, START)[0] if not {ERROR, AGAIN} & row.keys()]


def load_study(path: Path) -> list[Row]:
    """Return the results of a study, as `load_rows`, after a check that each row has the columns of a sample.

    Raises:
        SpecError: as in `load_rows`, or if a row is not the row of a sample.
    """
    rows = load_rows(path)
    for row in rows:
        if name := check_row(row) or missing_column(row):
            raise _invalid(_line_of(row, path), name)
    return rows


def check_columns(rows: Sequence[Row], columns: Mapping[str, type], path: Path) -> None:
    """Check that each row of a file has these columns, with values of these types.

    Raises:
        SpecError: if a column is missing, or if a value has a different type. The message has the first such column.
    """
    for row in rows:
        for name, kind in columns.items():
            if not (name in row and isinstance(row[name], kind)):
                raise _invalid(_line_of(row, path), name)


_REMEDY = "remove the line, and the next run measures the sample again"


def _invalid(where: str, name: str) -> SpecError:
    return SpecError("results", where, f"has no valid value of {name!r}: {_REMEDY}")


def _line_of(row: Row, path: Path) -> str:
    """Return the path and the number of the line in which a row of a file is."""
    text = json.dumps(row)
    lines = enumerate(read_bytes(path).split(b"\n"), 1)
    return f"{path}:{next(number for number, line in lines if _is_row(line) and json.dumps(json.loads(line)) == text)}"


def parse_rows(text: str, path: Path) -> list[Row]:
    """Return the rows of the text of a file, which is only named in errors.

    Raises:
        SpecError: as in `load_rows`.
    """
    lines = enumerate(text.split("\n"), 1)
    return [_row(line.encode(), path, number) for number, line in lines if line]


def rows_behind(path: Path, place: Place) -> tuple[list[Row], Place]:
    """Return all rows after `place`, including errors, and the place after the last whole line.

    Raises:
        SpecError: if the file cannot be read, or as in `load_rows`.
    """
    if not path.exists():
        return [], place
    try:
        with open(path, "rb", opener=regular) as file:
            _lock(file, alone=False)
            file.seek(place.bytes)
            *lines, last = file.read().split(b"\n")
    except OSError as error:
        raise SpecError("results", str(path), f"cannot be read ({error.strerror}): give the folder of a run") from error
    rows = [_row(line, path, number) for number, line in enumerate(lines, place.lines + 1)]
    place = Place(place.bytes + sum(len(line) + 1 for line in lines), place.lines + len(lines))
    return rows + ([_row(last, path, place.lines + 1)] if _is_row(last) else []), place


def append_row(path: Path, row: Row) -> None:
    """Append one row durably. Several processes can share the file, because each process waits for a lock.

    An incomplete last line is first moved to a second file with the ending `.cut`, with a warning. Without POSIX locks
    (Windows), only one process at a time may write.

    Raises:
        OSError: from the file system.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(path, "a+b", opener=regular) as file:
            _lock(file, alone=True)
            _end_last_line(file, path)
            file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)  # a full disk has no name of its own
        raise


def lock_at_once(file: BinaryIO) -> bool:
    """Lock the file until it is closed. Return False, without waiting, if a different open file has the lock."""
    if sys.platform != "win32":
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _lock(file: BinaryIO, alone: bool) -> None:
    """Wait for the lock of the file, and hold the lock until the file is closed."""
    if sys.platform != "win32":
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)


def _end_last_line(file: BinaryIO, path: Path) -> None:
    """Repair the last line: a complete row gets a newline, and any different rest is moved to the second file."""
    rest = _last_line(file)
    if _is_row(rest):
        file.write(b"\n")
    elif rest:
        aside = path.with_name(f"{path.name}.cut")
        with open(aside, "ab", opener=regular) as kept:
            kept.write(rest + b"\n")
        file.truncate(file.seek(0, os.SEEK_END) - len(rest))
        logging.getLogger(__name__).warning(
            "%s: its last line was cut, after %d bytes; it is now in %s", path, len(rest), aside.name
        )


def _last_line(file: BinaryIO) -> bytes:
    """Return the bytes after the last newline."""
    start, rest = file.seek(0, os.SEEK_END), b""
    while start and b"\n" not in rest:
        size = min(1 << 16, start)
        start = file.seek(start - size)
        rest = file.read(size) + rest
    return rest.rpartition(b"\n")[2]


def _is_row(line: bytes) -> bool:
    """Return True if a line without a newline is a complete row. No proper prefix of a JSON object is valid JSON."""
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _row(line: bytes, path: Path, number: int) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise SpecError("results", f"{path}:{number}", f"is not JSON ({error}): {_REMEDY}") from error
    if not isinstance(row, dict):
        raise SpecError("results", f"{path}:{number}", f"must be a JSON object: {_REMEDY}")
    if {"rules", "sample"} <= row.keys() and (name := check_row(row)):
        raise _invalid(f"{path}:{number}", name)
    return row


def unit_named(identity: object) -> str:
    """Return the name of the unit that this JSON value identifies."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
