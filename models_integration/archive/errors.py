"""What an archive can fail with, by name. None of these changes what is stored."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = [
    "ArchiveError", "ArchiveFull", "ArchiveReadOnly", "DamagedPins", "ForeignVersion", "KeyUnavailable", "NoSuchChunk",
    "OtherDtype", "OtherFrequencies", "OtherPins", "WrongModel", "named_errors",
]

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_RIGHT = (errno.EROFS, errno.EACCES, errno.EPERM)


class ArchiveError(RuntimeError):
    """The base of all of them."""


class ArchiveFull(ArchiveError):
    """The disk, or the quota, has no room."""


class ArchiveReadOnly(ArchiveError):
    """The folder cannot be written."""


class DamagedPins(ArchiveError):
    """The file holds no pinned selections."""


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


class OtherPins(ArchiveError):
    """Results under different pinned selections are not comparable."""


class WrongModel(ArchiveError):
    """The keys and values come from other weights."""


@contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """A full disk and a read-only folder by name; every other OSError as it is."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            raise ArchiveFull(f"no room to write {path}: {error.strerror}") from error
        if error.errno in NO_RIGHT:
            raise ArchiveReadOnly(f"{path} cannot be written: {error.strerror}") from error
        raise
