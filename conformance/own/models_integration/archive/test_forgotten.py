"""What was forgotten or evicted is nowhere: a raw scan of names and bytes of the whole folder."""

import os
import threading
from pathlib import Path

import pytest
import torch

from conformance.own.models_integration.archive.chunks import chunk
from conformance.own.models_integration.archive.test_faults import blobs, path_of
from models_integration.archive.store import Archive
from models_integration.cache.atomic_file import erase

TENANT = "alice-the-tenant"


def needles(seed: int, tenant: str = TENANT) -> list[bytes]:
    """Tokens, tenant and key of a chunk."""
    manifest, tensors = chunk(seed, tenant=tenant, tokens=40)
    return [
        tenant.encode(), manifest.key.encode(), manifest.ids.encode(), tensors["token_ids"].numpy().tobytes()[:64],
        tensors["1.v"].flatten().view(torch.uint8).numpy().tobytes()[-64:],
    ]


def survive(folder: Path, *sought: list[bytes]) -> list[bytes]:
    return [needle for one in sought for needle in one if any(needle in blob for blob in blobs(folder))]


def test_neither_quarantine_nor_temporary_files_nor_free_pages_keep_anything(quick_path: Path) -> None:
    """Damaged, unfinished with a torn header, misnamed; and many rows, so that SQLite splits and frees pages."""
    with Archive(quick_path) as archive:
        keys = [archive.put(*chunk(seed, tenant=TENANT, tokens=40)) for seed in range(60)]
        bobs = [archive.put(*chunk(1000 + seed, tenant="bob", tokens=40)) for seed in range(60)]
        for at, key in enumerate(keys[:3]):
            data = bytearray(path_of(quick_path, key).read_bytes())
            data[(20, 300, -1)[at]] ^= 1
            path_of(quick_path, key).write_bytes(data)
            assert archive.get(key, TENANT) is None
        torn = path_of(quick_path, keys[3])
        (torn.parent / f".tmp-{torn.name}-1").write_bytes(b"torn" + torn.read_bytes()[4:])
        path_of(quick_path, "0" * 64).write_bytes(torn.read_bytes())
        (quick_path / "quarantine" / "left").write_bytes(torn.read_bytes()[8:])
        assert survive(quick_path, needles(3))
        assert archive.forget(TENANT) == 63
        assert survive(quick_path, *map(needles, range(60))) == []
        assert all(archive.get(key, "bob") is not None for key in bobs)
    assert survive(quick_path, *map(needles, range(60))) == []
    with Archive(quick_path) as archive:
        assert archive.repaired.clean
        assert {entry.key for entry in archive.entries()} == set(bobs)


def test_what_gc_removes_is_erased(quick_path: Path) -> None:
    with Archive(quick_path) as archive:
        archive.put(*chunk(99, tenant="bob", tokens=40))
        for seed in range(20):
            archive.put(*chunk(seed, tenant=TENANT, tokens=40))
        bob = archive.put(*chunk(99, tenant="bob", tokens=40))
        size = archive.entries()[0].bytes
    inside = path_of(quick_path, chunk(0, tenant=TENANT, tokens=40)[0].key)
    with Archive(quick_path, limit=size + size // 2) as archive, inside.open("rb") as held:
        assert len(archive.gc()) == 20
        assert not held.read().strip(b"\0")
        assert survive(quick_path, *map(needles, range(20))) == []
        assert archive.get(bob, "bob") is not None
    assert survive(quick_path, *map(needles, range(20))) == []


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
    os.truncate(path, 1 << 40)
    with path.open("rb") as held:
        assert erase(path)
        assert held.read(6) == bytes(6)
        assert os.fstat(held.fileno()).st_blocks < 1000


def test_forget_beside_readers_of_damaged_objects(quick_path: Path) -> None:
    """A reader puts damaged objects away while they are forgotten: none is left, whoever is first."""
    for at in range(6):
        with Archive(quick_path) as archive:
            keys = [archive.put(*chunk(seed, tenant=TENANT, tokens=40)) for seed in range(10)]
            for key in keys:
                data = bytearray(path_of(quick_path, key).read_bytes())
                data[-1 - at] ^= 1
                path_of(quick_path, key).write_bytes(data)

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
