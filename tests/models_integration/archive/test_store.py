"""The archive: `get` returns the stored chunk only to its tenant and for its model. Other requests miss or raise."""

import errno
import fcntl
import json
import os
import stat
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from models_integration.archive.errors import (
    ArchiveFull,
    ArchiveReadOnly,
    ForeignVersion,
)
from models_integration.archive.manifest import Manifest, meaning
from models_integration.archive.store import Archive
from spec import SPEC_VERSION
from spec.errors import SpecError
from tests.models_integration.archive.fault_cases import MODEL, chunk, damage, failing, path_of
from tests.models_integration.archive.test_attacks import read_where_nothing_can_be_written
from tests.processes import started

pytestmark = pytest.mark.law("promised-is-there-forgotten-is-not")


def same(actual: dict[str, Tensor], given: dict[str, Tensor]) -> bool:
    return actual.keys() == given.keys() and all(
        actual[name].dtype == given[name].dtype and torch.equal(actual[name], given[name]) for name in given
    )


def objects(folder: Path) -> list[Path]:
    return sorted((folder / "objects").glob("*/*"))


@pytest.mark.law("saved-is-what-was")
def test_what_is_put_is_got(tmp_path: Path) -> None:
    """Check bits and dtypes in a second instance and with any safetensors reader.

    Putting a chunk again changes nothing. No two reads share tensors.
    """
    manifest, tensors = chunk(1)
    with Archive(tmp_path) as archive:
        key = archive.put(manifest, tensors)
        (path,) = objects(tmp_path)
        before = path.read_bytes()
        assert archive.put(replace(manifest, created=99.0), tensors) == key
    with Archive(tmp_path) as archive:
        for _ in range(2):
            actual = archive.get(key, "alice", MODEL)
            assert actual is not None
            assert actual.manifest == manifest
            assert same(actual.tensors, tensors)
            actual.tensors["0.k"].zero_()
        assert [entry.key for entry in archive.entries()] == [key]
        assert archive.verify().clean
    assert path.read_bytes() == before
    with safe_open(path, framework="pt") as file:
        assert set(file.keys()) == set(tensors)
        assert torch.equal(file.get_tensor("1.v"), tensors["1.v"])
        assert json.loads(file.metadata()["manifest"])["ids"] == manifest.ids


@pytest.mark.law("an-identity-tells-apart")
@pytest.mark.parametrize("change", [
    {"ids": "0" * 64}, {"form": "markers"}, {"hidden": 1}, {"codec": "kivi"}, {"tenant": "bob"}, {"layers": (1,)},
    {"kept": "0" * 64},
    {"model": replace(MODEL, weights="w")}, {"model": replace(MODEL, rotation="r")},
    {"model": replace(MODEL, rotation_dtype="bfloat16")}, {"model": replace(MODEL, dtype="float32")},
    {"model": replace(MODEL, config="c")},
])
def test_each_part_of_the_identity_makes_another_key(change: dict[str, Any]) -> None:
    manifest, _ = chunk(1)
    assert replace(manifest, **change).key != manifest.key == replace(manifest, created=5.0).key
    assert Manifest.from_json(replace(manifest, **change).to_json()) == replace(manifest, **change)


@pytest.mark.law("refused-before-anything-changes")
def test_a_foreign_version_is_refused_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a different format, and a different meaning of the specification.

    If a version changes the meaning of the specification, the key of a chunk changes, and `put` stores the chunk again.
    A clarification does not change the meaning.
    """
    keys, names = [], ("manifest.SPEC_VERSION", "objects.SPEC_VERSION")
    for version, own, seed in (
        ("kvarc/2", ("objects.FORMAT",), 2), ("0.99.0", names, 1), (f"{meaning(SPEC_VERSION)}.77", names, 1),
    ):
        with monkeypatch.context() as patch, Archive(tmp_path) as archive:
            for name in own:
                patch.setattr(f"models_integration.archive.{name}", version)
            keys.append(archive.put(*chunk(seed)))
    with Archive(tmp_path) as archive:
        for key, words in zip(keys[:2], ("kvarc/2", r"specification 0\.99\.0"), strict=True):
            with pytest.raises(ForeignVersion, match=words):
                archive.get(key, "alice")
        assert archive.get(keys[2], "alice", MODEL) is not None
        assert archive.put(*chunk(1)) == keys[2] != keys[1]
        assert archive.verify().foreign == sorted(keys[:2])
    assert len(objects(tmp_path)) == 3


@pytest.mark.parametrize(("number", "error", "call"), [
    (errno.ENOSPC, ArchiveFull, "writev"), (errno.EDQUOT, ArchiveFull, "fsync"),
    (errno.EROFS, ArchiveReadOnly, "replace"),
])
def test_a_failing_disk_is_named_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, error: type[Exception], call: str,
) -> None:
    with Archive(tmp_path) as archive:
        key = archive.put(*chunk(1))
        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing(number))
            with pytest.raises(error):
                archive.put(*chunk(2))
        assert [path.name for path in (tmp_path / "objects").glob("*/*")] == [f"{key}.safetensors"]
        assert archive.verify().clean
        archive.put(*chunk(2))
        assert len(archive.entries()) == 2


def test_a_medium_that_cannot_be_written_is_opened_and_read(quick_path: Path) -> None:
    """Check a user who may not write. Damage is a miss for this user too."""
    child = started(read_where_nothing_can_be_written, quick_path)
    child.join()
    assert child.exitcode == 0


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    """Check the order by the times of the files. Reading and putting again count as uses.

    A chunk that was just put is kept.
    """
    with Archive(tmp_path) as archive:
        keys = [archive.put(*chunk(seed)) for seed in range(4)]
        size = archive.entries()[0].bytes
        for at, key in enumerate(keys):
            os.utime(path_of(tmp_path, key), (1000 + at, 1000 + at))
        assert archive.get(keys[0], "alice") is not None
        assert archive.put(*chunk(1)) == keys[1]
    with Archive(tmp_path, limit=3 * size + size // 2) as archive:
        os.utime(path_of(tmp_path, keys[0]), (3e9, 3e9))
        newest = archive.put(*chunk(4))
        assert {entry.key for entry in archive.entries()} == {keys[0], keys[1], newest}
        assert archive.get(keys[2], "alice") is None
    with Archive(tmp_path, limit=size + size // 2) as archive:
        for key in (keys[0], keys[1], newest):
            os.utime(path_of(tmp_path, key), (4e9, 4e9))
        assert {entry.key for entry in archive.entries()} - {archive.put(*chunk(5))} != set()
        assert [entry.key for entry in archive.entries()] == [chunk(5)[0].key]


def test_the_limit_counts_the_quarantine_which_goes_first(tmp_path: Path) -> None:
    with Archive(tmp_path) as archive:
        keys = [archive.put(*chunk(seed)) for seed in range(3)]
        size = archive.entries()[0].bytes
        damage(path_of(tmp_path, keys[2]))
        assert archive.get(keys[2], "alice") is None
    with Archive(tmp_path, limit=2 * size) as archive:
        assert archive.gc() == [f"quarantine/damaged-{keys[2]}.safetensors"]
        assert {entry.key for entry in archive.entries()} == set(keys[:2])
        assert archive.gc() == []
        assert archive.verify().clean


@pytest.mark.law("refused-before-anything-changes")
def test_a_chunk_above_the_limit_is_refused(tmp_path: Path) -> None:
    with Archive(tmp_path, limit=4000) as archive:
        key = archive.put(*chunk(0))
        with pytest.raises(SpecError, match="limit of 4000 bytes"):
            archive.put(*chunk(1, tokens=100))
        assert archive.get(key, "alice") is not None
    with pytest.raises(SpecError, match="at least 1 byte"):
        Archive(tmp_path, limit=0)


def test_files_of_killed_writers_are_removed_when_they_are_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check every folder. Temporary files are removed after one hour of the disk's clock.

    A file that is being written is kept, whatever its age.
    """
    with Archive(tmp_path) as archive:
        archive.put(*chunk(0))
        (tmp_path / "keys").mkdir()
        places = (objects(tmp_path)[0].parent, tmp_path / "keys", tmp_path / "quarantine", tmp_path)
        old, new, held = ([place / f".tmp-{name}" for place in places] for name in ("old", "new", "held"))
        for path in (*old, *new, *held):
            path.write_bytes(b"half")
        for path in (*old, *held):
            os.utime(path, (1, 1))
        with ExitStack() as open_files, monkeypatch.context() as patch:
            for path in held:
                fcntl.flock(open_files.enter_context(path.open("rb")), fcntl.LOCK_EX)
            patch.setattr(time, "time", lambda: 4e9)
            archive.gc()
            assert [path for path in (*old, *new, *held) if path.exists()] == [*new, *held]
        archive.gc()
        assert [path for path in (*old, *new, *held) if path.exists()] == new


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EIO])
def test_nothing_needs_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Check a file system without locks: all operations work, and old files are removed by their age alone."""
    for name in ("flock", "fcntl", "lockf"):
        monkeypatch.setattr(fcntl, name, failing(number))
    with Archive(tmp_path, limit=1 << 20) as archive:
        keys = [archive.put(*chunk(seed, tenant=tenant)) for seed, tenant in enumerate(("alice", "bob"))]
        old = tmp_path / "objects" / "00" / ".tmp-old"
        old.write_bytes(b"half")
        os.utime(old, (1, 1))
        archive.gc()
        assert not old.exists()
        assert archive.forget("alice") == 1
        assert [entry.key for entry in archive.entries()] == keys[1:]


@pytest.mark.law("nothing-readable-without-the-key")
@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_folders_and_files_are_the_owners_alone(tmp_path: Path, umask: int) -> None:
    """Check all umasks. A folder that existed before keeps its rights."""
    (tmp_path / "there").mkdir(mode=0o750)
    before = os.umask(umask)
    try:
        for name in ("new", "there"):
            with Archive(tmp_path / name) as archive:
                archive.put(*chunk(0))
    finally:
        os.umask(before)
    paths = [path for name in ("new", "there") for path in (tmp_path / name).rglob("*")]
    assert {oct(path.stat().st_mode & 0o777) for path in paths} == {"0o600", "0o700"}
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "there").stat().st_mode) == 0o750
