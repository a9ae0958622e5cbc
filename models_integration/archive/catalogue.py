"""The list of objects: SQLite in WAL mode, with a seal over its bytes, made again from the objects when in doubt.

The main file changes only in `_seal`, which checkpoints the log and writes the file's sha256 beside it. So at any
time the file either has the bytes of its seal, or is damaged and not used. The log carries SQLite's own checksums.
"""

import fcntl
import hashlib
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from models_integration.archive.errors import named_errors
from models_integration.archive.objects import Manifest
from models_integration.cache.atomic_file import publish

__all__ = ["Catalogue", "Entry"]

WAIT_SECONDS = 60.0
COLUMNS = "key, tenant, tokens, bytes, created"


class Entry(NamedTuple):
    """One object as it is listed."""

    key: str
    tenant: str
    tokens: int
    bytes: int
    created: float

    @classmethod
    def of(cls, manifest: Manifest, size: int) -> "Entry":
        return cls(manifest.key, manifest.tenant, manifest.tokens, size, manifest.created)


class Catalogue:
    """Rows of one archive. One connection belongs to one thread."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "catalogue.sqlite"
        self._mark = folder / "catalogue.seal"
        self._lock = folder / "catalogue.lock"
        self.damaged = False
        """Whether the file that was found did not have the bytes of its seal; it was put away."""
        with self._alone():
            if not self._path.exists():
                self._mark.unlink(missing_ok=True)
            elif not self._sealed():
                self.damaged = True
                self._put_away()
            fresh = not self._path.exists()
            self._rows = self._connect()
            if fresh:
                self._rows.execute(
                    "CREATE TABLE objects (key TEXT PRIMARY KEY, tenant TEXT NOT NULL, tokens INTEGER NOT NULL,"
                    " bytes INTEGER NOT NULL, created REAL NOT NULL)"
                )
                self._seal()

    def _connect(self) -> sqlite3.Connection:
        with named_errors(self._path):
            self._path.touch(mode=0o600)
        rows = sqlite3.connect(self._path, timeout=WAIT_SECONDS, isolation_level=None)
        for pragma in ("journal_mode = WAL", "synchronous = NORMAL", "wal_autocheckpoint = 0", "secure_delete = ON"):
            rows.execute(f"PRAGMA {pragma}").fetchall()
        return rows

    def close(self) -> None:
        """Seal and let go; a second call does nothing."""
        with self._alone():
            self._seal()
            self._rows.close()

    def add(self, entries: Iterable[Entry]) -> None:
        """List objects; those that are listed stay as they are."""
        self._rows.executemany(f"INSERT OR IGNORE INTO objects ({COLUMNS}) VALUES (?, ?, ?, ?, ?)", entries)

    def remove(self, keys: Iterable[str]) -> None:
        """Take objects off the list."""
        self._rows.executemany("DELETE FROM objects WHERE key = ?", [(key,) for key in keys])

    def entries(self, tenant: str | None = None) -> list[Entry]:
        """Rows in order of creation, then of keys; of one tenant, if one is named."""
        where, values = ("", ()) if tenant is None else (" WHERE tenant = ?", (tenant,))
        found = self._rows.execute(f"SELECT {COLUMNS} FROM objects{where} ORDER BY created, key", values)
        return [Entry(*row) for row in found.fetchall()]

    def forget(self) -> None:
        """Leave no byte of removed rows in the file or in its log."""
        with self._alone():
            self._rows.execute("VACUUM")
            self._seal()

    def intact(self) -> bool:
        """Whether the file still has the bytes of its seal."""
        with self._alone():
            return self._sealed()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with named_errors(self._lock):
            file = self._lock.open("a")
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _sealed(self) -> bool:
        try:
            return self._mark.read_text(encoding="ascii") == _digest(self._path)
        except (OSError, UnicodeDecodeError):
            return False

    def _seal(self) -> None:
        damaged = self._mark.exists() and not self._sealed()
        self._rows.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        # A file that was damaged while it was open must not get a seal.
        if not damaged and not self._sealed():
            with named_errors(self._mark):
                publish(self._mark, [memoryview(_digest(self._path).encode())])

    def _put_away(self) -> None:
        for path in [*self._path.parent.glob(f"{self._path.name}*"), self._mark]:
            path.unlink(missing_ok=True)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
