"""What was forgotten or evicted is nowhere: a raw scan of names and bytes of the whole folder."""

import errno
import os
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from conformance.own.models_integration.archive.chunks import chunk
from conformance.own.models_integration.archive.fault_cases import blobs, path_of
from models_integration.archive.keyring import Keyring
from models_integration.archive.manifest import Manifest
from models_integration.archive.store import Archive
from models_integration.cache.atomic_file import erase

pytestmark = pytest.mark.law("promised-is-there-forgotten-is-not")

TENANT = "alice-the-tenant"


MASTER = bytes(range(32))
both = pytest.mark.parametrize("encrypted", [False, True], ids=["clear", "encrypted"])


def opened(folder: Path, encrypted: bool, limit: int | None = None) -> Archive:
    if encrypted:
        pytest.importorskip("cryptography")
    return Archive(folder, Keyring(folder / "keys", MASTER) if encrypted else None, limit)


def made(seed: int, tenant: str = TENANT) -> tuple[Manifest, dict[str, Tensor]]:
    return chunk(seed, tenant=tenant, tokens=12)


def needles(seed: int, *keys: str) -> list[bytes]:
    """Tokens, tenant and key of a chunk."""
    manifest, tensors = made(seed)
    return [
        TENANT.encode(), manifest.key.encode(), *(key.encode() for key in keys), manifest.ids.encode(),
        tensors["token_ids"].numpy().tobytes()[:64],
        tensors["1.v"].flatten().view(torch.uint8).numpy().tobytes()[-64:],
    ]


def survive(folder: Path, *sought: list[bytes]) -> list[bytes]:
    found = blobs(folder)
    return [needle for one in sought for needle in one if any(needle in blob for blob in found)]


def damage(folder: Path, key: str, at: int) -> None:
    data = bytearray(path_of(folder, key).read_bytes())
    data[at] ^= 1
    path_of(folder, key).write_bytes(data)


@both
def test_neither_quarantine_nor_temporary_files_nor_an_old_list_keep_anything(
    quick_path: Path, encrypted: bool,
) -> None:
    """Damaged, unfinished with a torn header, misnamed; and the list of an archive of an earlier version."""
    with opened(quick_path, encrypted) as archive, opened(quick_path, encrypted) as other:
        keys = [archive.put(*made(seed)) for seed in range(60)]
        salts = [path.read_bytes() for path in (quick_path / "keys").glob("*")]
        bobs = [archive.put(*made(1000 + seed, "bob")) for seed in range(60)]
        for at, key in enumerate(keys[:3]):
            damage(quick_path, key, (20, 300, -1)[at])
            assert archive.get(key, TENANT) is None
        torn = path_of(quick_path, keys[3])
        (torn.parent / f".tmp-{torn.name}-1").write_bytes(b"torn" + torn.read_bytes()[4:])
        path_of(quick_path, "0" * 64).write_bytes(torn.read_bytes())
        (quick_path / "quarantine" / "left").write_bytes(torn.read_bytes()[8:])
        keys.append(archive.put(*made(60)))
        everything = [*map(needles, range(61), keys), salts]
        assert {key.encode() for key in keys} <= set(survive(quick_path, *everything))
        for name in ("catalogue.sqlite", "catalogue.sqlite-wal", "catalogue.seal"):
            (quick_path / name).write_bytes(f"{TENANT} {keys[0]}".encode())
        assert len(other.entries()) == 118
        assert archive.forget(TENANT) == 64
        assert survive(quick_path, *everything) == []
        assert {entry.key for entry in other.entries()} == set(bobs)
        assert all(archive.get(key, "bob") is not None for key in bobs)
    assert survive(quick_path, *everything) == []
    with opened(quick_path, encrypted) as archive:
        assert archive.verify().clean
        assert {entry.key for entry in archive.entries()} == set(bobs)


@both
def test_what_gc_removes_is_erased(quick_path: Path, encrypted: bool) -> None:
    """Also what was left of it unfinished, and a damaged copy of before; not what stays."""
    with opened(quick_path, encrypted) as archive:
        keys = [archive.put(*made(seed)) for seed in range(20)]
        damage(quick_path, keys[0], -1)
        assert archive.get(keys[0], TENANT) is None
        assert archive.put(*made(0)) == keys[0]
        bob = archive.put(*made(99, "bob"))
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
    """Its bytes are gone, and the file cannot be removed: it is neither listed nor damaged, and is erased later."""
    def failing(*arguments: object, **options: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with Archive(quick_path, limit=1 << 20) as archive:
        key = archive.put(*made(0))
        archive._limit = 1
        with monkeypatch.context() as patch:
            patch.setattr(os, "unlink", failing)
            with pytest.raises(OSError, match=r"\[Errno 5\]"):
                archive.gc()
        assert archive.entries() == []
        assert archive.get(key, TENANT) is None
        assert not list((quick_path / "quarantine").iterdir())
        assert archive.verify().clean
        assert archive.forget(TENANT) == 1
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
    """A reader puts damaged objects away while they are forgotten: none is left, whoever is first."""
    for at in range(3):
        with Archive(quick_path) as archive:
            keys = [archive.put(*made(seed)) for seed in range(10)]
            for key in keys:
                damage(quick_path, key, -1 - at)

            def read(keys: list[str] = keys) -> None:
                with Archive(quick_path) as reader:
                    for key in keys:
                        reader.get(key, TENANT)

            readers = [threading.Thread(target=read) for _ in range(2)]
            for reader in readers:
                reader.start()
            archive.forget(TENANT)
            for reader in readers:
                reader.join()
        assert survive(quick_path, *map(needles, range(10))) == []
