"""Encrypted objects: each tenant's key opens its own alone, and what is forgotten is gone."""

from pathlib import Path

import pytest

pytest.importorskip("cryptography")

import random

import torch

from conformance.own.models_integration.archive.chunks import MODEL, chunk
from models_integration.archive.errors import KeyUnavailable, WrongModel
from models_integration.archive.keyring import Keyring
from models_integration.archive.objects import read_object
from models_integration.archive.store import Archive
from models_integration.cache.tensor_file import Damaged
from models_integration.model.identity import ModelIdentity
from spec.errors import SpecError

pytestmark = pytest.mark.law("nothing-readable-without-the-key")

MASTER = bytes(range(32))


def opened(folder: Path, master: bytes = MASTER) -> Archive:
    return Archive(folder, Keyring(folder / "keys", master))


def path_of(folder: Path, key: str) -> Path:
    return folder / "objects" / key[:2] / f"{key}.safetensors"


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
        assert ring.cipher_of(his).key_of("x") == ring.cipher("bob").key_of("x")
        with pytest.raises(Damaged, match="tag"):
            read_object(path_of(tmp_path, his), lambda: ring.cipher("alice"))
        assert read_object(path_of(tmp_path, his), lambda: ring.cipher("bob"))
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
        assert archive.repaired.clean
        assert not any(needle in blob for needle in needles for blob in blobs(tmp_path))


def blobs(folder: Path) -> list[bytes]:
    return [path.name.encode() + path.read_bytes() for path in folder.rglob("*") if path.is_file()]


@pytest.mark.law("refused-before-anything-changes")
def test_another_master_key_is_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    with opened(tmp_path) as archive:
        key = archive.put(*chunk(1))
    with opened(tmp_path, bytes(reversed(MASTER))) as archive:
        with pytest.raises(KeyUnavailable, match="master key"):
            archive.get(key, "alice")
        with pytest.raises(KeyUnavailable, match="master key"):
            archive.put(*chunk(2))
        assert archive.verify().closed == [key]
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


@pytest.mark.law("saved-is-what-was")
def test_objects_that_were_archived_in_the_clear_stay_readable(tmp_path: Path) -> None:
    with Archive(tmp_path) as archive:
        key = archive.put(*chunk(1))
    with opened(tmp_path) as archive:
        assert archive.get(key, "alice") is not None


@pytest.mark.law("refused-before-anything-changes")
def test_the_master_key_has_32_bytes(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="32 random bytes"):
        Keyring(tmp_path, b"short")
