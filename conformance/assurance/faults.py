"""Calls to the system that fail, one at a time: Python's own, SQLite's statements, and SQLite's own calls.

SQLite lets its tests put other functions in the place of its calls to the system (`xSetSystemCall` of its VFS). fsync
is not among them, so a statement also fails once it has been carried out. fcntl is left alone: no lock fails with one
of these errors, and SQLite would wait ten seconds for it.
"""

import builtins
import ctypes
import errno
import fcntl
import io
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import pytest

__all__ = ["CALLS", "KILL", "SHORT", "Faults", "faults", "sqlite_is_reached"]

CALLS = {
    os: (
        "open", "close", "read", "readv", "write", "writev", "pread", "pwrite", "fsync", "fdatasync", "sync", "replace",
        "rename", "link", "symlink", "unlink", "remove", "mkdir", "rmdir", "utime", "chmod", "stat", "lstat", "fstat",
        "access", "scandir", "listdir", "truncate", "ftruncate", "posix_fallocate", "posix_fadvise", "lseek", "urandom",
    ),
    fcntl: ("flock", "lockf", "fcntl"), io: ("open",),
}
KILL, SHORT = 0, -1
"""In the place of an error: the process is killed; only half of what was asked for is read or written."""
OF_SQLITE = {
    errno.ENOSPC: sqlite3.SQLITE_FULL, errno.EIO: sqlite3.SQLITE_IOERR_FSYNC, errno.EROFS: sqlite3.SQLITE_READONLY,
}
IN_SQLITE = (
    "open", "close", "access", "stat", "fstat", "lstat", "ftruncate", "read", "pread", "pread64", "write",
    "pwrite", "pwrite64", "fchmod", "fchown", "fallocate", "unlink", "mkdir", "mmap", "mremap", "readlink",
)
HALVED_IN_SQLITE = ("read", "pread", "pread64", "write", "pwrite", "pwrite64")
# Each takes at most six arguments, in registers; those that it does not take are not looked at.
Call = ctypes.CFUNCTYPE(ctypes.c_long, *[ctypes.c_long] * 6, use_errno=True)


def half(size: int) -> int:
    return max(1, size // 2)


HALVED: dict[str, Callable[..., tuple[Any, ...]]] = {
    "writev": lambda file, parts: (file, [parts[0][: half(len(parts[0]))]]),
    "write": lambda file, data: (file, data[: half(len(data))]),
    "pwrite": lambda file, data, at: (file, data[: half(len(data))], at),
    "pread": lambda file, size, at: (file, half(size), at),
    "read": lambda file, size: (file, half(size)),
}


class Faults:
    """Counts calls to the system, and lets the one of number `at` fail with an error; of SHORT, those that can be."""

    def __init__(self, at: int, number: int) -> None:
        self.at, self.number = at, number
        self.calls: list[str] = []

    def fails(self, name: str, can_be_short: bool = False) -> bool:
        """Count a call: whether it fails."""
        if self.number == SHORT and not can_be_short:
            return False
        self.calls.append(name)
        if len(self.calls) == self.at and self.number == KILL:
            os.kill(os.getpid(), 9)
        return len(self.calls) == self.at

    def error(self) -> OSError:
        return OSError(self.number, os.strerror(self.number))

    def of_python(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def failing(*arguments: Any, **options: Any) -> Any:
            if not self.fails(name, name in HALVED):
                return real(*arguments, **options)
            if self.number == SHORT:
                return real(*HALVED[name](*arguments))
            if name == "close":  # the descriptor is gone all the same
                real(*arguments)
            raise self.error()

        return failing

    def reader(self) -> type[io.FileIO]:
        """A file whose reads are counted."""
        made = self

        class Reader(io.FileIO):
            def readinto(self, buffer: Any, /) -> int | None:
                view = memoryview(buffer)
                return super().readinto(view[: made.least(len(view))])

            def read(self, size: int | None = -1, /) -> bytes:
                assert size is not None
                assert size >= 0
                return super().read(made.least(size)) or b""

            def readall(self) -> bytes:
                if made.fails("readall"):
                    raise made.error()
                return super().readall() or b""

        return Reader

    def least(self, size: int) -> int:
        """How much of what was asked for is read."""
        if not self.fails("read", can_be_short=True):
            return size
        if self.number == SHORT:
            return half(size)
        raise self.error()

    def opened(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def opening(path: Any, mode: str = "r", buffering: int = -1, *rest: Any, **options: Any) -> Any:
            if self.fails("open"):
                raise self.error()
            if mode != "rb":
                return real(path, mode, buffering, *rest, **options)
            raw = self.reader()(path)
            return raw if buffering == 0 else io.BufferedReader(raw)

        return opening

    def connection(self) -> type[sqlite3.Connection]:
        """Every statement fails before it is carried out, or after."""
        made = self

        class Connection(sqlite3.Connection):
            def execute(self, *arguments: Any) -> sqlite3.Cursor:
                made.statement()
                cursor = super().execute(*arguments)
                made.statement()
                return cursor

            def executemany(self, *arguments: Any) -> sqlite3.Cursor:
                made.statement()
                cursor = super().executemany(*arguments)
                made.statement()
                return cursor

        return Connection

    def statement(self) -> None:
        if self.fails("statement"):
            raise _of_sqlite(os.strerror(self.number), OF_SQLITE[self.number])

    def connected(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def connecting(file: Any, *given: Any, **options: Any) -> Any:
            if file != ":memory:" and self.fails("connect"):
                raise _of_sqlite("unable to open database file", sqlite3.SQLITE_CANTOPEN)
            return real(file, *given, factory=self.connection(), **options)

        return connecting

    def in_sqlite(self, name: str, real: Callable[..., int]) -> Any:
        """The function that SQLite calls."""

        def failing(*arguments: int) -> int:
            if not self.fails(f"{name} in SQLite", name in HALVED_IN_SQLITE):
                return real(*arguments)
            if self.number == SHORT:
                return real(*arguments[:2], half(arguments[2]), *arguments[3:])
            if name == "close":
                real(*arguments)
            ctypes.set_errno(self.number)
            return -1

        return Call(failing)


def _of_sqlite(text: str, code: int) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError(text)
    error.sqlite_errorcode = code
    return error


class _Vfs(ctypes.Structure):
    """`sqlite3_vfs` of sqlite3.h."""

    _fields_ = (
        [(name, ctypes.c_int) for name in ("version", "file_size", "path_size")]
        + [(f"unused{at}", ctypes.c_void_p) for at in range(16)]
        + [("set_call", ctypes.c_void_p), ("get_call", ctypes.c_void_p)]
    )


@cache
def _vfs() -> Any:
    """SQLite's layer over the system, or None where Python's SQLite does not show its functions."""
    import _sqlite3

    try:
        find = ctypes.CDLL(_sqlite3.__file__).sqlite3_vfs_find
    except (AttributeError, OSError):
        return None
    find.restype = ctypes.POINTER(_Vfs)
    return find(None)


def sqlite_is_reached() -> bool:
    """Whether SQLite's own calls can fail."""
    return _vfs() is not None


@contextmanager
def _within_sqlite(made: Faults) -> Iterator[None]:
    vfs = _vfs()
    if vfs is None:
        yield
        return
    setting = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(vfs.contents.set_call)
    getting = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(vfs.contents.get_call)
    found = {name: getting(vfs, name.encode()) for name in IN_SQLITE}
    replaced = {name: made.in_sqlite(name, Call(address)) for name, address in found.items() if address}
    try:
        for name, call in replaced.items():
            setting(vfs, name.encode(), ctypes.cast(call, ctypes.c_void_p))
        yield
    finally:
        for name in replaced:
            setting(vfs, name.encode(), None)


@contextmanager
def faults(at: int, number: int) -> Iterator[Faults]:
    """The call of this number fails; 0: none does."""
    made = Faults(at, number)
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        opened, connected = made.opened(io.open), made.connected(sqlite3.connect)
        for module, names in CALLS.items():
            for name in names:
                patch.setattr(module, name, made.of_python(name, getattr(module, name)))
        for module in (io, builtins):
            patch.setattr(module, "open", opened)
        patch.setattr(sqlite3, "connect", connected)
        # A lock that could not be let go is waited for.
        patch.setattr("models_integration.archive.sealed_database.WAIT_SECONDS", 0.05)
        stack.enter_context(_within_sqlite(made))
        try:
            yield made
        finally:
            made.at = 0  # a connection that was made inside lives on, and counts its statements
