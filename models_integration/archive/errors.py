"""What an archive can fail with, by name. None of these changes what is stored."""

import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from models_integration.cache.atomic_file import NO_ROOM

__all__ = [
    "ArchiveError", "ArchiveFull", "ArchiveReadOnly", "ForeignVersion", "KeyUnavailable", "NoSuchChunk", "OtherDtype",
    "OtherFrequencies", "WrongModel", "named_errors",
]

NO_RIGHT = (errno.EROFS, errno.EACCES, errno.EPERM)


class ArchiveError(RuntimeError):
    """The base of all of them."""


class ArchiveFull(ArchiveError):
    """The disk, or the quota, has no room."""


class ArchiveReadOnly(ArchiveError):
    """The folder cannot be written."""


class ForeignVersion(ArchiveError):
    """The object was written under another version of the format, or of the specification."""


class KeyUnavailable(ArchiveError):
    """The object is encrypted, and the tenant's key is another one, or was forgotten."""


class NoSuchChunk(ArchiveError):
    """There is no chunk of that key, or its bytes are not those that were written."""


class OtherDtype(ArchiveError):
    """The frequencies were kept in another dtype: `.to(bfloat16)` rounds the buffer."""


class OtherFrequencies(ArchiveError):
    """The keys were rotated by other inverse frequencies."""


class WrongModel(ArchiveError):
    """The keys and values come from other weights."""


@contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """A full disk and a read-only folder by name; every other OSError as it is; SQLite's errors as one of these."""
    try:
        yield
    except sqlite3.Error as error:
        raise _of_sqlite(error, path) from error
    except OSError as error:
        if error.errno in NO_ROOM:
            raise ArchiveFull(f"no room to write {path}: {error.strerror}") from error
        if error.errno in NO_RIGHT:
            raise ArchiveReadOnly(f"{path} cannot be written: {error.strerror}") from error
        raise


def _of_sqlite(error: sqlite3.Error, path: Path) -> Exception:
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE):
        return ArchiveFull(f"no room to write {path}: {error}")
    if code & 0xFF in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        return ArchiveReadOnly(f"{path} cannot be written: {error}")
    if code & 0xFF == sqlite3.SQLITE_IOERR:
        return OSError(errno.EIO, os.strerror(errno.EIO), str(path))
    return ArchiveError(f"{path} cannot be used, opening the archive makes it again: {error}")
