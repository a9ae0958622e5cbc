"""Of encrypted objects the folder tells no identity, and of others' objects the archive tells nothing."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography")

from conformance.own.models_integration.archive.chunks import MODEL, chunk
from conformance.own.models_integration.archive.fault_cases import blobs, path_of
from models_integration.archive.errors import KeyUnavailable
from models_integration.archive.keyring import Keyring, read_master
from models_integration.archive.objects import padded
from models_integration.archive.store import Archive
from spec.errors import SpecError

pytestmark = pytest.mark.law("nothing-readable-without-the-key")

MASTER = bytes(range(100, 132))
NAMED = replace(MODEL, weights="weights-of-a-model", rotation="rotation-of-a-model", config="config-of-a-model")


def test_an_encrypted_object_tells_neither_tenant_nor_text_nor_length_nor_weights(tmp_path: Path) -> None:
    manifest, tensors = chunk(1, tenant="alice-the-tenant", tokens=41, model=NAMED)
    with Archive(tmp_path, Keyring(tmp_path / "keys", MASTER)) as archive:
        key = archive.put(manifest, tensors)
        assert [entry.key for entry in archive.entries("alice-the-tenant")] == [key]
        assert archive.entries("bob") == []
        stored = archive.get(key, "alice-the-tenant", NAMED)
        assert stored is not None
        assert stored.manifest == manifest
    assert key != manifest.key
    needles = [b"alice-the-tenant", manifest.ids.encode(), manifest.key.encode(), manifest.key[:32].encode()]
    needles += [text.encode() for text in (NAMED.weights, NAMED.rotation, NAMED.config)] + [b'"tokens"', b":41,"]
    assert [needle for needle in needles if any(needle in blob for blob in blobs(tmp_path))] == []


def test_the_same_text_has_another_key_under_another_salt_or_master(tmp_path: Path) -> None:
    """So that nobody who guesses a text can look whether its key is there."""
    keys = []
    for at in range(3):
        master = MASTER if at < 2 else bytes(reversed(MASTER))
        with Archive(tmp_path / str(at), Keyring(tmp_path / str(at) / "keys", master)) as archive:
            keys.append(archive.put(*chunk(1)))
            assert archive.put(*chunk(1)) == keys[-1]
    assert len({key[:48] for key in keys}) == 3


def test_lengths_nearby_have_one_size(tmp_path: Path) -> None:
    with Archive(tmp_path, Keyring(tmp_path / "keys", MASTER)) as archive:
        sizes = {path_of(tmp_path, archive.put(*chunk(1, tokens=tokens))).stat().st_size for tokens in range(100, 108)}
    assert len(sizes) <= 3
    assert all(size <= padded(size) <= max(256, 1.12 * size) for size in range(1, 100_000, 97))


@pytest.mark.parametrize("encrypted", [False, True])
def test_another_tenant_s_object_is_not_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encrypted: bool,
) -> None:
    """The same answer by the same work, stored or not, damaged or of an old version: no file is asked for."""
    with Archive(tmp_path, Keyring(tmp_path / "keys", MASTER) if encrypted else None) as archive:
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


def test_without_the_ring_every_encrypted_key_is_refused_alike(tmp_path: Path) -> None:
    with Archive(tmp_path, Keyring(tmp_path / "keys", MASTER)) as archive:
        hers = archive.put(*chunk(1))
    with Archive(tmp_path) as archive:
        for key in (hers, "1" * 64):
            with pytest.raises(KeyUnavailable, match="no key is given"):
                archive.get(key, "alice")


@pytest.mark.law("promised-is-there-forgotten-is-not")
def test_forget_after_a_cut_off_forget(tmp_path: Path) -> None:
    """The salt is destroyed and the objects are not: a second call finds them."""
    ring = Keyring(tmp_path / "keys", MASTER)
    with Archive(tmp_path, ring) as archive:
        key = archive.put(*chunk(1))
        ring.destroy("alice")
        with pytest.raises(KeyUnavailable, match="forgotten"):
            archive.get(key, "alice")
        assert archive.forget("alice") == 1
        assert archive.get(key, "alice") is None
    assert not path_of(tmp_path, key).exists()


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
    with pytest.raises(SpecError, match=r"master_key = .*must be its owner's alone \(chmod 600\), not of mode 640"):
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
