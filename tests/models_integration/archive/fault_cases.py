"""Chunks for tests, operations of an archive during failing system calls, and the conditions after a failure."""

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lab.faults import Killed, faults
from models_integration.archive.errors import ArchiveError
from models_integration.archive.keyring import Keyring, key_in
from models_integration.archive.manifest import ALL, Manifest, ids_digest
from models_integration.archive.store import Archive
from models_integration.cache.atomic_file import TEMPORARY
from models_integration.model.identity import ModelIdentity

MODEL = ModelIdentity("weights", "float32", "rotation", "config", "bfloat16")


def chunk(
    seed: int, tenant: str = "alice", tokens: int = 6, layers: int = 2, model: ModelIdentity = MODEL,
) -> tuple[Manifest, dict[str, Tensor]]:
    """Return the manifest and the tensors of a raw chunk."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 1000, (tokens,), generator=generator)
    tensors: dict[str, Tensor] = {"token_ids": ids}
    for layer in range(layers):
        for name in ("k", "v"):
            values = torch.randn((2, tokens, 8), generator=generator)
            tensors[f"{layer}.{name}"] = values.to(torch.bfloat16)
    manifest = Manifest(
        tenant, ids_digest(ids), tokens, "raw", 0, (), 0, tokens, "none", tuple(range(layers)), ALL,
        model, float(seed),
    )
    return manifest, tensors


ALICE, BOB, CAROL = "alice-the-tenant", "bob-the-tenant", "carol-the-tenant"
CHUNKS = {name: chunk(seed, tenant=tenant, tokens=8) for seed, (name, tenant) in enumerate(
    [("hers", ALICE), ("hers, damaged", ALICE), ("his", BOB), ("new", CAROL)]
)}
MASTER = bytes(range(32))


def blobs(folder: Path) -> list[bytes]:
    """Return the names and bytes of all files."""
    return [path.name.encode() + path.read_bytes() for path in folder.rglob("*") if path.is_file()]


def path_of(folder: Path, key: str) -> Path:
    return folder / "objects" / key[:2] / f"{key}.safetensors"


def damage(path: Path, at: int = -1) -> None:
    """Flip the last bit of one byte in a new file. The archive never modifies a stored file in place."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.unlink()
    path.write_bytes(data)


def opened(folder: Path, encrypted: bool = True, limit: int | None = None, master: bytes = MASTER) -> Archive:
    if encrypted:
        pytest.importorskip("cryptography")
    return Archive(folder, Keyring(folder / "keys", master) if encrypted else None, limit)


def failing(number: int) -> Callable[..., None]:
    """Return a function that replaces a system call and raises an error."""
    def fail(*arguments: object, **options: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@dataclass
class Case:
    """Archive with three chunks, one of them damaged, and the operation to run."""

    folder: Path
    operation: str
    encrypted: bool
    keys: dict[str, str] = field(default_factory=dict)
    """Keys of the chunks that are stored from the beginning."""
    salts: list[bytes] = field(default_factory=list)
    """Salts of her chunks in an encrypted archive."""

    def open(self) -> Archive:
        return opened(self.folder, self.encrypted)

    def prepare(self) -> None:
        """Create the archive without empty folders, because each empty folder would cause the same two calls."""
        with self.open() as archive:
            for name in ("hers", "hers, damaged"):
                self.keys[name] = archive.put(*CHUNKS[name])
            self.salts = [path.read_bytes()[:32] for path in (self.folder / "keys").glob("*")]
            self.keys["his"] = archive.put(*CHUNKS["his"])
            assert archive.get(self.keys["his"], BOB) is not None
        path = path_of(self.folder, self.keys["hers, damaged"])
        damage(path)
        self._age_hers()
        orphan = path.parent / f"{TEMPORARY}old"
        orphan.write_bytes(b"half of a chunk")
        os.utime(orphan, (1, 1))
        for shard in (self.folder / "objects").iterdir():
            if not any(shard.iterdir()):
                shard.rmdir()

    def _age_hers(self) -> None:
        """Set old times for the first tenant's files, so that the second tenant's chunk was used most recently.

        The clock of the files may not have advanced.
        """
        for name in ("hers", "hers, damaged"):
            with suppress(FileNotFoundError):
                os.utime(path_of(self.folder, self.keys[name]), (1e9, 1e9))

    def copied(self, folder: Path) -> "Case":
        """Return the case with a copy of the archive in a different folder."""
        return Case(shutil.copytree(self.folder, folder), self.operation, self.encrypted, self.keys, self.salts)

    def attempt(self, at: int, number: int, promised: Callable[[], None] = lambda: None) -> tuple[bool, list[str]]:
        """Return whether the operation completed, and the list of its calls. `promised` is called on completion."""
        done = False
        with faults(at, number) as injected:
            try:
                with self.open() as archive:
                    OPERATIONS[self.operation](archive, self.keys)
                    done = True
                    promised()
            except (ArchiveError, OSError, Killed):
                assert len(injected.calls) >= at > 0
        return done, injected.calls

    def check(self, done: bool, killed: bool = False) -> None:
        """Check the conditions after the disk works again. Then repeat the operation."""
        if self.operation == "forget" and done:
            self.assert_gone()
        litter = {path.name for path in self.folder.rglob(f"{TEMPORARY}*")} - {f"{TEMPORARY}old"}
        assert not litter or killed or self.operation in ("forget", "gc")  # These files could not be erased.
        with self.open() as archive:
            self._check_chunks(archive, done)
            OPERATIONS[self.operation](archive, self.keys)
            if self.operation == "forget":
                self.assert_gone()
            report = archive.verify()
            assert (report.foreign, report.unreadable, report.locked, report.strays) == ([], [], [], [])
            assert {*report.quarantined, *map(key_in, report.in_quarantine)} <= {self.keys["hers, damaged"]}
            assert archive.get(self.keys["his"], BOB) is not None
        if self.operation == "forget":
            self.assert_gone()
        away = {path.name for path in (self.folder / "quarantine").iterdir()}
        assert away <= {f"damaged-{self.keys['hers, damaged']}.safetensors"}

    def _check_chunks(self, archive: Archive, done: bool) -> None:
        listed = {entry.key for entry in archive.entries()}
        assert self.keys["his"] in listed
        news = listed - set(self.keys.values())
        assert all(archive.get(key, CAROL) is not None for key in news)
        assert len(news) <= (self.operation == "put")
        hers = self.keys["hers"]
        if self.operation == "put" and done:
            assert len(news) == 1
        if self.operation in ("put", "get", "verify"):
            assert hers in listed
        if self.operation in ("forget", "gc") and done:
            assert hers not in listed
        if not (self.encrypted and self.operation == "forget"):
            assert (archive.get(hers, ALICE) is not None) == (hers in listed)
        assert archive.get(self.keys["his"], BOB) is not None
        self._age_hers()

    def assert_gone(self, actual: list[bytes] | None = None) -> None:
        """Check that no token, tenant, key or salt of the first tenant remains in the folder or in the given bytes."""
        actual = blobs(self.folder) if actual is None else actual
        for name in ("hers", "hers, damaged"):
            manifest, tensors = CHUNKS[name]
            sought = [
                ALICE.encode(), self.keys[name].encode(), manifest.key.encode(), manifest.ids.encode(),
                tensors["token_ids"].numpy().tobytes(), *self.salts,
            ]
            assert not any(needle in blob for needle in sought for blob in actual)


def put(archive: Archive, keys: dict[str, str]) -> None:
    archive.put(*CHUNKS["new"])


def get(archive: Archive, keys: dict[str, str]) -> None:
    """Read one intact chunk and one damaged chunk."""
    assert archive.get(keys["his"], BOB) is not None
    assert archive.get(keys["hers, damaged"], ALICE) is None


def forget(archive: Archive, keys: dict[str, str]) -> None:
    archive.forget(ALICE)


def gc(archive: Archive, keys: dict[str, str]) -> None:
    """Set the limit to the size of one object, and collect garbage. His chunk is the latest used."""
    archive._limit = max(entry.bytes for entry in archive.entries()) * 3 // 2
    archive.gc()


def verify(archive: Archive, keys: dict[str, str]) -> None:
    """Verify the archive. An object that could not be read is reported and not removed."""
    archive.verify()


OPERATIONS: dict[str, Callable[[Archive, dict[str, str]], None]] = {
    "put": put, "get": get, "forget": forget, "gc": gc, "verify": verify,
}
