"""Errors of the archive. After an error the stored objects are unchanged."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from models_integration.cache.atomic_file import NO_SPACE

__all__ = [
    "ArchiveError", "ArchiveFull", "ArchiveReadOnly", "ForeignVersion", "KeyUnavailable", "NoSuchChunk", "NotEncrypted",
    "OtherDtype", "OtherFrequencies", "WrongModel", "named_errors",
]

NO_RIGHT = (errno.EROFS, errno.EACCES, errno.EPERM)


class ArchiveError(RuntimeError):
    """Base class of all errors of the archive."""


class ArchiveFull(ArchiveError):
    """Error if the disk or the quota is full."""


class ArchiveReadOnly(ArchiveError):
    """Error if the folder cannot be written."""


class ForeignVersion(ArchiveError):
    """Error if the object has a different version of the format or of the specification."""


class KeyUnavailable(ArchiveError):
    """Error if the archive is encrypted and the given key is missing, wrong or deleted."""


class NoSuchChunk(ArchiveError):
    """Error if no chunk has the key, or if the bytes of the chunk are damaged."""


class NotEncrypted(ArchiveError):
    """Error if the object of an encrypted archive is unencrypted. Anyone with write access can have made the object."""


class OtherDtype(ArchiveError):
    """Error if the RoPE frequencies have a different dtype. (`.to(bfloat16)` rounds the frequencies.)"""


class OtherFrequencies(ArchiveError):
    """Error if the keys were rotated by different inverse frequencies."""


class WrongModel(ArchiveError):
    """Error if a model with different weights computed the keys and values."""


@contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Context manager that raises ArchiveFull or ArchiveReadOnly for the OSError of a full disk or read-only folder."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_SPACE:
            raise ArchiveFull(f"no room to write {path}: {error.strerror}") from error
        if error.errno in NO_RIGHT:
            raise ArchiveReadOnly(f"{path} cannot be written: {error.strerror}") from error
        raise
