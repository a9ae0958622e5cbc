"""Faults of system calls, one at a time, and faults of a disk during one operation.

The second part is a model of a power loss: each change that was not synced may or may not be on the disk. Names and
pages are lost separately.
"""

import copy
import errno
import fcntl
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
from hypothesis import strategies as st

CALLS = {
    os: (
        "open", "close", "read", "readv", "write", "writev", "pread", "pwrite", "fsync", "fdatasync", "sync", "replace",
        "rename", "link", "symlink", "unlink", "remove", "mkdir", "rmdir", "utime", "chmod", "stat", "lstat", "fstat",
        "access", "scandir", "listdir", "truncate", "ftruncate", "posix_fallocate", "posix_fadvise", "lseek", "urandom",
    ),
    fcntl: ("flock", "lockf", "fcntl"),
}
SHORT, LAST = -1, -2
"""Special error numbers. SHORT: the call reads or writes only half of the bytes. LAST: this call and all later calls
do nothing, as if the process were killed, and raise `Killed`."""


def half(size: int) -> int:
    return max(1, size // 2)


HALVED: dict[str, Callable[..., tuple[Any, ...]]] = {
    "readv": lambda file, buffers: (file, [buffers[0][: half(len(buffers[0]))]]),
    "writev": lambda file, parts: (file, [parts[0][: half(len(parts[0]))]]),
    "write": lambda file, data: (file, data[: half(len(data))]),
    "pwrite": lambda file, data, at: (file, data[: half(len(data))], at),
    "pread": lambda file, size, at: (file, half(size), at),
    "read": lambda file, size: (file, half(size)),
}


class Killed(BaseException):
    """Simulation of a kill, without a separate process. `except Exception` does not catch it."""


class Faults:
    """Counter of system calls that lets call number `at` fail with an error. SHORT counts only reads and writes."""

    def __init__(self, at: int, number: int) -> None:
        self.at, self.number = at, number
        self.calls: list[str] = []

    def fails(self, name: str, can_be_short: bool) -> bool:
        """Count a call, and return True if it must fail."""
        if self.number == SHORT and not can_be_short:
            return False
        self.calls.append(name)
        return len(self.calls) == self.at or (self.number == LAST and len(self.calls) > self.at)

    def wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that counts the call and then calls `real`, or fails."""

        def failing(*arguments: Any, **options: Any) -> Any:
            if not self.fails(name, name in HALVED):
                return real(*arguments, **options)
            if self.number == SHORT:
                return real(*HALVED[name](*arguments))
            if name == "close":  # a failed close releases the descriptor too
                real(*arguments)
            if self.number == LAST:
                raise Killed
            raise OSError(self.number, os.strerror(self.number))

        return failing


@contextmanager
def faults(at: int, number: int) -> Iterator[Faults]:
    """Context manager in which the system call number `at` fails. With 0 no call fails."""
    created = Faults(at, number)
    with pytest.MonkeyPatch.context() as patch:
        for module, names in CALLS.items():
            for name in names:
                patch.setattr(module, name, created.wrap(name, getattr(module, name)))
        yield created


class Fault(NamedTuple):
    """Fault of the disk during one operation.

    Attributes:
        kind: "well" for no fault. With "full", a file can have at most `at` bytes. With "error", call `at` fails with
            this number. With "short", this call reads or writes only half of the bytes. With "killed", no call has an
            effect from call `at` on.
    """

    kind: str = "well"
    at: int = 0
    number: int = errno.EIO

    @contextmanager
    def happening(self) -> Iterator[None]:
        """Context manager in which the disk has the fault."""
        if self.kind == "well":
            yield
        elif self.kind == "full":
            before = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.at, before[1]))
            try:
                yield
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)
        else:
            with faults(self.at, {"short": SHORT, "killed": LAST}.get(self.kind, self.number)):
                yield


WELL = Fault()
_CALLS = st.integers(1, 50)
FAULTS = st.one_of(
    st.just(WELL), st.just(WELL), st.just(WELL),
    st.builds(Fault, st.just("full"), st.sampled_from([0, 512, 2048, 4096])),
    st.builds(Fault, st.just("error"), _CALLS, st.sampled_from([errno.EIO, errno.ENOSPC, errno.EROFS])),
    st.builds(Fault, st.just("short"), st.integers(1, 12)), st.builds(Fault, st.just("killed"), _CALLS),
)
"""Strategy of faults, in which WELL is the most frequent."""

PAGE = 4096


@dataclass
class _File:
    """Bytes that are on the disk, and writes that may or may not be there after a power loss."""

    durable: bytes = b""
    pending: list[tuple[int, bytes]] = field(default_factory=list)

    def write(self, data: bytes, at: int) -> None:
        for start in range(0, len(data), PAGE):
            self.pending.append((at + start, data[start : start + PAGE]))

    def sync(self) -> None:
        self.durable, self.pending = self.survive(lambda: True), []

    def survive(self, chance: Callable[[], bool]) -> bytes:
        """Return the bytes with a random part of the pending writes."""
        result = bytearray(self.durable)
        for at, data in self.pending:
            if chance():
                result.extend(bytes(max(0, at - len(result))))
                result[at : at + len(data)] = data
        return bytes(result)


@dataclass
class _Folder:
    """State of the disk: durable names, and changes that a power loss may undo.

    A name belongs to a file or, by its path, to a folder.
    """

    durable: dict[str, "_File | Path"] = field(default_factory=dict)
    pending: list[dict[str, "_File | Path | None"]] = field(default_factory=list)

    def sync(self) -> None:
        self.durable, self.pending = self.survive(lambda: True), []

    def survive(self, chance: Callable[[], bool]) -> dict[str, "_File | Path"]:
        """Return the names with a random part of the pending changes. A rename is one change."""
        result: dict[str, _File | Path | None] = dict(self.durable)
        for change in self.pending:
            if chance():
                result |= change
        return {name: thing for name, thing in result.items() if thing is not None}


class Disk:
    """Files below a folder. `files` also contains files without a name, as a scan of the raw disk would find them."""

    def __init__(self, root: Path) -> None:
        self.files: list[_File] = []
        self._root = root
        self._folders = {root: _Folder()}
        self._now: dict[Path, _File] = {}
        for path in sorted(root.rglob("*")):
            if path.is_dir():
                self._folders[path] = _Folder()
                thing: _File | Path = path
            else:
                thing = self._now[path] = _File(path.read_bytes())
                self.files.append(thing)
            self._folders[path.parent].durable[path.name] = thing

    def crash(self, into: Path, rng: Random, share: float) -> None:
        """Write a possible state after a power loss into a new folder.

        Each change that was not synced survives with the probability `share`.
        """
        def chance() -> bool:
            return rng.random() < share

        def write(folder: Path, to: Path) -> None:
            to.mkdir()
            for name, thing in self._folders[folder].survive(chance).items():
                if isinstance(thing, Path):
                    write(thing, to / name)
                else:
                    (to / name).write_bytes(thing.survive(chance))

        write(self._root, into)

    def raw(self) -> list[bytes]:
        """Return the synced bytes of all files that ever existed, including deleted files."""
        return [file.durable for file in self.files]

    def open(self, path: Path, creates: bool) -> "_File | _Folder | None":
        """Return the file or folder of a new descriptor, or None for a file outside the folder."""
        if path in self._folders:
            return self._folders[path]
        if path not in self._now and creates and path.parent in self._folders:
            self._now[path] = _File()
            self.files.append(self._now[path])
            self._change(path, self._now[path])
        return self._now.get(path)

    def mkdir(self, path: Path) -> None:
        """Record a new folder."""
        if path.parent in self._folders:
            self._folders[path] = _Folder()
            self._change(path, path)

    def link(self, path: Path, new: Path) -> None:
        """Record a second name of a file."""
        self._now[new] = self._now[path]
        self._change(new, self._now[path])

    def rename(self, path: Path, new: Path) -> None:
        """Record a rename: one change inside a folder, two changes between folders."""
        file = self._now[new] = self._now.pop(path)
        if path.parent == new.parent:
            self._folders[path.parent].pending.append({path.name: None, new.name: file})
        else:
            self._change(path, None)
            self._change(new, file)

    def unlink(self, path: Path) -> None:
        """Record that a name is removed."""
        if self._now.pop(path, None) is not None:
            self._change(path, None)

    def _change(self, path: Path, thing: "_File | Path | None") -> None:
        self._folders[path.parent].pending.append({path.name: thing})


class _Recorder:
    """Recorder of system calls that were executed."""

    def __init__(self, disk: Disk, dropped: int) -> None:
        self.disk, self.dropped, self.syncs = disk, dropped, 0
        self._open: dict[int, _File | _Folder | None] = {}
        self._at: dict[int, int] = {}

    def open(self, result: int, path: Any, flags: int, *mode: Any) -> None:
        self._open[result] = self.disk.open(Path(path), bool(flags & os.O_CREAT))
        self._at[result] = 0

    def writev(self, result: int, descriptor: int, parts: Any) -> None:
        self.pwrite(result, descriptor, b"".join(parts), self._at[descriptor])
        self._at[descriptor] += result

    def pwrite(self, result: int, descriptor: int, data: Any, at: int) -> None:
        if isinstance(file := self._open.get(descriptor), _File):
            file.write(bytes(data[:result]), at)

    def fsync(self, result: None, descriptor: int) -> None:
        if (opened := self._open.get(descriptor)) is not None:
            self.syncs += 1
            if self.syncs != self.dropped:
                opened.sync()

    def mkdir(self, result: None, path: Any, mode: int = 0) -> None:
        self.disk.mkdir(Path(path))

    def rename(self, result: None, path: Any, new: Any) -> None:
        self.disk.rename(Path(path), Path(new))

    replace = rename

    def link(self, result: None, path: Any, new: Any) -> None:
        self.disk.link(Path(path), Path(new))

    def unlink(self, result: None, path: Any) -> None:
        self.disk.unlink(Path(path))


@contextmanager
def recording(root: Path, dropped: int = 0, each: bool = True) -> Iterator[tuple[_Recorder, list[Disk]]]:
    """Context manager that yields the recorder and the states of the disk.

    Args:
        dropped: number of the sync that has no effect. 0: all syncs work. The recorder counts the syncs below `root`.
        each: True for a state after each call that changes the disk, False for only the last state.
    """
    recorder, states = _Recorder(Disk(root), dropped), []

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            result = real(*arguments, **options)
            getattr(recorder, name)(result, *arguments)
            if each:
                states.append(copy.deepcopy(recorder.disk))
            return result

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("open", "writev", "pwrite", "fsync", "mkdir", "rename", "replace", "link", "unlink"):
            patch.setattr(os, name, wrap(name, getattr(os, name)))
        yield recorder, states
    states.append(recorder.disk)
