"""The archive: one file per chunk, found by the hash of what it was computed from, proved whenever it is read."""

import hashlib
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from torch import Tensor

from models_integration.archive.catalogue import Catalogue, Entry
from models_integration.archive.errors import ForeignVersion, KeyUnavailable, named_errors
from models_integration.archive.keyring import Cipher, Keyring
from models_integration.archive.objects import Manifest, check_model, pieces, read_manifest, read_object
from models_integration.cache.atomic_file import TEMPORARY, erase, publish, sync
from models_integration.cache.tensor_file import Damaged
from models_integration.model.identity import ModelIdentity
from spec.errors import SpecError

__all__ = ["Archive", "Report", "Stored"]

SUFFIX = ".safetensors"
ORPHAN_SECONDS = 3600.0
UNKNOWN = "unknown"


class Stored(NamedTuple):
    """What an object holds."""

    manifest: Manifest
    tensors: dict[str, Tensor]


@dataclass
class Report:
    """What a check of everything found."""

    read: int = 0
    quarantined: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    unlisted: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    """Encrypted, and not read: the key is not here."""
    catalogue_intact: bool = True

    @property
    def clean(self) -> bool:
        """Whether there is nothing to say."""
        return self.catalogue_intact and not any(
            (self.quarantined, self.unlisted, self.lost, self.foreign, self.closed)
        )


class Archive:
    """A folder of archived chunks. One instance belongs to one thread; processes share the folder.

    With a `keyring`, new objects are encrypted under their tenant's key. `limit` bounds the bytes of all objects:
    the least recently used go first. Opening repairs the list: what a writer that was killed published is found, and
    `repaired` says what was missing or lost.
    """

    def __init__(self, folder: Path, keyring: Keyring | None = None, limit: int | None = None) -> None:
        if limit is not None and limit < 1:
            raise SpecError("limit", limit, "must be at least 1 byte")
        self.folder, self._keyring, self._limit = folder, keyring, limit
        with named_errors(folder):
            if not (folder / "objects").is_dir():
                for shard in range(256):  # now, or each first object of a shard would wait for two more folders
                    (folder / "objects" / f"{shard:02x}").mkdir(parents=True, exist_ok=True, mode=0o700)
                sync(folder / "objects")
        self._catalogue = Catalogue(folder)
        self.repaired = self._reconcile()
        self.repaired.catalogue_intact = not self._catalogue.damaged

    def __enter__(self) -> "Archive":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Seal the list."""
        self._catalogue.close()

    def put(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> str:
        """Publish a chunk and list it; its key. An object of the same key stays as it is.

        Raises:
            SpecError: for a chunk larger than the limit.
            ArchiveFull, ArchiveReadOnly: and nothing has changed.
            KeyUnavailable: for another master key than the tenant's.
        """
        key = manifest.key
        path = self._path(key)
        if path.exists():
            _touch(path)
            return key
        parts, digest = pieces(manifest, tensors, self._cipher(manifest.tenant, create=True))
        size = sum(map(len, parts))
        if self._limit is not None and size > self._limit:
            raise SpecError("tensors", size, f"must fit the archive's limit of {self._limit} bytes")
        with named_errors(path):
            publish(path, parts, late=digest)
        self._catalogue.add([Entry.of(manifest, size)])
        if self._limit is not None:
            self.gc()
        return key

    def get(self, key: str, tenant: str, model: ModelIdentity | None = None) -> Stored | None:
        """A chunk of the tenant, proved; None where there is none, or where its bytes are not those written.

        A damaged object is moved to `quarantine`. With `model`, another model's chunk is refused.

        Raises:
            WrongModel, OtherDtype, OtherFrequencies: for a chunk that `model` cannot read.
            ForeignVersion: for an object of another version of the format or the specification.
            KeyUnavailable: for an encrypted object of a tenant without a key.
        """
        path = self._path(key)
        try:
            stored = Stored(*read_object(path, lambda: self._cipher(tenant)))
            if stored.manifest.key != key:
                raise Damaged("it is another chunk")
        except FileNotFoundError:
            return None
        except Damaged:
            if not self._is_of_another(key, tenant):
                self._quarantine(key)
            return None
        except KeyUnavailable:
            if self._is_of_another(key, tenant):
                return None
            raise
        if stored.manifest.tenant != tenant:
            return None
        _touch(path)
        if model is not None:
            check_model(stored.manifest.model, model)
        return stored

    def entries(self, tenant: str | None = None) -> list[Entry]:
        """The list, in order of creation."""
        return self._catalogue.entries(tenant)

    def verify(self) -> Report:
        """Read and prove every object, and compare the list with the folder. Damaged objects go to quarantine."""
        report = Report(catalogue_intact=self._catalogue.intact())
        listed = {entry.key: entry for entry in self.entries()}
        for key in self._keys():
            if key not in listed:
                report.unlisted.append(key)
            try:
                self.get(key, listed[key].tenant if key in listed else _claimed_tenant(self._path(key)) or "")
                report.read += 1
            except ForeignVersion:
                report.foreign.append(key)
            except KeyUnavailable:
                report.closed.append(key)
            if not self._path(key).exists():
                report.quarantined.append(key)
        report.lost = [key for key in listed if not self._path(key).exists() and key not in report.quarantined]
        return report

    def gc(self) -> list[str]:
        """Remove temporary files that writers left, and the least recently used objects beyond the limit; their keys.
        """
        with named_errors(self.folder):
            for path in self._temporaries():
                if _modified(path) < (time.time() - ORPHAN_SECONDS) * 1e9:
                    path.unlink(missing_ok=True)
        if self._limit is None:
            return []
        entries = {entry.key: entry for entry in self.entries()}
        total, gone = sum(entry.bytes for entry in entries.values()), []
        for key in sorted(entries, key=lambda key: (_modified(self._path(key)), key)):
            if total <= self._limit:
                break
            total -= entries[key].bytes
            gone.append(key)
            self._catalogue.remove([key])
            self._path(key).unlink(missing_ok=True)
        return gone

    def forget(self, tenant: str) -> int:
        """Destroy the tenant's key and every byte of its objects, damaged and unfinished ones too; how many.

        Damaged objects that nobody can tell the tenant of are erased with them.
        """
        if self._keyring is not None:
            self._keyring.destroy(tenant)
        listed = {entry.key for entry in self.entries(tenant)}
        paths = [self._path(key) for key in self._keys() if key in listed or _claimed_tenant(self._path(key)) == tenant]
        paths += [path for path in self._temporaries() if _claimed_tenant(path) == tenant]
        for name in (_name_of(tenant), UNKNOWN):
            paths += (self.folder / "quarantine").glob(f"{name}-*")
        self._catalogue.remove(listed)
        self._catalogue.forget()
        for path in paths:
            with named_errors(path):
                erase(path)
        return len(paths)

    def _reconcile(self) -> Report:
        """List what is in the folder and nothing else."""
        listed = {entry.key for entry in self.entries()}
        report, found = Report(), set(self._keys())
        for key in sorted(found - listed):
            try:
                manifest = read_manifest(self._path(key))
            except ForeignVersion:
                report.foreign.append(key)
            except Damaged:
                self._quarantine(key)
                report.quarantined.append(key)
            except FileNotFoundError:
                continue  # forgotten meanwhile
            else:
                self._catalogue.add([Entry.of(manifest, self._path(key).stat().st_size)])
                report.unlisted.append(key)
        report.lost = sorted(listed - found)
        self._catalogue.remove(report.lost)
        return report

    def _quarantine(self, key: str) -> None:
        owners = [entry.tenant for entry in self.entries() if entry.key == key]
        name = _name_of(owners[0]) if owners else UNKNOWN
        with named_errors(self.folder):
            (self.folder / "quarantine").mkdir(exist_ok=True, mode=0o700)
            try:
                os.replace(self._path(key), self.folder / "quarantine" / f"{name}-{key}{SUFFIX}")
            except FileNotFoundError:
                return  # another reader was first, or it was forgotten
        self._catalogue.remove([key])

    def _is_of_another(self, key: str, tenant: str) -> bool:
        """Whether the object says, and its key confirms, that it is another tenant's: no damage, only not yours."""
        try:
            claim = read_manifest(self._path(key))
        except (Damaged, ForeignVersion, OSError):
            return False
        return claim.key == key and claim.tenant != tenant

    def _cipher(self, tenant: str, create: bool = False) -> Cipher | None:
        return None if self._keyring is None else self._keyring.cipher(tenant, create)

    def _path(self, key: str) -> Path:
        return self.folder / "objects" / key[:2] / f"{key}{SUFFIX}"

    def _keys(self) -> list[str]:
        return sorted(path.stem for path in (self.folder / "objects").glob(f"*/[!.]*{SUFFIX}"))

    def _temporaries(self) -> list[Path]:
        return list(self.folder.glob(f"**/{TEMPORARY}*"))


def _claimed_tenant(path: Path) -> str | None:
    try:
        return read_manifest(path).tenant
    except (Damaged, ForeignVersion, OSError):
        return None


def _name_of(tenant: str) -> str:
    return hashlib.sha256(tenant.encode()).hexdigest()[:16]


def _modified(path: Path) -> int:
    """Nanoseconds; 0 for a file that is gone."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _touch(path: Path) -> None:
    """Note the use; a medium that cannot be written is read all the same."""
    with suppress(OSError):
        os.utime(path)
