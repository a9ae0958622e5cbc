"""Files that appear whole or not at all, and that are erased before they are removed."""

import errno
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from models_integration.archive.errors import ArchiveFull, ArchiveReadOnly

__all__ = ["TEMPORARY", "erase", "named_errors", "publish", "sync"]

TEMPORARY = ".tmp-"
PARTS_MOST = 512
"""Of one call; Linux takes 1024."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_RIGHT = (errno.EROFS, errno.EACCES, errno.EPERM)


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


def publish(path: Path, parts: Sequence[memoryview], replace: bool = True) -> None:
    """Write a file durably: a temporary one, fsync, rename, fsync of the folder. A reader sees all of it or nothing.

    Without `replace`, a file of that name stays as it is.

    Raises:
        ArchiveFull, ArchiveReadOnly: and nothing has changed.
        OSError: whatever else the file system says.
    """
    with named_errors(path):
        if not path.parent.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            sync(path.parent.parent)
        temporary = path.parent / f"{TEMPORARY}{path.name}-{os.getpid()}-{secrets.token_hex(4)}"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            try:
                _write(descriptor, parts)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            if replace:
                os.replace(temporary, path)
            else:
                _link(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync(path.parent)


def _link(temporary: Path, path: Path) -> None:
    with suppress(FileExistsError):
        os.link(temporary, path)
    temporary.unlink()


def _write(descriptor: int, parts: Sequence[memoryview]) -> None:
    left = [part for part in parts if len(part)]
    while left:
        written = os.writev(descriptor, left[:PARTS_MOST])
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if written:
            left[0] = left[0][written:]


def sync(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def erase(path: Path) -> None:
    """Overwrite a file with zeros, then remove it; nothing where there is none.

    On storage that never writes in place, only the destroyed key of an encrypted object makes it unreadable.
    """
    with named_errors(path):
        try:
            size = path.stat().st_size
            with path.open("r+b") as file:
                for at in range(0, size, 1 << 20):
                    file.write(bytes(min(1 << 20, size - at)))
                file.flush()
                os.fsync(file.fileno())
            path.unlink()
        except FileNotFoundError:
            return
        sync(path.parent)
