"""The list of objects: rows of a sealed database, made again from the objects when in doubt.

The objects are what counts. A list that cannot be opened is kept in memory, and one that removed rows cannot be
cleaned out of is destroyed; both need no room, and the next opening makes the list again.
"""

import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, cast

from models_integration.archive.errors import ArchiveError, named_errors
from models_integration.archive.sealed_database import SealedDatabase

__all__ = ["Catalogue", "Entry"]

LAYOUT = ("key", "tenant", "tokens", "bytes", "created", "used")
Row = tuple[str, str | None, int | None, int, float, int]
EVERYTHING = f"SELECT {', '.join(LAYOUT)} FROM objects"
USES_MOST = 32
"""Uses that are kept in memory before they are written."""


class Entry(NamedTuple):
    """One object as it is listed. Of an encrypted one, tenant and tokens are not known."""

    key: str
    tenant: str | None
    tokens: int | None
    bytes: int
    created: float


class Catalogue:
    """Rows of one archive. One connection belongs to one thread.

    Every method but `close` and `note_use` raises ArchiveFull, ArchiveReadOnly, ArchiveError or OSError for a list that
    cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self._file = SealedDatabase(folder, _create, _check_layout)
        self._memory: sqlite3.Connection | None = None
        self._closed = False
        self._uses: dict[str, None] = {}
        try:
            with self._file.alone():
                self._file.open()
                # What SQLite could open for reading alone says so now, not when a chunk is put.
                self._file.rows.execute("DELETE FROM objects WHERE 0")
        except (ArchiveError, OSError, sqlite3.Error):
            self._file.let_go()
            self._memory = _in_memory(cast(list[Row], self._file.copied(EVERYTHING)))

    @property
    def damaged(self) -> bool:
        """Whether the file that was found did not have the bytes of its seal, or no list; it was put away."""
        return self._file.damaged

    def close(self) -> None:
        """Seal and let go; a second call does nothing. A list that cannot be sealed is made again when next opened."""
        if self._closed:
            return
        self._closed = True
        with suppress(ArchiveError, OSError):
            self._write_uses()
            with self._using():
                if self._memory is None:
                    self._file.seal()
                    self._file.let_go()
        self._file.let_go()
        if self._memory is not None:
            self._memory.close()

    def make_room(self) -> None:
        """Reserve what erasing will need: a disk that is full then can still be cleaned."""
        if self._memory is None:
            self._file.make_room()

    def add(self, entries: Iterable[Entry]) -> None:
        """List objects, as the latest used; those that are listed stay as they are."""
        self._write_uses()
        self._change(
            "INSERT OR IGNORE INTO objects VALUES (?, ?, ?, ?, ?, (SELECT COALESCE(MAX(used), 0) + 1 FROM objects))",
            entries,
        )

    def note_use(self, key: str) -> None:
        """Count a use, by order, not by a clock. It is written later; a list that cannot be written forgets it."""
        self._uses.pop(key, None)
        self._uses[key] = None
        if len(self._uses) >= USES_MOST:
            with suppress(ArchiveError, OSError):
                self._write_uses()

    def remove(self, which: Callable[[Entry], bool]) -> None:
        """Take objects off the list, and leave no byte of any removed row in the file or in its log.

        Where that cannot be done, the whole list is destroyed; it is made again when the archive is next opened.

        Args:
            which: says whether a row goes; asked while nobody else can write the list.
        """
        with self._file.alone(), named_errors(self._file.path):
            if self._memory is None and _expunged(self._file, which):
                return
            left = _in_memory([row for row in self._readable() if not which(Entry(*row[:-1]))])
            self._file.destroy()
        self._memory = left

    def entries(self) -> list[Entry]:
        """Rows in order of creation, then of keys."""
        return [Entry(*row[:-1]) for row in self._selected("created, key")]

    def by_use(self) -> list[Entry]:
        """Rows, the least recently used first."""
        with suppress(ArchiveError, OSError):
            self._write_uses()
        order = {key: at for at, key in enumerate(self._uses)}
        found = [Entry(*row[:-1]) for row in self._selected("used, key")]
        return sorted(found, key=lambda entry: order.get(entry.key, -1))

    @contextmanager
    def unlisted(self, key: str) -> Iterator[bool]:
        """Whether a key is not on the list, while nobody can put it there."""
        with self._using() as rows:
            yield rows.execute("SELECT 1 FROM objects WHERE key = ?", (key,)).fetchone() is None

    def intact(self) -> bool:
        """Whether the file still has the bytes of its seal."""
        with self._using():
            return self._memory is not None or self._file.sealed()

    @contextmanager
    def _using(self) -> Iterator[sqlite3.Connection]:
        """The connection, to the file that has the name, while nobody else uses it."""
        if self._memory is not None:
            with named_errors(self._file.path):
                yield self._memory
            return
        with self._file.alone(), named_errors(self._file.path):
            self._file.open()
            yield self._file.rows

    def _selected(self, order: str) -> list[Row]:
        with self._using() as rows:
            return rows.execute(f"{EVERYTHING} ORDER BY {order}").fetchall()

    def _change(self, statement: str, values: Iterable[tuple[object, ...]]) -> None:
        with self._using() as rows:
            _in_one(rows, statement, values)
            if self._memory is None:
                self._file.keep_the_log_short()

    def _write_uses(self) -> None:
        if self._uses:
            used = [(key,) for key in self._uses]
            self._change("UPDATE objects SET used = (SELECT MAX(used) + 1 FROM objects) WHERE key = ?", used)
            self._uses.clear()

    def _readable(self) -> list[Row]:
        try:
            return (self._memory or self._file.rows).execute(EVERYTHING).fetchall()
        except sqlite3.Error:
            return []


def _in_memory(entries: Iterable[Row]) -> sqlite3.Connection:
    rows = sqlite3.connect(":memory:", isolation_level=None)
    _create(rows)
    rows.executemany(f"INSERT INTO objects VALUES ({', '.join('?' * len(LAYOUT))})", entries)
    return rows


def _expunged(file: SealedDatabase, which: Callable[[Entry], bool]) -> bool:
    """Whether the rows and all their bytes went; tried again in the room that is reserved."""
    for full in (False, True):
        with suppress(sqlite3.Error, ArchiveError, OSError):
            if full:
                file.give_room()
            file.open()
            _expunge(file.rows, which)
            file.seal()
            return True
    return False


def _expunge(rows: sqlite3.Connection, which: Callable[[Entry], bool]) -> None:
    found: list[Row] = rows.execute(EVERYTHING).fetchall()
    _in_one(rows, "DELETE FROM objects WHERE key = ?", [(row[0],) for row in found if which(Entry(*row[:-1]))])
    rows.execute("VACUUM")


def _check_layout(rows: sqlite3.Connection) -> None:
    """
    Raises:
        sqlite3.DatabaseError: for what is no list, or another one.
    """
    columns = rows.execute("PRAGMA table_info(objects)").fetchall()
    if tuple(column[1] for column in columns) != LAYOUT:
        raise sqlite3.DatabaseError("it has other columns")
    for row in rows.execute(EVERYTHING):
        if [type(value) for value in (row[0], *row[3:])] != [str, int, float, int]:
            raise sqlite3.DatabaseError("a row holds something else")


def _create(rows: sqlite3.Connection) -> None:
    rows.execute(
        "CREATE TABLE objects (key TEXT PRIMARY KEY, tenant TEXT, tokens INTEGER, bytes INTEGER NOT NULL,"
        " created REAL NOT NULL, used INTEGER NOT NULL)"
    )
    rows.execute("CREATE INDEX by_use ON objects (used)")


def _in_one(rows: sqlite3.Connection, statement: str, values: Iterable[tuple[object, ...]]) -> None:
    """All of the values, or none."""
    rows.execute("BEGIN IMMEDIATE")
    try:
        rows.executemany(statement, values)
        rows.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):
            rows.execute("ROLLBACK")
        raise
