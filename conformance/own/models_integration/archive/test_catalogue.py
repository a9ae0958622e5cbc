"""The list: made again from what is there, by order instead of clocks, and on media that cannot be written."""

import errno
import fcntl
import hashlib
import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from conformance.own.models_integration.archive.attackers import read_where_nothing_can_be_written
from conformance.own.models_integration.archive.chunks import chunk
from conformance.own.models_integration.archive.fault_cases import path_of
from conformance.own.processes import started
from models_integration.archive.catalogue import Catalogue, Entry
from models_integration.archive.errors import ArchiveFull
from models_integration.archive.store import Archive

pytestmark = pytest.mark.law("promised-is-there-forgotten-is-not")


def test_closing_twice_is_fine(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    archive.close()
    archive.close()


def sealed(folder: Path, write: Callable[[Path], object]) -> None:
    """Another list, with the seal of its bytes."""
    path = folder / "catalogue.sqlite"
    path.unlink()
    write(path)
    (folder / "catalogue.seal").write_text(hashlib.sha256(path.read_bytes()).hexdigest())


def database(*statements: str) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        rows = sqlite3.connect(path)
        for statement in statements:
            rows.execute(statement)
        rows.commit()
        rows.close()

    return write


TABLE = "CREATE TABLE objects (key TEXT, tenant TEXT, tokens INTEGER, bytes, created, used INTEGER)"


@pytest.mark.law("an-object-proves-itself")
@pytest.mark.parametrize(
    "write",
    [
        lambda path: path.write_bytes(b"no database"), lambda path: path.write_bytes(b""), database(),
        database("CREATE TABLE objects (key TEXT)"), database("CREATE TABLE other (key TEXT)"),
        database(TABLE, "INSERT INTO objects VALUES ('k', 't', 1, 'x', 'y', 1)"),
        database(TABLE, "INSERT INTO objects VALUES (NULL, 't', 1, 1, 1.0, 1)"),
    ],
)
def test_a_right_seal_over_another_list_makes_it_again(tmp_path: Path, write: Callable[[Path], object]) -> None:
    with Archive(tmp_path) as archive:
        key = archive.put(*chunk(1))
    sealed(tmp_path, write)
    with Archive(tmp_path) as archive:
        assert [entry.key for entry in archive.entries()] == [key]
        assert not archive.repaired.catalogue_intact
    with Archive(tmp_path) as archive:
        assert archive.repaired.clean


def test_a_clock_set_back_does_not_evict_what_was_just_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Archive(tmp_path) as archive:
        keys = [archive.put(*chunk(seed)) for seed in range(3)]
        size = archive.entries()[0].bytes
        for key in keys[1:]:
            os.utime(path_of(tmp_path, key), (4e9, 4e9))
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda: 1.0)
            assert archive.get(keys[0], "alice") is not None
            os.utime(path_of(tmp_path, keys[0]), (1, 1))
    with Archive(tmp_path, limit=size + size // 2) as archive:
        assert archive.gc() == keys[1:]
        assert archive.get(keys[0], "alice") is not None


def test_another_clock_breaks_no_running_put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is being written stays, however old it seems; a new one stays for an hour of the disk's clock."""
    with Archive(tmp_path) as archive:
        archive.put(*chunk(1))
        held, new = (tmp_path / "objects" / "00" / f".tmp-{name}" for name in ("held", "new"))
        for path in (held, new):
            path.write_bytes(b"half")
        os.utime(held, (1, 1))
        with held.open("rb") as file, monkeypatch.context() as patch:
            fcntl.flock(file, fcntl.LOCK_EX)
            patch.setattr(time, "time", lambda: 4e9)
            archive.gc()
            assert (held.exists(), new.exists()) == (True, True)
        archive.gc()
        assert (held.exists(), new.exists()) == (False, True)


def test_a_medium_that_cannot_be_written_is_opened_and_read(quick_path: Path) -> None:
    """By a user who may not write, with a list and without one; damage is a miss there, too."""
    child = started(read_where_nothing_can_be_written, quick_path)
    child.join()
    assert child.exitcode == 0


def test_put_that_cannot_be_listed_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Catalogue, entries: list[Entry]) -> None:
        raise ArchiveFull("no room")

    with Archive(tmp_path) as archive:
        key = archive.put(*chunk(1))
        with monkeypatch.context() as patch:
            patch.setattr(Catalogue, "add", full)
            with pytest.raises(ArchiveFull):
                archive.put(*chunk(2))
        assert archive.verify().clean
        assert [path.stem for path in (tmp_path / "objects").glob("*/*")] == [key]


def test_forget_and_gc_need_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one byte can be added to any file, but what is reserved."""
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Archive(tmp_path) as archive:
        for seed in range(6):
            archive.put(*chunk(seed, tenant="ab"[seed % 2]))
        assert (tmp_path / "catalogue.reserve").stat().st_size >= 2 * (tmp_path / "catalogue.sqlite").stat().st_size
        for call in ("writev", "posix_fallocate", "replace"):
            monkeypatch.setattr(os, call, full)
        assert archive.forget("a") == 3
        assert [entry.tenant for entry in archive.entries()] == ["b"] * 3
        archive._limit = 1
        assert len(archive.gc()) == 3
        assert archive.entries() == []
    with Archive(tmp_path) as archive:
        assert archive.entries() == []


@pytest.mark.law("freed-memory")
def test_many_uses_leave_a_short_log(tmp_path: Path) -> None:
    with Archive(tmp_path) as archive:
        keys = [archive.put(*chunk(seed)) for seed in range(40)]
        for _ in range(30):
            for key in keys:
                archive._catalogue.note_use(key)
        assert (tmp_path / "catalogue.sqlite-wal").stat().st_size < 6 << 20
        assert [entry.key for entry in archive._catalogue.by_use()] == keys
