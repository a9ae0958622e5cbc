"""Files that appear whole or not at all, and that are erased before they are removed."""

import os
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["TEMPORARY", "Late", "erase", "publish", "publish_readable", "sync"]

TEMPORARY = ".tmp-"
PARTS_MOST = 512
"""Of one call; Linux takes 1024."""
PAGE = 4096


@dataclass(frozen=True)
class Late:
    """Bytes inside a file's first page that are computed while the rest is on its way to the disk: its digest."""

    offset: int
    compute: Callable[[], bytes]


def publish(
    path: Path, parts: Sequence[memoryview], replace: bool = True, late: Late | None = None, mode: int = 0o600,
) -> None:
    """Write a file durably: a temporary one, fsync, rename, fsync of the folder. A reader sees all of it or nothing.

    Without `replace`, a file of that name stays as it is. `mode` are the rights to it, less the process's umask.

    Raises:
        OSError: from the file system; nothing has changed.
    """
    if not path.parent.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        sync(path.parent.parent)
    temporary = path.parent / f"{TEMPORARY}{path.name}-{os.getpid()}-{secrets.token_hex(4)}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        try:
            if late is None:
                _write(descriptor, parts)
            else:
                _write_both(descriptor, parts, late)
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


def publish_readable(path: Path, data: bytes) -> None:
    """Write a page, a table or statistics: `publish`, with the rights that new files have. Links are followed.

    What is no file, such as /dev/stdout, is written to as it is.

    Raises:
        OSError: as `publish`.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(data)
    else:
        publish(path.resolve(), [memoryview(data)], mode=0o666)


def _link(temporary: Path, path: Path) -> None:
    with suppress(FileExistsError):
        os.link(temporary, path)
    temporary.unlink()


def _write_both(descriptor: int, parts: Sequence[memoryview], late: Late) -> None:
    with ThreadPoolExecutor(1) as beside:
        computed = beside.submit(late.compute)
        _write(descriptor, parts)
        if hasattr(os, "posix_fadvise"):
            # Linux starts to write what is dirty when it is told that nobody needs it cached.
            os.posix_fadvise(descriptor, PAGE, 0, os.POSIX_FADV_DONTNEED)
        os.pwrite(descriptor, computed.result(), late.offset)


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

    Raises:
        OSError: from the file system.
    """
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
