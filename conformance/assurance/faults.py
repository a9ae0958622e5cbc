"""Calls to the system that fail, one at a time; and what a disk does during one operation."""

import errno
import fcntl
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
"""In the place of an error: only half of what was asked for is read or written; this call and all later ones do
nothing, as if the process were killed, and raise `Killed`."""


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
    """Instead of a kill, for which a test would need a process of its own: no `except Exception` sees it."""


class Faults:
    """Counts calls to the system, and lets the one of number `at` fail with an error; of SHORT, those that can be."""

    def __init__(self, at: int, number: int) -> None:
        self.at, self.number = at, number
        self.calls: list[str] = []

    def fails(self, name: str, can_be_short: bool) -> bool:
        """Count a call: whether it fails."""
        if self.number == SHORT and not can_be_short:
            return False
        self.calls.append(name)
        return len(self.calls) == self.at or (self.number == LAST and len(self.calls) > self.at)

    def wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """The call, which is counted."""

        def failing(*arguments: Any, **options: Any) -> Any:
            if not self.fails(name, name in HALVED):
                return real(*arguments, **options)
            if self.number == SHORT:
                return real(*HALVED[name](*arguments))
            if name == "close":  # the descriptor is gone all the same
                real(*arguments)
            if self.number == LAST:
                raise Killed
            raise OSError(self.number, os.strerror(self.number))

        return failing


@contextmanager
def faults(at: int, number: int) -> Iterator[Faults]:
    """The call of this number fails; 0: none does."""
    made = Faults(at, number)
    with pytest.MonkeyPatch.context() as patch:
        for module, names in CALLS.items():
            for name in names:
                patch.setattr(module, name, made.wrap(name, getattr(module, name)))
        yield made


class Fault(NamedTuple):
    """What the disk does during one operation.

    Attributes:
        kind: "well"; "full", with `at` bytes for a file; "error" of this number at call `at`; "short": call `at` reads
            or writes half; "killed": nothing happens from call `at` on.
    """

    kind: str = "well"
    at: int = 0
    number: int = errno.EIO

    @contextmanager
    def happening(self) -> Iterator[None]:
        """Inside, the disk does so."""
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
"""More often well than anything else."""
