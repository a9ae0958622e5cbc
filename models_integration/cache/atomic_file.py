"""Atomic writing of files, and removal of files after an overwrite with zeros."""

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
    "NO_SPACE", "TEMPORARY", "DeferredBytes", "NotRegular", "erase", "is_being_written", "publish", "publish_readable",
    "read_at", "regular_file", "sync",
]

TEMPORARY = ".tmp-"
WHOLE = "-whole"
"""End of the name of a temporary file that was named only after its last byte was written."""
ABANDONED_SECONDS = 3600.0
"""Age from which a temporary file without a lock counts as abandoned, on every file system."""
PARTS_MOST = 512
"""Largest number of buffers in one call. Linux accepts 1024."""
PAGE = 4096
PIECE = 1 << 20
"""Number of zeros in one write."""
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class DeferredBytes:
    """Bytes (the digest) in the first page of a file, computed while all other bytes are written to the disk."""

    offset: int
    compute: Callable[[], bytes]


def publish(
    path: Path, parts: Sequence[memoryview], replace: bool = True, late: DeferredBytes | None = None, mode: int = 0o600,
    nameless: bool = False,
) -> None:
    """Write a file durably and atomically: write a temporary file, fsync, rename, and fsync of the folder.

    If `replace` is False, an existing file is unchanged. `mode` contains the permissions of the file, before the
    process's umask. The temporary file is locked while the file is written (see `is_being_written`). With `nameless`,
    the temporary file has no name before the last byte, if the system supports this. A killed process then leaves no
    file. First, files that killed processes left are removed.

    Raises:
        OSError: from the file system. The path has the old file, or the new file if only the last fsync failed.
    """
    _make_folder(path.parent, 0o700)
    if nameless:
        _remove_abandoned(path)
    descriptor, temporary, named = _created(path, mode, nameless)
    try:
        with suppress(OSError):  # a file system without locks; the file is protected by its age
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if late is None:
            _write(descriptor, parts)
        else:
            _write_both(descriptor, parts, late)
        os.fsync(descriptor)
        if not named:
            # Python follows the link in /proc only with a `src_dir_fd`, although an absolute path does not need it.
            os.link(f"/proc/self/fd/{descriptor}", temporary, src_dir_fd=descriptor)
        if replace:
            os.replace(temporary, path)
        else:
            _link(temporary, path)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # a full disk has no name of its own
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    sync(path.parent)


def _make_folder(path: Path, mode: int = 0o777) -> None:
    """Make a folder and its missing parents, with durable names. `mode` has the permissions of the last folder."""
    if not path.is_dir():
        _make_folder(path.parent)
        path.mkdir(exist_ok=True, mode=mode)
        sync(path.parent)


def _created(path: Path, mode: int, nameless: bool) -> tuple[int, Path, bool]:
    """Make a temporary file in the folder of `path`. Return the descriptor, the name, and True if the name exists."""
    temporary = path.parent / f"{TEMPORARY}{path.name}-{os.getpid()}-{secrets.token_hex(4)}"
    if nameless and (descriptor := _locked_nameless(path.parent, mode)) is not None:
        return descriptor, temporary.with_name(temporary.name + WHOLE), False
    return os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), temporary, True


def _locked_nameless(folder: Path, mode: int) -> int | None:
    """Return a locked file without a name, or None if the system cannot make, lock or name such a file."""
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

    A file that was locked before it was named is abandoned if no process has the lock. All other files may be locked
    later, or never, so they count as abandoned only if they are also old.
    """
    pattern = re.compile(re.escape(f"{TEMPORARY}{path.name}-") + r"[0-9]+-[0-9a-f]{8}" + f"({WHOLE})?")
    for name in os.listdir(path.parent):
        temporary = path.parent / name
        if (match := pattern.fullmatch(name)) is None or is_being_written(temporary):
            continue
        with suppress(OSError):
            if match[1] or temporary.stat().st_mtime < time.time() - ABANDONED_SECONDS:
                temporary.unlink()


def is_being_written(temporary: Path) -> bool:
    """Return True if a process has the lock of a temporary file of `publish`. A killed process loses the lock."""
    try:
        descriptor = os.open(temporary, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks; the file is protected by its age
        return False
    finally:
        os.close(descriptor)
    return False


def publish_readable(path: Path, data: bytes) -> None:
    """Write a page, a table or statistics with `publish`, with the permissions of a new file. Links are followed.

    If `path` is a device such as /dev/stdout, the bytes are written to the device.

    Raises:
        OSError: as in `publish`.
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


def _write_both(descriptor: int, parts: Sequence[memoryview], late: DeferredBytes) -> None:
    with ThreadPoolExecutor(1) as beside:
        computed = beside.submit(late.compute)
        _write(descriptor, parts)
        if hasattr(os, "posix_fadvise"):
            # After this advice, Linux begins to write dirty pages to the disk.
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
    # A call may write only some of the bytes.
    while data:
        written = os.pwrite(descriptor, data, at)
        data, at = data[written:], at + written


class NotRegular(OSError):
    """Error for a path that is a FIFO, a device, a socket, a folder or a link."""


@contextmanager
def regular_file(path: Path, follow_links: bool = False) -> Iterator[int]:
    """Context manager that opens a regular file for reading. Opening a FIFO does not wait for a writer.

    Raises:
        NotRegular: if `path` is not a regular file, or is a link and `follow_links` is False.
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
    """Return `size` bytes of a file from offset `at`. The result is shorter only at the end of the file.

    Raises:
        OSError: from the file system.
    """
    content = b""
    while len(content) < size and (piece := os.pread(descriptor, size - len(content), at + len(content))):
        content += piece
    return content


def sync(folder: Path) -> None:
    """Make the file names in a folder durable (fsync)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def erase(path: Path) -> bool:
    """Overwrite a file with zeros, then remove the file. Return True if the file existed. No disk space is needed.

    If `path` is a link, only the link is removed. A file that has more names, or that is the target of a link, keeps
    its bytes. On storage that never writes in place, only encryption and destruction of the key make an object
    unreadable.

    Raises:
        OSError: from the file system. A file that could not be overwritten is removed if possible.
    """
    failed = None
    try:
        status = os.lstat(path)
        try:
            if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
                _overwrite(path)
        except OSError as error:
            # A file system without free space does not write in place, so zeros would not have erased the bytes.
            failed = None if error.errno in NO_SPACE else error
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
    """Yield the ranges of a file that have bytes. Zeros in the holes of a sparse file would fill the disk."""
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
