"""An SQLite file with a seal over its bytes, which several processes share, one at a time.

The main file changes only in `seal`, which checkpoints the log and writes the file's sha256 beside it. So at any time
the file either has the bytes of its seal, or is damaged and not used. The log carries SQLite's own checksums.
"""

import fcntl
import hashlib
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from models_integration.archive.errors import ArchiveError, named_errors
from models_integration.cache.atomic_file import erase, publish, read_at

__all__ = ["SealedDatabase"]

WAIT_SECONDS = 60.0
LOG_MOST = 1 << 22
"""Bytes of the log from which it is written into the file."""
RESERVE_STEP = 1 << 18
PIECE = 1 << 20
PRAGMAS = (
    "journal_mode = WAL", "synchronous = NORMAL", "wal_autocheckpoint = 0", "secure_delete = ON",
    "temp_store = MEMORY", "trusted_schema = OFF",
)
SIZE_MOST = 1 << 30
"""Bytes of a list of some four million objects; what is larger is not read."""


class SealedDatabase:
    """One connection to the file; every method but `alone` and `copied` is called inside `alone`.

    `rows` is the connection, `damaged` whether a file was found that has not the bytes of its seal, or that `check`
    refuses with a DatabaseError; it was put away, and `create` filled a new one.
    """

    def __init__(
        self, folder: Path, create: Callable[[sqlite3.Connection], None], check: Callable[[sqlite3.Connection], None],
    ) -> None:
        self.path = folder / "catalogue.sqlite"
        self.damaged = False
        self._mark = folder / "catalogue.seal"
        self._lock = folder / "catalogue.lock"
        self._reserve = folder / "catalogue.reserve"
        self._create, self._check = create, check
        self._descriptor: int | None = None
        self._names: list[tuple[int, int] | None] = []
        self.rows = sqlite3.connect(":memory:")

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While no other process uses the file."""
        with named_errors(self._lock):
            descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def open(self) -> None:
        """Connect, unless it is connected to the file that has the name.

        Another process may have destroyed the list, or taken itself for the last one and the log away.
        """
        if self._descriptor is not None and self._named_files() == self._names:
            return
        self.let_go()
        found = os.path.lexists(self.path)
        if not found or not self.sealed():
            self.damaged = found
            self.destroy()
        self._connect()
        try:
            self._check(self.rows)
        except sqlite3.DatabaseError:
            self.damaged = found
            self.destroy()
            self._connect()
            self._create(self.rows)
            self.seal()

    def _connect(self) -> None:
        with named_errors(self.path):
            # Held as long as the connection: POSIX drops SQLite's locks when any descriptor of the file is closed.
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        self.rows = sqlite3.connect(self.path, timeout=WAIT_SECONDS, isolation_level=None)
        try:
            for pragma in PRAGMAS:
                self.rows.execute(f"PRAGMA {pragma}").fetchall()
            self.rows.execute("SELECT COUNT(*) FROM sqlite_master").fetchall()  # makes the log
        except sqlite3.OperationalError:
            self.let_go()
            raise
        except sqlite3.DatabaseError:
            pass  # no SQLite at all: the check of its layout says so
        self._names = self._named_files()

    def let_go(self) -> None:
        """Close the connection."""
        with suppress(sqlite3.Error):
            self.rows.close()
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            with suppress(OSError):  # nothing was written through it
                os.close(descriptor)

    def seal(self) -> None:
        """Write the log into the file, and the file's seal.

        Raises:
            ArchiveError, OSError, sqlite3.Error: and the file may have no seal.
        """
        damaged = self._mark.exists() and not self.sealed()
        if self.rows.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
            raise ArchiveError(f"{self.path} is in use by a program that is not the archive's")
        # A file that was damaged while it was open must not get a seal.
        if not damaged and not self.sealed():
            publish(self._mark, [memoryview(self._digest())])

    def keep_the_log_short(self) -> None:
        """Seal once the log has grown."""
        with suppress(FileNotFoundError):
            if os.stat(f"{self.path}-wal").st_size > LOG_MOST:
                self.seal()

    def sealed(self) -> bool:
        """Whether the file has the bytes of its seal."""
        try:
            with open(self._mark, "rb") as mark:
                return mark.read(65) == self._digest()
        except OSError:
            return False

    def copied(self, question: str) -> list[tuple[object, ...]]:
        """An answer of a sealed file that is not connected, without a write; nothing of another."""
        if not self.sealed():
            return []
        try:
            file = sqlite3.connect(f"file:{quote(str(self.path))}?immutable=1", uri=True)
            try:
                self._check(file)
                return file.execute(question).fetchall()
            finally:
                file.close()
        except sqlite3.Error:
            return []

    def destroy(self) -> None:
        """Erase the file; others who have it open see that the name has another one."""
        with named_errors(self.path):
            for path in [self._mark, *self.path.parent.glob(f"{self.path.name}*")]:
                erase(path)
        self.let_go()

    def make_room(self) -> None:
        """Reserve what erasing will need."""
        with named_errors(self._reserve):
            needed = (2 * self.path.stat().st_size // RESERVE_STEP + 1) * RESERVE_STEP
            descriptor = os.open(self._reserve, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                if os.fstat(descriptor).st_size < needed:
                    os.posix_fallocate(descriptor, 0, needed)
            finally:
                os.close(descriptor)

    def give_room(self) -> None:
        """Give up what is reserved."""
        self._reserve.unlink(missing_ok=True)

    def _named_files(self) -> list[tuple[int, int] | None]:
        """The files that now have the names of the list and of its log."""
        return [_identity(str(self.path)), _identity(f"{self.path}-wal")]

    def _digest(self) -> bytes:
        if self._descriptor is not None:
            return _digest(self._descriptor)
        descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            return _digest(descriptor)
        finally:
            os.close(descriptor)


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
        digest.update(read_at(descriptor, PIECE, at))
    return digest.hexdigest().encode()
