"""The list of objects: SQLite in WAL mode, with a seal over its bytes, made again from the objects when in doubt.

The main file changes only in `_seal`, which checkpoints the log and writes the file's sha256 beside it. So at any
time the file either has the bytes of its seal, or is damaged and not used. The log carries SQLite's own checksums.

The objects are what counts. A list that cannot be opened is kept in memory, and one that removed rows cannot be
cleaned out of is destroyed; both need no room, and the next opening makes the list again.
"""

import fcntl
import hashlib
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from models_integration.archive.errors import ArchiveError, named_errors
from models_integration.cache.atomic_file import erase, publish

__all__ = ["Catalogue", "Entry"]

WAIT_SECONDS = 60.0
COLUMNS = "key, tenant, tokens, bytes, created"
LAYOUT = ("key", "tenant", "tokens", "bytes", "created", "used")
Row = tuple[str, str | None, int | None, int, float, int]
EVERYTHING = f"SELECT {', '.join(LAYOUT)} FROM objects"
LOG_MOST = 1 << 22
"""Bytes of the log from which it is written into the file."""
USES_MOST = 32
"""Uses that are kept in memory before they are written."""
RESERVE_STEP = 1 << 18
PIECE = 1 << 20
PRAGMAS = (
    "journal_mode = WAL", "synchronous = NORMAL", "wal_autocheckpoint = 0", "secure_delete = ON",
    "temp_store = MEMORY", "trusted_schema = OFF",
)
SIZE_MOST = 1 << 30
"""Bytes of a list of some four million objects; what is larger is not read."""


class Entry(NamedTuple):
    """One object as it is listed. Of an encrypted one, tenant and tokens are not known."""

    key: str
    tenant: str | None
    tokens: int | None
    bytes: int
    created: float


class Catalogue:
    """Rows of one archive. One connection belongs to one thread.

    Every method raises ArchiveFull, ArchiveReadOnly, ArchiveError or OSError for a list that cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "catalogue.sqlite"
        self._mark = folder / "catalogue.seal"
        self._lock = folder / "catalogue.lock"
        self._reserve = folder / "catalogue.reserve"
        self.damaged = False
        """Whether the file that was found did not have the bytes of its seal, or no list; it was put away."""
        self._in_memory, self._closed = False, False
        self._descriptor: int | None = None
        self._uses: dict[str, None] = {}
        try:
            with self._alone():
                self._open()
        except (ArchiveError, OSError, sqlite3.Error):
            self._go_to_memory()

    def close(self) -> None:
        """Seal and let go; a second call does nothing. A list that cannot be sealed is made again when next opened."""
        if self._closed:
            return
        self._closed = True
        with suppress(ArchiveError, OSError):
            self._write_uses()
            with self._using():
                self._seal()
        with suppress(ArchiveError, OSError), self._alone():
            self._let_go()
        self._let_go()

    def make_room(self) -> None:
        """Reserve what erasing will need: a disk that is full then can still be cleaned."""
        if self._in_memory:
            return
        with named_errors(self._reserve):
            needed = (2 * self._path.stat().st_size // RESERVE_STEP + 1) * RESERVE_STEP
            descriptor = os.open(self._reserve, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                if os.fstat(descriptor).st_size < needed:
                    os.posix_fallocate(descriptor, 0, needed)
            finally:
                os.close(descriptor)

    def add(self, entries: Iterable[Entry]) -> None:
        """List objects, as the latest used; those that are listed stay as they are."""
        self._write_uses()
        with self._using() as rows:
            _in_one(rows, lambda: rows.executemany(
                f"INSERT OR IGNORE INTO objects ({COLUMNS}, used)"
                " VALUES (?, ?, ?, ?, ?, (SELECT COALESCE(MAX(used), 0) + 1 FROM objects))", entries,
            ))
            self._keep_the_log_short()

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
        with self._alone():
            if not self._in_memory and self._expunged(which):
                return
            rows = [row for row in self._readable() if not which(Entry(*row[:-1]))]
            self._destroy()
        self._go_to_memory(rows)

    def entries(self) -> list[Entry]:
        """Rows in order of creation, then of keys."""
        return [Entry(*row[:-1]) for row in self._selected("created, key")]

    def by_use(self) -> list[Entry]:
        """Rows, the least recently used first."""
        with suppress(ArchiveError, OSError):
            self._write_uses()
        order = {key: at for at, key in enumerate(self._uses)}
        return sorted(
            (Entry(*row[:-1]) for row in self._selected("used, key")), key=lambda entry: order.get(entry.key, -1)
        )

    @contextmanager
    def unlisted(self, key: str) -> Iterator[bool]:
        """Whether a key is not on the list, while nobody can put it there."""
        with self._using() as rows:
            yield rows.execute("SELECT 1 FROM objects WHERE key = ?", (key,)).fetchone() is None

    def intact(self) -> bool:
        """Whether the file still has the bytes of its seal."""
        if self._in_memory:
            return True
        with self._using():
            return self._sealed()

    def _selected(self, order: str) -> list[Row]:
        with self._using() as rows:
            return rows.execute(f"{EVERYTHING} ORDER BY {order}").fetchall()

    def _open(self) -> None:
        found = os.path.lexists(self._path)
        if found:
            self.damaged = not self._sealed()
        if not found or self.damaged:
            self._put_away()
        self._rows = self._connect()
        try:
            _check_layout(self._rows)
        except sqlite3.DatabaseError:
            self._let_go()
            self.damaged = found
            self._put_away()
            self._rows = self._connect()
            _create(self._rows)
            self._seal()

    def _connect(self) -> sqlite3.Connection:
        with named_errors(self._path):
            # Held as long as the connection: POSIX drops SQLite's locks when any descriptor of the file is closed.
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        rows = sqlite3.connect(self._path, timeout=WAIT_SECONDS, isolation_level=None)
        try:
            for pragma in PRAGMAS:
                rows.execute(f"PRAGMA {pragma}").fetchall()
            rows.execute("SELECT COUNT(*) FROM sqlite_master").fetchall()  # makes the log
        except sqlite3.OperationalError:
            rows.close()
            raise
        except sqlite3.DatabaseError:
            pass  # no SQLite at all: the check of its layout says so
        self._names = self._named_files()
        return rows

    def _named_files(self) -> list[tuple[int, int] | None]:
        """The files that now have the names of the list and of its log."""
        return [_identity(str(self._path)), _identity(f"{self._path}-wal")]

    def _let_go(self) -> None:
        with suppress(sqlite3.Error):
            self._rows.close()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _go_to_memory(self, rows: Iterable[Row] | None = None) -> None:
        """Keep the list in memory; of a sealed file, as it says."""
        if rows is None:
            rows = self._readable_sealed()
        self._rows = sqlite3.connect(":memory:", isolation_level=None)
        self._in_memory = True
        _create(self._rows)
        self._rows.executemany(f"INSERT INTO objects VALUES ({', '.join('?' * len(LAYOUT))})", rows)

    def _readable_sealed(self) -> list[Row]:
        if not self._sealed():
            return []
        try:
            file = sqlite3.connect(f"file:{quote(str(self._path))}?immutable=1", uri=True)
            try:
                _check_layout(file)
                return file.execute(EVERYTHING).fetchall()
            finally:
                file.close()
        except sqlite3.Error:
            return []

    def _readable(self) -> list[Row]:
        try:
            return self._all_rows()
        except sqlite3.Error:
            return []

    def _all_rows(self) -> list[Row]:
        return self._rows.execute(EVERYTHING).fetchall()

    @contextmanager
    def _using(self) -> Iterator[sqlite3.Connection]:
        """The connection, to the file that has the name, while nobody else uses it."""
        with self._alone(), named_errors(self._path):
            if not self._in_memory and self._named_files() != self._names:
                # Another process destroyed the list, or took itself for the last one and its log away.
                self._let_go()
                self._open()
            yield self._rows

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if self._in_memory:
            yield
            return
        with named_errors(self._lock):
            descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _write_uses(self) -> None:
        if not self._uses:
            return
        used = [(key,) for key in self._uses]
        with self._using() as rows:
            _in_one(rows, lambda: rows.executemany(
                "UPDATE objects SET used = (SELECT MAX(used) + 1 FROM objects) WHERE key = ?", used,
            ))
            self._keep_the_log_short()
        self._uses.clear()

    def _keep_the_log_short(self) -> None:
        with suppress(FileNotFoundError):
            if not self._in_memory and os.stat(f"{self._path}-wal").st_size > LOG_MOST:
                self._seal()

    def _expunged(self, which: Callable[[Entry], bool]) -> bool:
        """Whether the rows and all their bytes went; tried again in the room that is reserved."""
        for prepare in (lambda: None, lambda: self._reserve.unlink(missing_ok=True)):
            with suppress(sqlite3.Error, ArchiveError, OSError):
                prepare()
                self._expunge(which)
                return True
        return False

    def _expunge(self, which: Callable[[Entry], bool]) -> None:
        if self._named_files() != self._names:
            self._let_go()
            self._open()
        gone = [(row[0],) for row in self._all_rows() if which(Entry(*row[:-1]))]
        _in_one(self._rows, lambda: self._rows.executemany("DELETE FROM objects WHERE key = ?", gone))
        self._rows.execute("VACUUM")
        self._seal()

    def _destroy(self) -> None:
        """Erase the file; others who have it open see that the name has another one."""
        with named_errors(self._path):
            self._put_away()
        self._let_go()

    def _sealed(self) -> bool:
        try:
            with open(self._mark, "rb", buffering=0) as mark:
                return mark.read(65) == self._digest()
        except OSError:
            return False

    def _digest(self) -> bytes:
        if self._descriptor is not None:
            return _digest(self._descriptor)
        descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            return _digest(descriptor)
        finally:
            os.close(descriptor)

    def _seal(self) -> None:
        if self._in_memory:
            return
        damaged = self._mark.exists() and not self._sealed()
        busy = self._rows.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        if busy:
            raise ArchiveError(f"{self._path} is in use by a program that is not the archive's")
        # A file that was damaged while it was open must not get a seal.
        if not damaged and not self._sealed():
            publish(self._mark, [memoryview(self._digest())])

    def _put_away(self) -> None:
        for path in [self._mark, *self._path.parent.glob(f"{self._path.name}*")]:
            erase(path)


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


def _in_one(rows: sqlite3.Connection, work: Callable[[], object]) -> None:
    """All of the work, or nothing."""
    rows.execute("BEGIN IMMEDIATE")
    try:
        work()
        rows.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):
            rows.execute("ROLLBACK")
        raise


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _digest(descriptor: int) -> bytes:
    size = os.fstat(descriptor).st_size
    if size > SIZE_MOST:
        return b""
    digest = hashlib.sha256()
    for at in range(0, size, PIECE):
        digest.update(os.pread(descriptor, PIECE, at))
    return digest.hexdigest().encode()
