"""A fault at every call to the system that the archive makes, one at a time.

Afterwards the archive opens, what was promised is there, what was forgotten is not, and nothing else has changed. Under
`--kvspec-profile nightly` every call fails once with each error; otherwise a sample of them does.
"""

import builtins
import errno
import fcntl
import io
import os
import random
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from conformance.own.models_integration.archive.chunks import chunk
from conformance.own.processes import started
from conformance.plugin import profile_of
from models_integration.archive.errors import ArchiveError
from models_integration.archive.store import Archive

CALLS = {
    os: (
        "open", "writev", "pwrite", "pread", "fsync", "replace", "link", "unlink", "mkdir", "utime", "stat", "lstat",
        "fstat", "scandir", "posix_fallocate", "lseek",
    ),
    fcntl: ("flock",), io: ("open",),
}
ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS)
KILL = 0
"""In the place of an error: the process is killed."""
SAMPLE = 12
"""Of each operation and error, where the profile is not nightly."""
OF_SQLITE = {
    errno.ENOSPC: sqlite3.SQLITE_FULL, errno.EIO: sqlite3.SQLITE_IOERR_FSYNC, errno.EROFS: sqlite3.SQLITE_READONLY,
}
ALICE, BOB = "alice-the-tenant", "bob-the-tenant"
MADE = {name: chunk(seed, tenant=tenant, tokens=8) for seed, (name, tenant) in enumerate(
    [("hers", ALICE), ("hers, damaged", ALICE), ("his", BOB), ("new", BOB)]
)}


def blobs(folder: Path) -> list[bytes]:
    """Names and bytes of all files."""
    return [path.name.encode() + path.read_bytes() for path in folder.rglob("*") if path.is_file()]


def path_of(folder: Path, key: str) -> Path:
    return folder / "objects" / key[:2] / f"{key}.safetensors"


class Faults:
    """Counts calls to the system, and lets one of them fail."""

    def __init__(self, at: int, number: int) -> None:
        self.calls, self.at, self.number = 0, at, number

    def count(self) -> bool:
        """Whether this call fails."""
        self.calls += 1
        if self.calls == self.at and self.number == KILL:
            os.kill(os.getpid(), 9)
        return self.calls == self.at

    def call(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def failing(*arguments: Any, **options: Any) -> Any:
            if self.count():
                raise OSError(self.number, os.strerror(self.number))
            return real(*arguments, **options)

        return failing

    def connection(self) -> type[sqlite3.Connection]:
        faults = self

        class Failing(sqlite3.Connection):
            def execute(self, *arguments: Any) -> sqlite3.Cursor:
                faults.statement()
                return super().execute(*arguments)

            def executemany(self, *arguments: Any) -> sqlite3.Cursor:
                faults.statement()
                return super().executemany(*arguments)

        return Failing

    def statement(self) -> None:
        if self.count():
            error = sqlite3.OperationalError(os.strerror(self.number))
            error.sqlite_errorcode = OF_SQLITE[self.number]
            raise error


@contextmanager
def faults(at: int, number: int) -> Iterator[Faults]:
    """The n-th of all calls fails; 0: none does."""
    made, connect = Faults(at, number), sqlite3.connect
    with pytest.MonkeyPatch.context() as patch:
        for module, names in CALLS.items():
            for name in names:
                patch.setattr(module, name, made.call(getattr(module, name)))
        patch.setattr(builtins, "open", io.open)
        patch.setattr(
            sqlite3, "connect", lambda *given, **options: connect(*given, factory=made.connection(), **options),
        )
        yield made


def put(archive: Archive) -> None:
    archive.put(*MADE["new"])


def get(archive: Archive) -> None:
    """Of a whole and of a damaged one."""
    assert archive.get(MADE["his"][0].key, BOB) is not None
    assert archive.get(MADE["hers, damaged"][0].key, ALICE) is None


def forget(archive: Archive) -> None:
    archive.forget(ALICE)


def gc(archive: Archive) -> None:
    """To the size of one object: his is the latest used."""
    archive._limit = max(entry.bytes for entry in archive.entries()) * 3 // 2
    archive.gc()


def nothing(archive: Archive) -> None:
    """Opening alone."""


OPERATIONS = {"put": put, "get": get, "forget": forget, "gc": gc, "open": nothing, "rebuild": nothing}


def prepared(folder: Path, operation: str) -> None:
    with Archive(folder) as archive:
        for name in ("hers", "hers, damaged", "his"):
            archive.put(*MADE[name])
        assert archive.get(MADE["his"][0].key, BOB) is not None
    path = path_of(folder, MADE["hers, damaged"][0].key)
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    orphan = path.parent / ".tmp-old"
    orphan.write_bytes(b"half of a chunk")
    os.utime(orphan, (1, 1))
    if operation == "rebuild":
        (folder / "catalogue.seal").unlink()


def attempt(folder: Path, operation: str, at: int, number: int) -> tuple[bool, int]:
    """Whether the operation gave its promise, and how many calls it made."""
    done = False
    with faults(at, number) as made:
        try:
            with Archive(folder) as archive:
                OPERATIONS[operation](archive)
                done = True
        except (ArchiveError, OSError):
            assert made.calls >= at > 0
    return done, made.calls


def check(folder: Path, operation: str, done: bool) -> None:
    """What must hold once the disk is well again; then the operation is done again."""
    with Archive(folder) as archive:
        assert archive.get(MADE["his"][0].key, BOB) is not None
        listed = {entry.key for entry in archive.entries()}
        assert MADE["his"][0].key in listed
        new, hers = MADE["new"][0].key, MADE["hers"][0].key
        assert (archive.get(new, BOB) is not None) == (new in listed)
        assert (archive.get(hers, ALICE) is not None) == (hers in listed)
        if operation == "put" and done:
            assert new in listed
        if operation in ("put", "get", "open", "rebuild"):
            assert hers in listed
        if operation == "forget" and done:
            assert_gone(folder)
        if operation == "gc" and done:
            assert hers not in listed
        OPERATIONS[operation](archive)
        if operation == "forget":
            assert_gone(folder)
        report = archive.verify()
        assert (report.unlisted, report.lost, report.foreign) == ([], [], [])
    if operation == "forget":
        assert_gone(folder)


def assert_gone(folder: Path) -> None:
    """Neither tokens, nor tenant, nor key of hers."""
    found = blobs(folder)
    for name in ("hers", "hers, damaged"):
        manifest, tensors = MADE[name]
        for needle in (ALICE.encode(), manifest.key.encode(), tensors["token_ids"].numpy().tobytes()):
            assert not any(needle in blob for blob in found)


@pytest.mark.parametrize("number", ERRORS, ids=[errno.errorcode[number] for number in ERRORS])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_failing_call_makes_the_archive_unusable(
    quick_path: Path, pytestconfig: pytest.Config, operation: str, number: int,
) -> None:
    template = quick_path / "template"
    prepared(template, operation)
    calls = attempt(shutil.copytree(template, quick_path / "counted"), operation, 0, number)[1]
    every = range(1, calls + 1)
    chosen = every if profile_of(pytestconfig) == "nightly" else random.Random(operation).sample(every, SAMPLE)
    for at in chosen:
        folder = shutil.copytree(template, quick_path / str(at))
        done, _ = attempt(folder, operation, at, number)
        check(folder, operation, done)
        shutil.rmtree(folder)


def killed(folder: Path, operation: str, at: int) -> None:
    """Be killed at the n-th call."""
    attempt(folder, operation, at, KILL)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_kill_makes_the_archive_unusable(quick_path: Path, pytestconfig: pytest.Config, operation: str) -> None:
    template = quick_path / "template"
    prepared(template, operation)
    calls = attempt(shutil.copytree(template, quick_path / "counted"), operation, 0, errno.EIO)[1]
    every = range(1, calls + 1)
    chosen = every if profile_of(pytestconfig) == "nightly" else random.Random(operation).sample(every, SAMPLE // 4)
    for at in chosen:
        folder = shutil.copytree(template, quick_path / str(at))
        child = started(killed, folder, operation, at)
        child.join()
        check(folder, operation, child.exitcode == 0)
        shutil.rmtree(folder)


@pytest.mark.parametrize("operation", ["put", "get", "forget", "gc", "open"])
def test_a_list_that_cannot_grow_stops_neither_erasing_nor_opening(
    quick_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str,
) -> None:
    """The disk is full under SQLite itself: no page can be added to the list."""
    prepared(quick_path, operation)
    pragmas = ("journal_mode = WAL", "max_page_count = 1")
    monkeypatch.setattr("models_integration.archive.sealed_database.PRAGMAS", pragmas)
    done = True
    try:
        with Archive(quick_path) as archive:
            OPERATIONS[operation](archive)
    except ArchiveError:
        done = False
    assert done or operation == "put"
    monkeypatch.undo()
    check(quick_path, operation, done)
