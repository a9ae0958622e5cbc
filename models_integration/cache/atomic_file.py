"""Files that appear whole or not at all, and that are erased before they are removed."""

import errno
import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "NO_ROOM", "TEMPORARY", "Late", "NotRegular", "erase", "is_being_written", "publish", "publish_readable", "read_at",
    "regular_file", "sync",
]

TEMPORARY = ".tmp-"
WHOLE = "-whole"
"""How a temporary file's name ends that got it after its last byte."""
ABANDONED_SECONDS = 3600.0
"""The age from which on a temporary file that nobody holds is nobody's, on any file system."""
PARTS_MOST = 512
"""Of one call; Linux takes 1024."""
PAGE = 4096
PIECE = 1 << 20
"""Zeros that are written at a time."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Late:
    """Bytes inside a file's first page that are computed while the rest is on its way to the disk: its digest."""

    offset: int
    compute: Callable[[], bytes]


def publish(
    path: Path, parts: Sequence[memoryview], replace: bool = True, late: Late | None = None, mode: int = 0o600,
    nameless: bool = False,
) -> None:
    """Write a file durably: a temporary one, fsync, rename, fsync of the folder. A reader sees all of it or nothing.

    Without `replace`, a file of that name stays as it is. `mode` are the rights to it, less the process's umask.
    The temporary file is locked while it is written; see `is_being_written`. With `nameless` it has no name before its
    last byte, if the system has such files, so that a kill leaves nothing; what kills have left is removed first.

    Raises:
        OSError: from the file system; the path has the old file, or, where the last fsync failed, the new one.
    """
    _make_folder(path.parent, 0o700)
    if nameless:
        _remove_abandoned(path)
    descriptor, temporary, named = _created(path, mode, nameless)
    try:
        with suppress(OSError):  # a file system without locks; the file's age protects it
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if late is None:
            _write(descriptor, parts)
        else:
            _write_both(descriptor, parts, late)
        os.fsync(descriptor)
        if not named:
            # With a `src_dir_fd`, which an absolute path does not need, Python follows the link in /proc to the file.
            os.link(f"/proc/self/fd/{descriptor}", temporary, src_dir_fd=descriptor)
        if replace:
            os.replace(temporary, path)
        else:
            _link(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    sync(path.parent)


def _make_folder(path: Path, mode: int = 0o777) -> None:
    """Make a folder and those above it, each name durable; `mode` is that of the last."""
    if not path.is_dir():
        _make_folder(path.parent)
        path.mkdir(exist_ok=True, mode=mode)
        sync(path.parent)


def _created(path: Path, mode: int, nameless: bool) -> tuple[int, Path, bool]:
    """A new temporary file beside the path: its descriptor, its name, and whether it has that name already."""
    temporary = path.parent / f"{TEMPORARY}{path.name}-{os.getpid()}-{secrets.token_hex(4)}"
    if nameless and (descriptor := _locked_nameless(path.parent, mode)) is not None:
        return descriptor, temporary.with_name(temporary.name + WHOLE), False
    return os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), temporary, True


def _locked_nameless(folder: Path, mode: int) -> int | None:
    """A locked file without a name; None where the system has none, or can neither lock nor name them."""
    flag = getattr(os, "O_TMPFILE", None)
    if flag is None or not os.path.isdir("/proc/self/fd"):
        return None
    try:
        descriptor = os.open(folder, os.O_WRONLY | flag, mode)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _remove_abandoned(path: Path) -> None:
    """Remove the temporary files of a path whose writers were killed.

    A file that was locked before it got its name is abandoned as soon as nobody holds the lock. Others may be locked a
    moment after they are made, or never: they must be old.
    """
    own = re.compile(re.escape(f"{TEMPORARY}{path.name}-") + r"[0-9]+-[0-9a-f]{8}" + f"({WHOLE})?")
    for name in os.listdir(path.parent):
        temporary = path.parent / name
        if (found := own.fullmatch(name)) is None or is_being_written(temporary):
            continue
        with suppress(OSError):
            if found[1] or temporary.stat().st_mtime < time.time() - ABANDONED_SECONDS:
                temporary.unlink()


def is_being_written(temporary: Path) -> bool:
    """Whether a process holds the lock of a temporary file of `publish`; a kill lets it go."""
    try:
        descriptor = os.open(temporary, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks; the file's age protects it
        return False
    finally:
        os.close(descriptor)
    return False


def publish_readable(path: Path, data: bytes) -> None:
    """Write a page, a table or statistics: `publish`, with the rights that new files have. Links are followed.

    What is no file, such as /dev/stdout, is written to as it is.

    Raises:
        OSError: as `publish`.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(data)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
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
        _write_at(descriptor, computed.result(), late.offset)


def _write(descriptor: int, parts: Sequence[memoryview]) -> None:
    left = [part for part in parts if len(part)]
    while left:
        written = os.writev(descriptor, left[:PARTS_MOST])
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if written:
            left[0] = left[0][written:]


def _write_at(descriptor: int, data: bytes, at: int) -> None:
    # A call may write less than it was given.
    while data:
        written = os.pwrite(descriptor, data, at)
        data, at = data[written:], at + written


class NotRegular(OSError):
    """The path has a FIFO, a device, a socket, a folder or a link."""


@contextmanager
def regular_file(path: Path, follow_links: bool = False) -> Iterator[int]:
    """Descriptor of a regular file, open for reading. Opening a FIFO does not wait for a writer.

    Raises:
        NotRegular: for anything else; for a link, unless links are followed.
        OSError: from the file system.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW))
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
            raise NotRegular(error.errno, "must be a regular file", str(path)) from error
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise NotRegular(errno.EINVAL, "must be a regular file", str(path))
        yield descriptor
    finally:
        os.close(descriptor)


def read_at(descriptor: int, size: int, at: int) -> bytes:
    """Bytes of a file from a place on; fewer than `size` only where it ends.

    Raises:
        OSError: from the file system.
    """
    found = b""
    while len(found) < size and (piece := os.pread(descriptor, size - len(found), at + len(found))):
        found += piece
    return found


def sync(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def erase(path: Path) -> bool:
    """Overwrite a file with zeros, then remove it; whether there was one. It needs no room.

    Of a link, only the link goes: a file that has other names, or that a link leads to, keeps its bytes. On storage
    that never writes in place, only the destroyed key of an encrypted object makes it unreadable.

    Raises:
        OSError: from the file system; a file that could not be overwritten is removed if it can be.
    """
    failed = None
    try:
        found = os.lstat(path)
        try:
            if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
                _overwrite(path)
        except OSError as error:
            # Without room, the file system does not write in place, and zeros would not have hidden anything.
            failed = None if error.errno in NO_ROOM else error
        os.unlink(path)
    except FileNotFoundError:
        return False
    sync(path.parent)
    if failed is not None:
        raise failed
    return True


def _overwrite(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        for low, high in _data(descriptor, os.fstat(descriptor).st_size):
            for at in range(low, high, PIECE):
                _write_at(descriptor, bytes(min(PIECE, high - at)), at)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _data(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """Where a file has bytes: zeros written into the holes of a sparse one would fill the disk."""
    at = 0
    while at < size:
        try:
            low = os.lseek(descriptor, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        at = os.lseek(descriptor, low, os.SEEK_HOLE)
        yield low, at
