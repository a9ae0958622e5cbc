"""What an archive can fail with, by name. None of these changes what is stored."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from models_integration.cache.atomic_file import NO_ROOM

__all__ = [
    "ArchiveError", "ArchiveFull", "ArchiveReadOnly", "ForeignVersion", "KeyUnavailable", "NoSuchChunk", "NotEncrypted",
    "OtherDtype", "OtherFrequencies", "WrongModel", "named_errors",
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
    """The archive is encrypted, and no key, another one or a forgotten one was given."""


class NoSuchChunk(ArchiveError):
    """There is no chunk of that key, or its bytes are not those that were written."""


class NotEncrypted(ArchiveError):
    """The archive is encrypted, and the object is not: anybody who can write the folder can have made it."""


class OtherDtype(ArchiveError):
    """The frequencies were kept in another dtype: `.to(bfloat16)` rounds the buffer."""


class OtherFrequencies(ArchiveError):
    """The keys were rotated by other inverse frequencies."""


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
