"""Encrypted objects: each tenant's key opens its own alone, and what is forgotten is gone."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography")

import errno
import json
import random

import torch

from conformance.own.models_integration.archive.chunks import MODEL, chunk
from conformance.own.models_integration.archive.fault_cases import blobs, path_of
from models_integration.archive.errors import ForeignVersion, KeyUnavailable, NotEncrypted, WrongModel
from models_integration.archive.keyring import Keyring
from models_integration.archive.objects import read_claim, read_object
from models_integration.archive.store import Archive
from models_integration.cache.tensor_file import header_bytes
from models_integration.model.identity import ModelIdentity
from spec.errors import SpecError

pytestmark = pytest.mark.law("nothing-readable-without-the-key")

MASTER = bytes(range(32))


def opened(folder: Path, master: bytes = MASTER) -> Archive:
    return Archive(folder, Keyring(folder / "keys", master))


@pytest.mark.law("saved-is-what-was")
def test_what_is_put_is_got(tmp_path: Path) -> None:
    manifest, tensors = chunk(1)
    with opened(tmp_path) as archive:
        key = archive.put(manifest, tensors)
    with opened(tmp_path) as archive:
        found = archive.get(key, "alice", MODEL)
        assert found is not None
        assert found.manifest == manifest
        assert all(torch.equal(found.tensors[name], tensors[name]) for name in tensors)
        with pytest.raises(WrongModel):
            archive.get(key, "alice", ModelIdentity("other", "float32", "rotation", "config", "bfloat16"))
        assert archive.verify().clean


def test_neither_keys_nor_token_ids_stand_in_the_file(tmp_path: Path) -> None:
    manifest, tensors = chunk(1, tokens=50)
    with opened(tmp_path) as archive:
        data = path_of(tmp_path, archive.put(manifest, tensors)).read_bytes()
    for tensor in tensors.values():
        assert tensor.flatten().view(torch.uint8).numpy().tobytes()[:64] not in data


def test_a_key_of_one_tenant_never_opens_an_object_of_another(tmp_path: Path) -> None:
    with opened(tmp_path) as archive:
        hers = archive.put(*chunk(1, tenant="alice"))
        his = archive.put(*chunk(1, tenant="bob"))
        assert archive.get(his, "alice") is None
        assert archive.get(hers, "bob") is None
        ring = Keyring(tmp_path / "keys", MASTER)
        with pytest.raises(KeyUnavailable, match="another salt"):
            read_object(path_of(tmp_path, his), his, lambda _: ring.cipher("alice"))
        assert read_object(path_of(tmp_path, his), his, lambda _: ring.cipher("bob"))
        assert archive.verify().clean


@pytest.mark.law("an-object-proves-itself")
def test_an_object_under_another_name_is_damage(tmp_path: Path) -> None:
    """Her object copied over his: his key does not open it, and hers is not asked."""
    with opened(tmp_path) as archive:
        hers, his = (archive.put(*chunk(1, tenant=tenant)) for tenant in ("alice", "bob"))
        path_of(tmp_path, his).write_bytes(path_of(tmp_path, hers).read_bytes())
        assert archive.get(his, "bob") is None
        assert not path_of(tmp_path, his).exists()
        assert archive.get(hers, "alice") is not None


@pytest.mark.law("an-object-proves-itself")
def test_every_flipped_bit_is_detected(tmp_path: Path) -> None:
    rng = random.Random(3)
    with opened(tmp_path) as archive:
        path = path_of(tmp_path, key := archive.put(*chunk(1)))
        data = path.read_bytes()
        for at in range(200):
            header = 8 + int.from_bytes(data[:8], "little")
            bit = rng.randrange(8 * header) if at % 2 else rng.randrange(8 * len(data))
            path.write_bytes(data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :])
            assert archive.get(key, "alice") is None
            assert not path.exists()
            path.write_bytes(data)
        assert archive.get(key, "alice") is not None


@pytest.mark.law("promised-is-there-forgotten-is-not")
@pytest.mark.parametrize("encrypted", [True, False])
def test_after_forget_the_folder_holds_none_of_the_bytes(tmp_path: Path, encrypted: bool) -> None:
    """A raw scan for the payload, the key, the salt and the tenant's name, damaged and unfinished objects included."""
    ring = Keyring(tmp_path / "keys", MASTER) if encrypted else None
    with Archive(tmp_path, ring) as archive:
        manifests = [chunk(seed, tenant="alice-the-tenant", tokens=40) for seed in range(3)]
        keys = [archive.put(*made) for made in manifests]
        other = archive.put(*chunk(7, tenant="bob", tokens=40))
        broken = path_of(tmp_path, keys[0])
        data = bytearray(broken.read_bytes())
        data[-1] ^= 1
        broken.write_bytes(data)
        assert archive.get(keys[0], "alice-the-tenant") is None
        unfinished = path_of(tmp_path, keys[1])
        (unfinished.parent / f".tmp-{unfinished.name}-1").write_bytes(unfinished.read_bytes()[:-20])
        needles = [path_of(tmp_path, key).read_bytes()[-200:] for key in keys[1:]] + [bytes(data[-200:])]
        salts = {path: path.read_bytes() for path in (tmp_path / "keys").glob("*")}
        needles += [key.encode() for key in keys] + ([] if encrypted else [b"alice-the-tenant"])
        assert all(any(needle in blob for blob in blobs(tmp_path)) for needle in needles)
        archive.forget("alice-the-tenant")
        remaining = [path for path in salts if path.exists()]
        needles += [salt for path, salt in salts.items() if path not in remaining]
        assert not any(needle in blob for needle in needles for blob in blobs(tmp_path))
        assert len(remaining) == (1 if encrypted else 0)
        assert archive.get(other, "bob") is not None
        assert [entry.key for entry in archive.entries()] == [other]
        if encrypted:
            with pytest.raises(KeyUnavailable, match="forgotten"):
                Keyring(tmp_path / "keys", MASTER).cipher("alice-the-tenant")
    with Archive(tmp_path, ring) as archive:
        assert archive.verify().clean
        assert not any(needle in blob for needle in needles for blob in blobs(tmp_path))


@pytest.mark.law("refused-before-anything-changes")
def test_another_master_key_is_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    with opened(tmp_path) as archive:
        key = archive.put(*chunk(1))
    with opened(tmp_path, bytes(reversed(MASTER))) as archive:
        with pytest.raises(KeyUnavailable, match="master key"):
            archive.get(key, "alice")
        with pytest.raises(KeyUnavailable, match="master key"):
            archive.put(*chunk(2))
        report = archive.verify()
        assert report.locked == [key]
        assert len(report.strays) == 1  # the salt
    with opened(tmp_path) as archive:
        assert archive.get(key, "alice") is not None


@pytest.mark.law("refused-before-anything-changes")
def test_without_a_keyring_an_encrypted_object_is_refused_and_kept(tmp_path: Path) -> None:
    with opened(tmp_path) as archive:
        key = archive.put(*chunk(1))
    with Archive(tmp_path) as archive:
        with pytest.raises(KeyUnavailable, match="no key is given"):
            archive.get(key, "alice")
        assert [entry.key for entry in archive.entries()] == [key]
    assert path_of(tmp_path, key).exists()


@pytest.mark.parametrize("with_key", [True, False])
def test_an_encrypted_archive_neither_gives_nor_takes_objects_in_the_clear(tmp_path: Path, with_key: bool) -> None:
    """Whoever can write the folder could have planted them, as their digest needs no key."""
    with Archive(tmp_path / "clear") as archive:
        key = archive.put(*chunk(1))
    folder = tmp_path / "a"
    with opened(folder) as archive:
        sealed = archive.put(*chunk(2))
    path_of(tmp_path / "clear", key).rename(path_of(folder, key))
    with opened(folder) if with_key else Archive(folder) as archive:
        with pytest.raises(NotEncrypted, match="put its text again"):
            archive.get(key, "alice")
        assert archive.get(key, "bob") is None
        assert [entry.key for entry in archive.entries()] == [sealed]
        report = archive.verify()
        assert (report.clear, report.locked) == ([key], [] if with_key else [sealed])
        if not with_key:
            with pytest.raises(KeyUnavailable, match="no master key is given"):
                archive.put(*chunk(3))
        assert len(list((folder / "objects").glob("*/*"))) == 2
    with opened(folder) as archive:
        assert archive.forget("alice") == 2


@pytest.mark.law("refused-before-anything-changes")
def test_under_another_salt_a_sound_object_is_locked_and_stays(tmp_path: Path) -> None:
    """Salts lost, made anew, exchanged, and objects of another archive; put back, everything is read again."""
    with opened(tmp_path) as archive:
        keys = {tenant: archive.put(*chunk(1, tenant=tenant)) for tenant in ("alice", "bob")}
    files = {key: path_of(tmp_path, key).read_bytes() for key in keys.values()}
    salts = {path: path.read_bytes() for path in (tmp_path / "keys").iterdir()}

    def check_locked(archive: Archive, message: str) -> None:
        for tenant, key in keys.items():
            with pytest.raises(KeyUnavailable, match=message):
                archive.get(key, tenant)
        report = archive.verify()
        assert sorted(report.locked) == sorted(keys.values())
        assert report.quarantined == []
        assert {key: path_of(tmp_path, key).read_bytes() for key in files} == files

    for path in salts:
        path.unlink()
    with opened(tmp_path) as archive:
        check_locked(archive, "it never had one, or it was forgotten")
        anew = [archive.put(*chunk(2, tenant=tenant)) for tenant in keys]
        check_locked(archive, "under another salt")
        assert archive.verify().read == len(anew)
    for path, data in zip(salts, reversed(salts.values()), strict=True):
        path.write_bytes(data)
    with opened(tmp_path) as archive:
        assert archive.verify().read == 0
        assert sorted(archive.verify().locked) == sorted([*keys.values(), *anew])
    for path, data in salts.items():
        path.write_bytes(data)
    with opened(tmp_path) as archive:
        assert all(archive.get(key, tenant) is not None for tenant, key in keys.items())
        assert sorted(archive.verify().locked) == sorted(anew)
    with opened(tmp_path / "other") as archive:
        archive.put(*chunk(3))
        for key, data in files.items():
            path_of(tmp_path / "other", key).write_bytes(data)
        assert sorted(archive.verify().locked) == sorted(files)
        assert archive.verify().quarantined == []


@pytest.mark.law("refused-before-anything-changes")
def test_an_encrypted_object_of_the_version_before_is_foreign_and_stays(tmp_path: Path) -> None:
    """Its header has neither digest nor mark, so nothing tells another salt from damage. `forget` erases it."""
    with opened(tmp_path) as archive:
        path = path_of(tmp_path, key := archive.put(*chunk(1)))
        data = path.read_bytes()
        size = 8 + int.from_bytes(data[:8], "little")
        entries = json.loads(data[8:size])
        metadata = {**entries.pop("__metadata__"), "digest": "", "format": "kvarc/3"}
        del metadata["mark"]
        path.write_bytes(header_bytes(metadata, entries) + data[size:])
        with pytest.raises(ForeignVersion, match="kvarc/3"):
            archive.get(key, "alice")
        assert archive.entries() == []
        assert archive.verify().foreign == [key]
        assert archive.forget("alice") == 1


def test_marks_of_one_tenant_are_not_alike(tmp_path: Path) -> None:
    """Without the master key, nobody learns which objects have one tenant."""
    with opened(tmp_path) as archive:
        claims = [read_claim(path_of(tmp_path, archive.put(*chunk(seed)))) for seed in range(4)]
    (salt,) = [path.read_bytes() for path in (tmp_path / "keys").iterdir()]
    assert len({claim.mark for claim in claims} | {salt[32:]}) == 5


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize("master", [None, bytes(reversed(MASTER))], ids=["none", "wrong"])
@pytest.mark.parametrize("salts", [True, False])
def test_forget_needs_the_master_key(tmp_path: Path, master: bytes | None, salts: bool) -> None:
    """Also where the salts are lost, so that no salt says whether it is the right one."""
    with opened(tmp_path) as archive:
        key = archive.put(*chunk(1))
    if not salts:
        for path in (tmp_path / "keys").iterdir():
            path.unlink()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    archive = Archive(tmp_path) if master is None else opened(tmp_path, master)
    with pytest.raises(KeyUnavailable, match="master key"):
        archive.forget("alice")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    with opened(tmp_path) as archive:
        assert archive.forget("alice") == 1
        assert archive.forget("alice") == 0
    assert not path_of(tmp_path, key).exists()


@pytest.mark.law("figures-are-counted-right")
def test_verify_reads_each_salt_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And once more for its own tenant's objects: not each one for each object."""
    with opened(tmp_path) as archive:
        for seed in range(40):
            archive.put(*chunk(seed, tenant=f"tenant {seed}", layers=1))
    stored, reads = Keyring._stored, 0

    def counted(ring: Keyring, owner: str) -> bytes:
        nonlocal reads
        reads += 1
        return stored(ring, owner)

    monkeypatch.setattr(Keyring, "_stored", counted)
    with opened(tmp_path) as archive:
        assert archive.verify().read == 40
    assert reads <= 3 * 40


@pytest.mark.law("refused-before-anything-changes")
def test_the_master_key_has_32_bytes(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="32 random bytes"):
        Keyring(tmp_path, b"short")


@pytest.mark.law("promised-is-there-forgotten-is-not")
def test_a_salt_that_could_not_be_read_once_locks_nothing_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(ring: Keyring, owner: str) -> bytes:
        raise OSError(errno.EIO, "a bad moment")

    with opened(tmp_path) as archive:
        key = archive.put(*chunk(1))
        with monkeypatch.context() as patch:
            patch.setattr(Keyring, "_stored", failing)
            assert archive.verify().locked == [key]
        assert archive.verify().read == 1


@pytest.mark.law("promised-is-there-forgotten-is-not")
def test_a_put_whose_tenant_is_forgotten_meanwhile_promises_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The salt goes after the chunk was encrypted, and the forgetting process has looked through the shards by then."""
    with opened(tmp_path) as archive:
        publish = archive._files.publish

        def forgotten(*arguments: Any) -> None:
            assert archive._keyring is not None
            archive._keyring.destroy("alice")
            publish(*arguments)

        monkeypatch.setattr(archive._files, "publish", forgotten)
        with pytest.raises(KeyUnavailable, match="forgotten"):
            archive.put(*chunk(1))


def test_a_salt_under_two_names_is_named_and_locks_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as archive:
        archive.put(*chunk(1))
        (salt,) = (tmp_path / "keys").iterdir()
        for digit in "0f":  # the folder's order is the file system's
            salt.with_name(digit * 64).write_bytes(salt.read_bytes())
        report = archive.verify()
        assert (report.read, report.locked) == (1, [])
        assert report.strays == [f"keys/{name}" for name in sorted(["0" * 64, "f" * 64, salt.name])]
