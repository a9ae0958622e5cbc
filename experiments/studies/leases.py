"""Leases, with which several processes make each row of a results file exactly once.

A unit of work is leased to one worker at a time. A lease is a file in the folder of the results, which the worker
locks. If the worker ends, the operating system releases the lock, and a different worker takes the unit over. Actors of
Ray on several machines need a shared folder with locks, such as a folder of NFS. A unit that fails has a row with the
error, and is repeated only on request.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Self

from experiments.studies.results import AGAIN, ERROR, START, Row, append_row, lock_at_once, rows_behind, unit_named
from models_integration.cache.atomic_file import publish_readable
from spec.files import read_bytes, regular

__all__ = ["Leases", "holder_of"]

_PAUSE = 1.0
"""Number of seconds until a worker without a unit looks for a unit again."""


def holder_of(lease: Path) -> Row:
    """Return the data about the holder in a lease, or {} if the lease is incomplete or missing."""
    try:
        holder = json.loads(read_bytes(lease))
    except (OSError, ValueError, RecursionError):
        return {}
    return holder if isinstance(holder, dict) and type(holder.get("deaths", 0)) is int else {}


def _is_at(lease: Path, file: BinaryIO) -> bool:
    """Return True if an open file is still at its path. A lock has no effect if the holder has removed the file."""
    try:
        return os.path.samestat(lease.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


class Leases:
    """Context manager for the units of a results file that one worker holds.

    Args:
        results: results file. The leases are in the same folder.
        unit_of: function that returns the unit of a row (a valid file name), or None for rows without a unit.
    """

    def __init__(self, results: Path, unit_of: Callable[[Row], str | None]) -> None:
        self._results, self._unit_of = results, unit_of
        self._held: tuple[Path, BinaryIO] | None = None
        self._stored: set[str] = set()
        self.failed: dict[str, Row] = {}
        """Error rows by unit, at the last call of `stored`."""
        self._place = START
        self.deaths = 0
        """Number of earlier holders of the held unit that died. A unit that kills one worker would kill all."""

    def __enter__(self) -> Self:
        self._results.parent.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._release()
        for unit in self.stored():  # a holder can die after it stored the row and before it released the unit
            if self._lease(unit).exists() and self._locked(unit):
                self._release()

    def stored(self) -> set[str]:
        """Return the units that have a row and are not to be repeated."""
        rows, self._place = rows_behind(self._results, self._place)
        for row in rows:
            unit = self._unit_of(row)
            if unit is not None:
                self._stored.add(unit)
                self.failed.pop(unit, None)
                if ERROR in row:
                    self.failed[unit] = row
                elif AGAIN in row:
                    self._stored.remove(unit)
        return self._stored

    def again(self, wanted: Iterable[str]) -> None:
        """Mark the failed units among `wanted` for repetition by any worker, except units that a worker holds."""
        self.stored()
        for unit in self.failed.keys() & wanted:
            if self._locked(unit):
                self.stored()
                if unit in self.failed:
                    row = {name: value for name, value in self.failed[unit].items() if name not in (ERROR, "traceback")}
                    append_row(self._results, {**row, AGAIN: True})
                self._release()

    def units(self, wanted: Iterable[str], done: Callable[[str], None]) -> Iterator[str]:
        """Yield units to work on until each wanted unit has a row. `done` is called for every unit of any worker.

        The worker holds a yielded unit until its row is added.
        """
        left = list(wanted)
        while left:
            taken = next((unit for unit in left if self.take(unit)), None)
            if taken is not None:
                yield taken
            stored = self.stored()
            for unit in left:
                if unit in stored:
                    done(unit)
            left = [unit for unit in left if unit not in stored]
            if taken is None and left:
                time.sleep(_PAUSE)

    def take(self, unit: str) -> bool:
        """Try to take a unit. Return False if the unit has a row, or if a living worker holds the unit."""
        if unit in self.stored() or not self._locked(unit):
            return False
        if unit in self.stored():  # the last holder stored the row before the lock was free
            self._release()
        return self._held is not None

    def add(self, row: Row) -> None:
        """Store the row of the held unit and release the unit."""
        append_row(self._results, row)
        self._release()

    def _lease(self, unit: str) -> Path:
        return self._results.with_name(f".{self._results.name}-{unit}.lease")

    def plan(self, wanted: Iterable[str]) -> None:
        """Write the list of all wanted units to a file in the folder of the results."""
        text = "\n".join(sorted(wanted))
        plan = self._results.with_name(f".{self._results.name}-{unit_named(text)[:16]}.plan")
        publish_readable(plan, text.encode())

    def planned(self) -> set[str]:
        """Return all units that any worker has listed."""
        plans = self._results.parent.glob(f".{self._results.name}-*.plan")
        return {unit for plan in plans for unit in read_bytes(plan).decode("ascii", errors="replace").split()}

    def holders(self) -> list[tuple[Row, bool]]:
        """Return the data of each lease, and whether a living worker holds the lease."""
        leases = []
        for lease in self._results.parent.glob(f".{self._results.name}-*.lease"):
            try:
                with open(lease, "rb", opener=regular) as file:
                    leases.append((holder_of(lease), not lock_at_once(file)))
            except FileNotFoundError:
                continue  # the holder has released the lease
        return leases

    def _locked(self, unit: str) -> bool:
        """Try to lock the lease of a unit, and write the holder. Return False if a living worker holds the lease."""
        lease = self._lease(unit)
        file = open(lease, "a+b", opener=regular)  # noqa: SIM115  # `_release` closes the file
        if not lock_at_once(file) or not _is_at(lease, file):
            file.close()
            return False
        before = holder_of(lease)
        self.deaths = before.get("deaths", 0) + 1 if before else 0
        since = time.strftime("%Y-%m-%d %H:%M:%S %Z")
        who = {"host": socket.gethostname(), "pid": os.getpid(), "since": since, "deaths": self.deaths}
        file.truncate(0)
        file.write(json.dumps(who).encode())
        file.flush()
        self._held = lease, file
        return True

    def _release(self) -> None:
        if self._held is not None:
            lease, file = self._held
            if sys.platform == "win32":
                file.close()  # Windows removes no open file
            lease.unlink(missing_ok=True)  # first: a worker that locks the file later sees that it is not at its path
            file.close()
        self._held = None
