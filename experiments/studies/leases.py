"""Leases, with which many processes (also on several machines) make each row of a results file exactly once.

A unit of work is leased to one worker at a time. A lease is a file in the folder of the results, and the running worker
touches it regularly. A different worker takes the unit over if the lease is not touched for a minute of the worker's
own clock. Clocks of machines are never compared. A unit that fails has a row with the error, and is repeated only on
request.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Self
from uuid import uuid4

from experiments.studies.results import AGAIN, ERROR, START, Row, append_row, rows_behind, unit_named
from models_integration.cache.atomic_file import publish_readable

__all__ = ["Leases", "holder_of"]

_BEAT = 5.0
"""Number of seconds between two touches of a lease."""
_PAUSE = 1.0
"""Number of seconds until a worker without a unit looks for a unit again."""
_PATIENCE = 60.0
"""Number of seconds without a touch after which a different worker may take a lease."""


def holder_of(lease: Path) -> Row:
    """Return the data about the holder in a lease, or {} if the lease is incomplete or missing."""
    try:
        result: Row = json.loads(lease.read_text(encoding="ascii"))
    except (FileNotFoundError, ValueError):
        return {}
    return result


def _mark(lease: Path) -> tuple[int, int] | None:
    """Return values that change if a lease is touched or replaced, or None if there is no lease."""
    try:
        result = lease.stat()
    except FileNotFoundError:
        return None
    return result.st_ino, result.st_mtime_ns


class Leases:
    """Context manager for the units of a results file that one worker holds.

    Args:
        results: results file. The leases are in the same folder.
        unit_of: function that returns the unit of a row (a valid file name), or None for rows without a unit.
    """

    def __init__(self, results: Path, unit_of: Callable[[Row], str | None]) -> None:
        self._results, self._unit_of = results, unit_of
        self._text = ""
        self._held: Path | None = None
        self._stored: set[str] = set()
        self.failed: dict[str, Row] = {}
        """Error rows by unit, at the last call of `stored`."""
        self._place = START
        self.deaths = 0
        """Number of earlier holders of the held unit that died. A unit that kills one worker would kill all."""
        self._untouched: dict[str, tuple[tuple[int, int], float]] = {}
        self._closed = threading.Event()

    def __enter__(self) -> Self:
        self._results.parent.mkdir(parents=True, exist_ok=True)
        threading.Thread(target=self._beat, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
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
            if self._create(self._lease(unit), 0):
                self._held = self._lease(unit)
                self.stored()
                if unit in self.failed:
                    row = {name: value for name, value in self.failed[unit].items() if name not in (ERROR, "traceback")}
                    append_row(self._results, {**row, AGAIN: True}, self._holds)
                self._release()

    def units(self, wanted: Iterable[str], done: Callable[[str], None]) -> Iterator[str]:
        """Yield units to work on until each wanted unit has a row. `done` is called for every unit of any worker.

        The worker holds a yielded unit until its row is added.
        """
        every = left = list(wanted)
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
        for unit in every:  # left by a worker that died after storing a row
            self._lease(unit).unlink(missing_ok=True)

    def take(self, unit: str) -> bool:
        """Try to take a unit. Return False if the unit has a row, or if a living worker holds the unit."""
        if unit in self.stored():
            return False
        lease, deaths = self._lease(unit), 0
        if not self._create(lease, deaths):
            if not self._abandoned(lease):
                return False
            deaths = holder_of(lease).get("deaths", 0) + 1
            lease.unlink(missing_ok=True)
            if not self._create(lease, deaths):
                return False
        self._held, self.deaths = lease, deaths
        # The last holder may have died after storing the row and before the release.
        if unit in self.stored():
            self._release()
        return self._held is not None

    def add(self, row: Row) -> bool:
        """Store the row of the held unit and release the unit. Return False, without storing, if it was taken over."""
        added = append_row(self._results, row, self._holds)
        self._release()
        return added

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
        return {unit for plan in plans for unit in plan.read_text(encoding="ascii").split()}

    def holders(self) -> list[tuple[Row, bool]]:
        """Return the data of each lease, and whether it is touched during a wait slightly longer than one interval."""
        leases = list(self._results.parent.glob(f".{self._results.name}-*.lease"))
        before = {lease: _mark(lease) for lease in leases}
        if before:
            time.sleep(1.5 * _BEAT)
        return [(holder_of(lease), _mark(lease) != mark) for lease, mark in before.items() if lease.exists()]

    def _create(self, lease: Path, deaths: int) -> bool:
        """Try to create a lease with the holder and the holder's clock time. Return False if the lease exists."""
        since = time.strftime("%Y-%m-%d %H:%M:%S %Z")
        who = {"host": socket.gethostname(), "pid": os.getpid(), "since": since, "deaths": deaths}
        text = json.dumps({**who, "token": uuid4().hex})
        try:
            with lease.open("x", encoding="ascii") as file:
                file.write(text)
        except FileExistsError:
            return False
        self._text = text
        return True

    def _holds(self) -> bool:
        held = self._held  # the second thread may change it meanwhile
        try:
            return held is not None and held.read_text(encoding="ascii") == self._text
        except FileNotFoundError:
            return False

    def _release(self) -> None:
        if self._held is not None and self._holds():
            self._held.unlink(missing_ok=True)  # a different worker removes all leases when every unit has a row
        self._held = None

    def _abandoned(self, lease: Path) -> bool:
        """Return True if this worker has watched the lease for long enough without a touch."""
        now, mark = time.monotonic(), _mark(lease)
        if mark is None:
            return False
        seen, since = self._untouched.get(lease.name, (None, now))
        if seen != mark:
            self._untouched[lease.name] = mark, now
            return False
        return now - since > _PATIENCE

    def _beat(self) -> None:
        """Touch the held lease, but never create it, because the second thread may release the lease meanwhile."""
        while not self._closed.wait(_BEAT):
            held = self._held
            with suppress(OSError):  # the lease was removed, or the shared folder is temporarily unavailable
                if held is not None and self._holds():
                    os.utime(held)
