"""The archive returns a chunk only to its tenant and model. Damage is quarantined, and forgotten data is gone."""

import errno
import fcntl
import json
import os
import stat
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from typer.testing import CliRunner

from kvspec.cli.app import app
from lab.faults import Killed
from models_integration.archive.errors import ArchiveError, ArchiveFull, ArchiveReadOnly, ForeignVersion
from models_integration.archive.manifest import Manifest, meaning
from models_integration.archive.store import Archive
from models_integration.cache import tensor_file
from models_integration.cache.atomic_file import TEMPORARY, erase
from models_integration.cache.tensor_file import Damaged
from spec import SPEC_VERSION
from spec.errors import SpecError
from tests.models_integration.archive.fault_cases import ALICE, MODEL, blobs, chunk, damage, failing, opened, path_of
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
    """Check bits and dtypes in a second instance and with any safetensors reader. No two reads share tensors."""
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
    """Check a different format, and a different meaning of the specification, which changes the key."""
    keys, names = [], ("manifest.SPEC_VERSION", "objects.SPEC_VERSION")
    for version, attributes, seed in (
        ("kvarc/2", ("objects.FORMAT",), 2), ("0.99.0", names, 1), (f"{meaning(SPEC_VERSION)}.77", names, 1),
    ):
        with monkeypatch.context() as patch, Archive(tmp_path) as archive:
            for name in attributes:
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
    (errno.EFBIG, ArchiveFull, "writev"), (errno.EROFS, ArchiveReadOnly, "replace"),
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
    """Check that reading and putting again count as uses, and that a chunk that was just put is kept."""
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
    """Check every folder. A file that is being written is kept, whatever its age."""
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


def fifo(path: Path) -> None:
    os.mkfifo(path)


def linked(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.law("an-object-proves-itself")
@pytest.mark.parametrize("make", [fifo, linked, Path.mkdir])
def test_a_path_that_is_not_a_file_is_a_miss_without_waiting(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """Check a FIFO, a link and a folder in place of an object, a salt and an old list, and among the objects."""
    manifest, tensors = chunk(1)
    with Archive(tmp_path) as archive:
        make(path_of(tmp_path, manifest.key))
        make(tmp_path / "objects" / "00" / "stray")
        make(tmp_path / "catalogue.lock")
        started_at = time.monotonic()
        assert archive.entries() == []
        assert archive.get(manifest.key, "alice") is None
        assert archive.put(manifest, tensors) == manifest.key
        assert archive.verify().read == 1
        make(path_of(tmp_path, "0" * 64))
        assert archive.verify().quarantined in ([], ["0" * 64])  # a folder holds no object
        archive.forget("alice")
        archive.gc()
        assert os.path.lexists(tmp_path / "catalogue.lock") == (make is Path.mkdir)
        assert time.monotonic() < started_at + 60


@pytest.mark.law("an-object-proves-itself")
@pytest.mark.parametrize("make", [fifo, linked, Path.mkdir])
def test_a_saved_tensor_file_is_a_regular_file_or_a_link_to_one(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "none")
    with pytest.raises(Damaged, match="no regular file"):
        tensor_file.read(tmp_path / "none")
    tensor_file.write(tmp_path / "whole", {"format": "x", "manifest": "{}"}, {"a": torch.ones(3)})
    (tmp_path / "link").symlink_to("whole")
    assert torch.equal(tensor_file.read(tmp_path / "link")[1]["a"], torch.ones(3))


def link_quarantine(path: Path, target: str) -> None:
    """Replace the quarantine folder by a link."""
    place = path.parents[2] / "quarantine"
    place.rmdir()
    place.symlink_to(target)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a flipped bit": damage,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "empty": lambda path: path.write_bytes(b""),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "another chunk's": lambda path: path.rename(path.with_name(f"{path.name[:2]}{'0' * 62}.safetensors")),
    "in another shard": lambda path: path.rename(path.parent.parent / "zz" / path.name),
    "in another case": lambda path: path.rename(path.with_name(path.name.upper())),
    "without a suffix": lambda path: path.rename(path.with_suffix("")),
    "a name that is no UTF-8": lambda path: path.rename(os.fsdecode(os.fsencode(path.parent) + b"/\xff\n")),
    "of somebody": lambda path: path.with_name("notes.txt").write_text("mine"),
    "in quarantine": lambda path: (path.parents[2] / "quarantine" / "left").write_bytes(b"x"),
    "a quarantine elsewhere": lambda path: link_quarantine(path, "objects/00"),
    "a quarantine nowhere": lambda path: link_quarantine(path, "nowhere"),
}


@pytest.mark.law("an-object-proves-itself")
@pytest.mark.parametrize("name", DAMAGES)
def test_verify_names_whatever_is_no_whole_object_in_its_place(tmp_path: Path, name: str) -> None:
    """Check that the command ends with exit code 1 and prints any name."""
    with Archive(tmp_path) as archive:
        key = archive.put(*chunk(1))
        archive.put(*chunk(2))
    (tmp_path / "objects" / "zz").mkdir()
    assert CliRunner().invoke(app, ["archive", "verify", "--archive", str(tmp_path)]).exit_code == 0
    DAMAGES[name](path_of(tmp_path, key))
    result = CliRunner().invoke(app, ["archive", "verify", "--archive", str(tmp_path)])
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit), result.exception
    assert len(result.output.splitlines()) == 2
    again = CliRunner().invoke(app, ["archive", "verify", "--archive", str(tmp_path)])
    assert again.exit_code == 1


def interrupted(work: Callable[[], object], at: int, other: Callable[[], object], killed_at: int = 0) -> bool:
    """Run the work, and run `other` before call `at`. Kill the work before call `killed_at`.

    Returns:
        True if the work made `at` calls.
    """
    calls, running = 0, True
    with pytest.MonkeyPatch.context() as patch:
        def counting(real: Callable[..., Any]) -> Callable[..., Any]:
            def counted(*arguments: Any, **options: Any) -> Any:
                nonlocal calls, running
                calls += running
                if calls == at and running:
                    running = False
                    other()
                    running = True
                if calls == killed_at and running:
                    raise Killed
                return real(*arguments, **options)

            return counted

        for name in ("open", "lstat", "replace", "rename", "link", "unlink"):
            patch.setattr(os, name, counting(getattr(os, name)))
        with suppress(Killed):
            work()
    return calls >= at


def test_a_put_beside_a_quarantining_reader_that_is_killed_is_not_lost(tmp_path: Path) -> None:
    """Put the chunk before each call of a reader, and kill the reader before each of the next calls."""
    with Archive(tmp_path) as archive:
        path = path_of(tmp_path, key := archive.put(*chunk(1)))
        damage(path)
        at = 1
        while interrupted(lambda: archive.get(key, "alice"), at, lambda: archive.put(*chunk(1))):
            for later in range(1, 7):
                damage(path)
                interrupted(lambda: archive.get(key, "alice"), at, lambda: archive.put(*chunk(1)), at + later)
                assert archive.get(key, "alice") is not None, (at, later)
            damage(path)
            at += 1
        assert at > 4


@pytest.mark.law("an-object-proves-itself")
@pytest.mark.parametrize("full", [False, True])
def test_a_folder_in_the_place_of_an_object_is_named_and_put_away(tmp_path: Path, full: bool) -> None:
    manifest, tensors = chunk(1)
    with Archive(tmp_path) as archive:
        path = path_of(tmp_path, manifest.key)
        path.mkdir()
        if full:
            (path / "notes").write_text("mine")
        assert archive.verify().strays
        archive.put(manifest, tensors)
        assert archive.get(manifest.key, "alice") is not None
        assert archive.verify().strays == []
        assert len(list((tmp_path / "quarantine").rglob("notes"))) == full
        (tmp_path / "quarantine").rename(tmp_path / "away")
        (tmp_path / "quarantine").write_text("no folder")
        assert archive.verify().strays == ["quarantine"]


@pytest.mark.law("an-object-proves-itself")
def test_keys_that_are_no_folder_are_refused_in_a_sentence(tmp_path: Path) -> None:
    with Archive(tmp_path) as archive:
        archive.put(*chunk(1))
    (tmp_path / "keys").write_text("no folder")
    with pytest.raises(ArchiveError, match="keys must be a folder: it holds the salts of an encrypted archive"):
        Archive(tmp_path)
    result = CliRunner().invoke(app, ["archive", "verify", "--archive", str(tmp_path)])
    assert result.exit_code != 0


def test_a_replaced_object_that_cannot_be_looked_at_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lstat = os.lstat

    def failing_once_replaced(path: Any, **options: Any) -> os.stat_result:
        if Path(path).name.startswith(TEMPORARY):
            raise OSError(errno.EIO, "failed")
        return lstat(path, **options)

    with Archive(tmp_path) as archive:
        damage(path_of(tmp_path, archive.put(*chunk(1))))
        monkeypatch.setattr(os, "lstat", failing_once_replaced)
        with pytest.raises(OSError, match="failed"):
            archive.put(*chunk(1))
        monkeypatch.undo()
        assert not [path for path in (tmp_path / "objects").rglob("*") if path.name.startswith(TEMPORARY)]


both = pytest.mark.parametrize("encrypted", [False, True], ids=["clear", "encrypted"])


def make_chunk(seed: int, tenant: str = ALICE) -> tuple[Manifest, dict[str, Tensor]]:
    return chunk(seed, tenant=tenant, tokens=12)


def needles(seed: int, *keys: str) -> list[bytes]:
    """Return byte strings with tokens, tenant and key of a chunk."""
    manifest, tensors = make_chunk(seed)
    return [
        ALICE.encode(), manifest.key.encode(), *(key.encode() for key in keys), manifest.ids.encode(),
        tensors["token_ids"].numpy().tobytes()[:64],
        tensors["1.v"].flatten().view(torch.uint8).numpy().tobytes()[-64:],
    ]


def survive(folder: Path, *sought: list[bytes]) -> list[bytes]:
    actual = blobs(folder)
    return [needle for one in sought for needle in one if any(needle in blob for blob in actual)]


@both
def test_neither_quarantine_nor_temporary_files_nor_an_old_list_keep_anything(
    quick_path: Path, encrypted: bool,
) -> None:
    """Check damaged objects, unfinished files with an incomplete header, misnamed files, and an older version's
    list."""
    with opened(quick_path, encrypted) as archive, opened(quick_path, encrypted) as other:
        keys = [archive.put(*make_chunk(seed)) for seed in range(60)]
        salts = [path.read_bytes() for path in (quick_path / "keys").glob("*")]
        bobs = [archive.put(*make_chunk(1000 + seed, "bob")) for seed in range(60)]
        for at, key in enumerate(keys[:3]):
            damage(path_of(quick_path, key), (20, 300, -1)[at])
            assert archive.get(key, ALICE) is None
        torn = path_of(quick_path, keys[3])
        (torn.parent / f".tmp-{torn.name}-1").write_bytes(b"torn" + torn.read_bytes()[4:])
        path_of(quick_path, "0" * 64).write_bytes(torn.read_bytes())
        (quick_path / "quarantine" / "left").write_bytes(torn.read_bytes()[8:])
        keys.append(archive.put(*make_chunk(60)))
        everything = [*map(needles, range(61), keys), salts]
        assert {key.encode() for key in keys} <= set(survive(quick_path, *everything))
        for name in ("catalogue.sqlite", "catalogue.sqlite-wal", "catalogue.seal"):
            (quick_path / name).write_bytes(f"{ALICE} {keys[0]}".encode())
        assert len(other.entries()) == 118
        assert archive.forget(ALICE) == 64
        assert survive(quick_path, *everything) == []
        assert {entry.key for entry in other.entries()} == set(bobs)
        assert all(archive.get(key, "bob") is not None for key in bobs)
    assert survive(quick_path, *everything) == []
    with opened(quick_path, encrypted) as archive:
        assert archive.verify().clean
        assert {entry.key for entry in archive.entries()} == set(bobs)


@both
def test_what_gc_removes_is_erased(quick_path: Path, encrypted: bool) -> None:
    """Check that unfinished parts and a damaged copy of a removed object are erased too, but no other object."""
    with opened(quick_path, encrypted) as archive:
        keys = [archive.put(*make_chunk(seed)) for seed in range(20)]
        damage(path_of(quick_path, keys[0]))
        assert archive.get(keys[0], ALICE) is None
        assert archive.put(*make_chunk(0)) == keys[0]
        bob = archive.put(*make_chunk(99, "bob"))
        os.utime(path_of(quick_path, bob), (4e9, 4e9))
        size = archive.entries()[0].bytes
    inside = path_of(quick_path, keys[0])
    unfinished = inside.parent / f".tmp-{keys[1]}-1"
    unfinished.write_bytes(path_of(quick_path, keys[1]).read_bytes()[:-9])
    os.utime(unfinished, (1, 1))
    everything = list(map(needles, range(20), keys))
    with opened(quick_path, encrypted, limit=size + size // 2) as archive, inside.open("rb") as held:
        assert {key.encode() for key in keys} <= set(survive(quick_path, *everything))
        assert set(archive.gc()) == {*keys, f"quarantine/damaged-{keys[0]}.safetensors"}
        assert not held.read().strip(b"\0")
        assert survive(quick_path, *everything) == []
        assert archive.get(bob, "bob") is not None
    assert survive(quick_path, *everything) == []


def test_what_is_half_erased_is_no_object(quick_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check an object whose bytes are erased but whose file cannot be removed: it is neither listed nor damaged."""
    with Archive(quick_path, limit=1 << 20) as archive:
        key = archive.put(*make_chunk(0))
        archive._limit = 1
        with monkeypatch.context() as patch:
            patch.setattr(os, "unlink", failing(errno.EIO))
            with pytest.raises(OSError, match=r"\[Errno 5\]"):
                archive.gc()
        assert archive.entries() == []
        assert archive.get(key, ALICE) is None
        assert not list((quick_path / "quarantine").iterdir())
        assert archive.verify().clean
        assert archive.forget(ALICE) == 1
    assert survive(quick_path, needles(0, key)) == []


@pytest.mark.parametrize("kind", ["symlink", "hard link", "linked folder", "linked quarantine"])
def test_erasing_never_follows_a_link(quick_path: Path, kind: str) -> None:
    outside = quick_path / "outside"
    outside.mkdir()
    folder = quick_path / "a"
    with Archive(folder) as archive:
        key = chunk(1)[0].key
        path = path_of(folder, key)
        victim = outside / path.name
        victim.write_bytes(b"of somebody else")
        if kind == "symlink":
            path.symlink_to(victim)
        elif kind == "hard link":
            os.link(victim, path)
        else:
            linked = path.parent if kind == "linked folder" else folder / "quarantine"
            linked.rmdir()
            linked.symlink_to(outside)
        archive.forget("alice")
        assert victim.read_bytes() == b"of somebody else"
        assert not path.exists() or kind == "linked folder"


def test_erasing_a_sparse_file_takes_no_room(quick_path: Path) -> None:
    path = quick_path / "sparse"
    path.write_bytes(b"secret")
    os.truncate(path, 1 << 28)
    with path.open("rb") as held:
        assert erase(path)
        assert held.read(6) == bytes(6)
        assert os.fstat(held.fileno()).st_blocks < 1000


def test_forget_beside_readers_of_damaged_objects(quick_path: Path) -> None:
    """Check a reader that quarantines damaged objects while they are forgotten. No object is left, in either order."""
    for at in range(3):
        with Archive(quick_path) as archive:
            keys = [archive.put(*make_chunk(seed)) for seed in range(10)]
            for key in keys:
                damage(path_of(quick_path, key), -1 - at)

            def read(keys: list[str] = keys) -> None:
                with Archive(quick_path) as reader:
                    for key in keys:
                        reader.get(key, ALICE)

            readers = [threading.Thread(target=read) for _ in range(2)]
            for reader in readers:
                reader.start()
            archive.forget(ALICE)
            for reader in readers:
                reader.join()
        assert survive(quick_path, *map(needles, range(10))) == []
