"""Rows that many processes make together, on one machine or on many that share a folder: none twice, none lost.

A unit of work is leased to one worker at a time: a file beside the results, which its worker touches while it lives.
Whoever sees a lease untouched for a minute of its own clock takes the unit over; clocks are never compared. What cannot
be made has a row too, with its error, and is made again only where somebody asks for it.
"""

import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self
from uuid import uuid4

from models_integration.cache.atomic_file import publish_readable
from models_integration.studies.results import AGAIN, ERROR, START, Row, append_row, rows_behind

__all__ = ["Leases", "unit_named"]

_BEAT = 5.0
"""Seconds between two touches of a lease."""
_PAUSE = 1.0
"""Seconds until a worker without a unit looks again."""
_PATIENCE = 60.0
"""Seconds without a touch after which a lease is another worker's to take."""


def unit_named(identity: object) -> str:
    """The unit of whatever JSON tells it from others."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def holder_of(lease: Path) -> Row:
    """What a lease says of its holder; nothing while it is being written, or gone."""
    try:
        found: Row = json.loads(lease.read_text(encoding="ascii"))
    except (FileNotFoundError, ValueError):
        return {}
    return found


def _mark(lease: Path) -> tuple[int, int] | None:
    """What changes when a lease is touched or made anew; None where there is none."""
    try:
        found = lease.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


class Leases:
    """What one worker holds of the units of a results file; open while it works.

    Args:
        results: the file; leases lie beside it.
        unit_of: a row's unit, a name that a file can have; None for rows that are not about these units.
    """

    def __init__(self, results: Path, unit_of: Callable[[Row], str | None]) -> None:
        self._results, self._unit_of = results, unit_of
        self._text = ""
        self._held: Path | None = None
        self._stored: set[str] = set()
        self.failed: dict[str, Row] = {}
        """The units whose row is an error, as `stored` saw them last."""
        self._place = START
        self.deaths = 0
        """Holders of the held unit that were taken over from: what kills its worker would kill them all."""
        self._untouched: dict[str, tuple[tuple[int, int], float]] = {}
        self._closed = threading.Event()

    def __enter__(self) -> Self:
        self._results.parent.mkdir(parents=True, exist_ok=True)
        threading.Thread(target=self._beat, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None,
    ) -> None:
        self._closed.set()
        self._release()

    def stored(self) -> set[str]:
        """The units that have a row, and are not to be made again."""
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
        """Of these units, those that failed are made again, by whoever takes them; not what another one holds."""
        self.stored()
        for unit in self.failed.keys() & wanted:
            if self._made(self._lease(unit), 0):
                self._held = self._lease(unit)
                self.stored()
                if unit in self.failed:
                    row = {name: value for name, value in self.failed[unit].items() if name not in (ERROR, "traceback")}
                    append_row(self._results, {**row, AGAIN: True}, self._holds)
                self._release()

    def units(self, wanted: Iterable[str], done: Callable[[str], None]) -> Iterator[str]:
        """Units to work on, until each that is wanted has a row; `done` is told of every one, whoever stored it.

        Each one that is given is held, until its row is added.
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
        for unit in every:  # of who died between storing a row and letting go
            self._lease(unit).unlink(missing_ok=True)

    def take(self, unit: str) -> bool:
        """Whether this worker holds the unit now: nobody has stored it, and nobody alive holds it."""
        if unit in self.stored():
            return False
        lease, deaths = self._lease(unit), 0
        if not self._made(lease, deaths):
            if not self._abandoned(lease):
                return False
            deaths = holder_of(lease).get("deaths", 0) + 1
            lease.unlink(missing_ok=True)
            if not self._made(lease, deaths):
                return False
        self._held, self.deaths = lease, deaths
        # Its last holder may have stored the row and died before it let go.
        if unit in self.stored():
            self._release()
        return self._held is not None

    def add(self, row: Row) -> bool:
        """Store the row of the held unit and let go; False, and nothing stored, where the unit was taken over."""
        added = append_row(self._results, row, self._holds)
        self._release()
        return added

    def _lease(self, unit: str) -> Path:
        return self._results.with_name(f".{self._results.name}-{unit}.lease")

    def plan(self, wanted: Iterable[str]) -> None:
        """Leave word, beside the results, of all units that are wanted."""
        text = "\n".join(sorted(wanted))
        plan = self._results.with_name(f".{self._results.name}-{unit_named(text)[:16]}.plan")
        publish_readable(plan, text.encode())

    def planned(self) -> set[str]:
        """All units of which anybody left word."""
        plans = self._results.parent.glob(f".{self._results.name}-*.plan")
        return {unit for plan in plans for unit in plan.read_text(encoding="ascii").split()}

    def holders(self) -> list[tuple[Row, bool]]:
        """What each lease says, and whether it is touched while this looks: somewhat longer than a beat."""
        leases = list(self._results.parent.glob(f".{self._results.name}-*.lease"))
        before = {lease: _mark(lease) for lease in leases}
        if before:
            time.sleep(1.5 * _BEAT)
        return [(holder_of(lease), _mark(lease) != mark) for lease, mark in before.items() if lease.exists()]

    def _made(self, lease: Path, deaths: int) -> bool:
        """Whether the lease was nobody's; it then says who holds it, and since when by the holder's clock."""
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
        held = self._held  # which the other thread may change meanwhile
        try:
            return held is not None and held.read_text(encoding="ascii") == self._text
        except FileNotFoundError:
            return False

    def _release(self) -> None:
        if self._held is not None and self._holds():
            self._held.unlink(missing_ok=True)  # another worker removes all leases when every unit has a row
        self._held = None

    def _abandoned(self, lease: Path) -> bool:
        """Whether this worker has watched the lease for long enough, and nobody touched it."""
        now, mark = time.monotonic(), _mark(lease)
        if mark is None:
            return False
        seen, since = self._untouched.get(lease.name, (None, now))
        if seen != mark:
            self._untouched[lease.name] = mark, now
            return False
        return now - since > _PATIENCE

    def _beat(self) -> None:
        """Touch the held lease and never make one: the other thread may let go of it meanwhile."""
        while not self._closed.wait(_BEAT):
            held = self._held
            with suppress(OSError):  # it is gone, or the shared folder is away for a moment
                if held is not None and self._holds():
                    os.utime(held)
