"""Whatever is no whole object in its place is named, put away, and stops nothing; what is put meanwhile stays."""

import errno
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from conformance.own.models_integration.archive.chunks import chunk
from conformance.own.models_integration.archive.fault_cases import damage, path_of
from models_integration.archive.errors import ArchiveError
from models_integration.archive.store import Archive
from models_integration.cache import tensor_file
from models_integration.cache.atomic_file import TEMPORARY
from models_integration.cache.tensor_file import Damaged
from models_integration.cli.app import app

pytestmark = pytest.mark.law("an-object-proves-itself")


def fifo(path: Path) -> None:
    os.mkfifo(path)


def linked(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [fifo, linked, Path.mkdir])
def test_what_is_no_file_is_a_miss_and_nobody_waits(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """In the place of an object, of a salt's and an earlier list's file, and among the objects."""
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
        assert time.monotonic() < started_at + 5


@pytest.mark.parametrize("make", [fifo, linked, Path.mkdir])
def test_a_saved_tensor_file_is_a_regular_file_or_a_link_to_one(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "none")
    with pytest.raises(Damaged, match="no regular file"):
        tensor_file.read(tmp_path / "none")
    tensor_file.write(tmp_path / "whole", {"format": "x", "manifest": "{}"}, {"a": torch.ones(3)})
    (tmp_path / "link").symlink_to("whole")
    assert torch.equal(tensor_file.read(tmp_path / "link")[1]["a"], torch.ones(3))


def link_quarantine(path: Path, target: str) -> None:
    """Put a link in the place of the quarantine."""
    place = path.parents[2] / "quarantine"
    place.rmdir()
    place.symlink_to(target)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a flipped bit": lambda path: damage(path),
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


@pytest.mark.parametrize("name", DAMAGES)
def test_verify_names_whatever_is_no_whole_object_in_its_place(tmp_path: Path, name: str) -> None:
    """The command ends with 1, and prints names that hold anything."""
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


class Killed(BaseException):
    """In the place of a kill."""


def interrupted(work: Callable[[], object], at: int, other: Callable[[], object], killed_at: int = 0) -> bool:
    """Whether the work made so many calls; the other's work is done before the last of them.

    It is killed before the call `killed_at`.
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


@pytest.mark.law("promised-is-there-forgotten-is-not")
def test_a_put_beside_a_quarantining_reader_is_not_lost(tmp_path: Path) -> None:
    """The chunk is put before each call of a reader that finds its object damaged."""
    with Archive(tmp_path) as archive:
        path = path_of(tmp_path, key := archive.put(*chunk(1)))
        damage(path)
        at = 1
        while interrupted(lambda: archive.get(key, "alice"), at, lambda: archive.put(*chunk(1))):
            assert archive.get(key, "alice") is not None, at
            damage(path)
            at += 1
        assert at > 4
        assert not path.exists()


@pytest.mark.law("promised-is-there-forgotten-is-not")
def test_a_put_beside_a_quarantining_reader_that_is_killed_is_not_lost(tmp_path: Path) -> None:
    """The chunk is put before each call of the reader, which is killed before any of the next ones."""
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


def test_keys_that_are_no_folder_are_refused_in_a_sentence(tmp_path: Path) -> None:
    with Archive(tmp_path) as archive:
        archive.put(*chunk(1))
    (tmp_path / "keys").write_text("no folder")
    with pytest.raises(ArchiveError, match="keys must be a folder: it holds the salts of an encrypted archive"):
        Archive(tmp_path)
    result = CliRunner().invoke(app, ["archive", "verify", "--archive", str(tmp_path)])
    assert result.exit_code != 0


@pytest.mark.law("promised-is-there-forgotten-is-not")
def test_a_replaced_object_that_cannot_be_looked_at_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lstat = os.lstat

    def failing(path: Any, **options: Any) -> os.stat_result:
        if Path(path).name.startswith(TEMPORARY):
            raise OSError(errno.EIO, "failed")
        return lstat(path, **options)

    with Archive(tmp_path) as archive:
        damage(path_of(tmp_path, archive.put(*chunk(1))))
        monkeypatch.setattr(os, "lstat", failing)
        with pytest.raises(OSError, match="failed"):
            archive.put(*chunk(1))
        monkeypatch.undo()
        assert not [path for path in (tmp_path / "objects").rglob("*") if path.name.startswith(TEMPORARY)]
