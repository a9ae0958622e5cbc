"""What an archive can fail with, by name. None of these changes what is stored."""

__all__ = [
    "ArchiveError", "ArchiveFull", "ArchiveReadOnly", "ForeignVersion", "KeyUnavailable", "NoSuchChunk", "OtherDtype",
    "OtherFrequencies", "OtherPins", "WrongModel",
]


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


class OtherPins(ArchiveError):
    """Results under different pinned selections are not comparable."""


class WrongModel(ArchiveError):
    """The keys and values come from other weights."""
