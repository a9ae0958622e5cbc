"""Encrypted objects: each tenant's key opens only objects of this tenant, and the folder reveals no identity."""

import errno
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from models_integration.archive.errors import ForeignVersion, KeyUnavailable, NotEncrypted
from models_integration.archive.keyring import Keyring, read_master
from models_integration.archive.objects import padded, read_claim
from models_integration.archive.store import Archive
from models_integration.cache.tensor_file import header_bytes
from spec.errors import SpecError
from tests.models_integration.archive.fault_cases import MASTER, MODEL, blobs, chunk, failing, opened, path_of

pytest.importorskip("cryptography")

pytestmark = pytest.mark.law("nothing-readable-without-the-key")


@pytest.mark.parametrize("with_key", [True, False])
def test_an_encrypted_archive_neither_gives_nor_takes_objects_in_the_clear(tmp_path: Path, with_key: bool) -> None:
    """A writer of the folder could have planted such objects, because their digest needs no key."""
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
    """Check lost, new and exchanged salts, objects of a different archive, and the old salts again."""
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
    """The header has neither digest nor mark, so damage and a different salt look the same."""
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
    """Check that the objects of one tenant cannot be recognised without the master key."""
    with opened(tmp_path) as archive:
        claims = [read_claim(path_of(tmp_path, archive.put(*chunk(seed)))) for seed in range(4)]
    (salt,) = [path.read_bytes() for path in (tmp_path / "keys").iterdir()]
    assert len({claim.mark for claim in claims} | {salt[32:]}) == 5


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize("master", [None, bytes(reversed(MASTER))], ids=["none", "wrong"])
@pytest.mark.parametrize("salts", [True, False])
def test_forget_needs_the_master_key(tmp_path: Path, master: bytes | None, salts: bool) -> None:
    """Check lost salts too, when no salt confirms the master key."""
    with opened(tmp_path) as archive:
        key = archive.put(*chunk(1))
    if not salts:
        for path in (tmp_path / "keys").iterdir():
            path.unlink()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    archive = Archive(tmp_path) if master is None else opened(tmp_path, master=master)
    with pytest.raises(KeyUnavailable, match="master key"):
        archive.forget("alice")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    with opened(tmp_path) as archive:
        assert archive.forget("alice") == 1
        assert archive.forget("alice") == 0
    assert not path_of(tmp_path, key).exists()


@pytest.mark.law("figures-are-counted-right")
def test_verify_reads_each_salt_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that each salt is read at most twice, and not once for each object."""
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


@pytest.mark.law("promised-is-there-forgotten-is-not")
def test_a_salt_that_could_not_be_read_once_locks_nothing_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    with opened(tmp_path) as archive:
        key = archive.put(*chunk(1))
        with monkeypatch.context() as patch:
            patch.setattr(Keyring, "_stored", failing(errno.EIO))
            assert archive.verify().locked == [key]
        assert archive.verify().read == 1


@pytest.mark.law("promised-is-there-forgotten-is-not")
def test_a_put_whose_tenant_is_forgotten_meanwhile_promises_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check a salt that is destroyed after the chunk was encrypted."""
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
        for digit in "0f":  # The file system decides the order of the folder.
            salt.with_name(digit * 64).write_bytes(salt.read_bytes())
        report = archive.verify()
        assert (report.read, report.locked) == (1, [])
        assert report.strays == [f"keys/{name}" for name in sorted(["0" * 64, "f" * 64, salt.name])]


NAMED = replace(MODEL, weights="weights-of-a-model", rotation="rotation-of-a-model", config="config-of-a-model")


def test_an_encrypted_object_tells_neither_tenant_nor_text_nor_length_nor_weights(tmp_path: Path) -> None:
    manifest, tensors = chunk(1, tenant="alice-the-tenant", tokens=41, model=NAMED)
    with opened(tmp_path) as archive:
        key = archive.put(manifest, tensors)
        assert [entry.key for entry in archive.entries("alice-the-tenant")] == [key]
        assert archive.entries("bob") == []
        stored = archive.get(key, "alice-the-tenant", NAMED)
        assert stored is not None
        assert stored.manifest == manifest
    assert key != manifest.key
    needles = [b"alice-the-tenant", manifest.ids.encode(), manifest.key.encode(), manifest.key[:32].encode()]
    needles += [text.encode() for text in (NAMED.weights, NAMED.rotation, NAMED.config)] + [b'"tokens"', b":41,"]
    needles += [tensor.flatten().view(torch.uint8).numpy().tobytes()[:64] for tensor in tensors.values()]
    assert [needle for needle in needles if any(needle in blob for blob in blobs(tmp_path))] == []


def test_the_same_text_has_another_key_under_another_salt_or_master(tmp_path: Path) -> None:
    """A guessed text does not reveal whether its key is stored."""
    keys = []
    for at in range(3):
        master = MASTER if at < 2 else bytes(reversed(MASTER))
        with opened(tmp_path / str(at), master=master) as archive:
            keys.append(archive.put(*chunk(1)))
            assert archive.put(*chunk(1)) == keys[-1]
    assert len({key[:48] for key in keys}) == 3


def test_lengths_nearby_have_one_size(tmp_path: Path) -> None:
    with opened(tmp_path) as archive:
        sizes = {path_of(tmp_path, archive.put(*chunk(1, tokens=tokens))).stat().st_size for tokens in range(100, 108)}
    assert len(sizes) <= 3
    assert all(size <= padded(size) <= max(256, 1.12 * size) for size in range(1, 100_000, 97))


@pytest.mark.parametrize("encrypted", [False, True])
def test_another_tenant_s_object_is_not_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encrypted: bool,
) -> None:
    """Check that no file is accessed, whether the object is stored, missing, damaged or of an old version."""
    with opened(tmp_path, encrypted) as archive:
        hers = archive.put(*chunk(1, tenant="alice"))
        absent = hers[:46] + ("00" if hers[46:48] != "00" else "11") + hers[48:]
        archive.put(*chunk(2, tenant="bob"))
        damaged = archive.put(*chunk(3, tenant="alice"))
        path_of(tmp_path, damaged).write_bytes(b"nothing")

        def asked(*arguments: Any) -> None:
            raise AssertionError("the object was looked at")

        with monkeypatch.context() as patch:
            patch.setattr("models_integration.archive.store.read_object", asked)
            patch.setattr("models_integration.archive.object_folder.ObjectFolder.path", asked)
            for key in (hers, absent, damaged, "0" * 64, "", "\udcff", "../../etc"):
                assert archive.get(key, "bob") is None
        assert path_of(tmp_path, damaged).exists()
        assert archive.get(hers, "alice") is not None


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize("master", [bytes(32), b"\xff" * 32, b"ab" * 16, b"0123456789" * 3 + b"01", b"short"])
def test_a_master_key_that_cannot_be_random_is_refused(tmp_path: Path, master: bytes) -> None:
    with pytest.raises(SpecError, match="32 random bytes"):
        Keyring(tmp_path, master)


def test_a_master_key_in_the_archive_or_readable_by_others_is_refused(tmp_path: Path) -> None:
    archive, outside = tmp_path / "archive", tmp_path / "master"
    (archive / "keys").mkdir(parents=True)
    outside.write_bytes(MASTER)
    outside.chmod(0o640)
    with pytest.raises(SpecError, match=r"master_key = .*readable only for the owner; run chmod 600 \(the mode is 640"):
        read_master(outside, archive)
    outside.chmod(0o600)
    assert read_master(outside, archive) == MASTER
    (archive / "master").write_bytes(MASTER)
    (archive / "master").chmod(0o600)
    (tmp_path / "link").symlink_to(archive / "master")
    for inside in (archive / "master", tmp_path / "link"):
        with pytest.raises(SpecError, match="must be outside the archive"):
            read_master(inside, archive)
    with pytest.raises(SpecError, match="must be a readable file"):
        read_master(tmp_path / "nowhere", archive)
