"""The archive: one file per chunk, found by the hash of what it was computed from, proved whenever it is read.

The objects are what counts; the list is made from them. Publishing lists last, erasing lists last: wherever either is
cut off, the next opening finds what is there.
"""

import os
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from torch import Tensor

from models_integration.archive.catalogue import Catalogue, Entry
from models_integration.archive.errors import ArchiveError, ForeignVersion, KeyUnavailable, named_errors
from models_integration.archive.keyring import Cipher, Keyring
from models_integration.archive.names import CLEAR, check_tenant, is_of, is_sealed, key_in
from models_integration.archive.object_folder import ObjectFolder
from models_integration.archive.objects import (
    Manifest,
    check_input,
    check_model,
    key_for,
    pieces,
    read_claim,
    read_object,
    stated_owner,
)
from models_integration.cache.tensor_file import Damaged
from models_integration.model.identity import ModelIdentity
from spec.errors import SpecError

__all__ = ["Archive", "Report", "Stored"]


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
    unreadable: list[str] = field(default_factory=list)
    """The file system does not give their bytes."""
    catalogue_intact: bool = True

    @property
    def clean(self) -> bool:
        """Whether there is nothing to say."""
        return self.catalogue_intact and not any(
            (self.quarantined, self.unlisted, self.lost, self.foreign, self.closed, self.unreadable)
        )


class Archive(AbstractContextManager["Archive"]):
    """A folder of archived chunks. One instance belongs to one thread; processes share the folder.

    With a `keyring`, new objects are encrypted under their tenant's key. `limit` bounds the bytes of all objects:
    the least recently used go first. Opening repairs the list: what a writer that was killed published is found, and
    `repaired` says what was missing or lost. On a medium that cannot be written, the list is made in memory.

    Raises:
        SpecError: for a limit below 1.
        ArchiveError, OSError: for a folder that cannot be made.
    """

    def __init__(self, folder: Path, keyring: Keyring | None = None, limit: int | None = None) -> None:
        if limit is not None and limit < 1:
            raise SpecError("limit", limit, "must be at least 1 byte")
        self.folder, self._keyring, self._limit = folder, keyring, limit
        self._files = ObjectFolder(folder)
        self._objects = _ProvedObjects(self._files, keyring)
        self._catalogue = Catalogue(folder)
        try:
            self.repaired = self._reconcile()
        except BaseException:
            self._catalogue.close()
            raise
        self.repaired.catalogue_intact = not self._catalogue.damaged

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Seal the list; a second call does nothing."""
        self._catalogue.close()

    def put(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> str:
        """Publish a chunk and list it; its key. An object of the same key stays as it is, unless it is damaged.

        Raises:
            SpecError: for a tenant's name, a manifest or tensors that no object can have, or a chunk larger than the
                limit.
            ArchiveError, OSError: and nothing has changed; or the next opening lists the chunk.
            KeyUnavailable: for another master key than the tenants'.
        """
        check_input(manifest, tensors)
        cipher = self._objects.cipher(manifest.tenant, create=True)
        key = key_for(manifest, cipher)
        path = self._files.path(key)
        if self._objects.is_whole(key, manifest.tenant):
            self._catalogue.add([_listed(key, manifest, path.stat().st_size)])
            self._catalogue.note_use(key)
        else:
            parts, digest = pieces(manifest, tensors, cipher)
            size = sum(map(len, parts))
            if self._limit is not None and size > self._limit:
                raise SpecError("tensors", size, f"must fit the archive's limit of {self._limit} bytes")
            self._catalogue.make_room()
            try:
                self._files.publish(path, parts, digest)
                self._catalogue.add([_listed(key, manifest, size)])
            except BaseException:
                self._take_back(key)
                raise
            with suppress(ArchiveError, OSError):  # the chunk is stored; the next put makes room again
                self._fit()
        if not path.exists():
            raise ArchiveError(f"the chunk {key} was removed by another process while it was put")
        return key

    def get(self, key: str, tenant: str, model: ModelIdentity | None = None) -> Stored | None:
        """A chunk of the tenant, proved; None where there is none, or where its bytes are not those written.

        A damaged object is moved to `quarantine`. With `model`, another model's chunk is refused. Another tenant's key
        is a miss by its digits alone, whether or not there is such an object.

        Raises:
            SpecError: for what is no tenant's name.
            WrongModel, OtherDtype, OtherFrequencies: for a chunk that `model` cannot read.
            ForeignVersion: for an object of another version of the format or the specification.
            KeyUnavailable: for an encrypted object's key without the tenant's.
        """
        check_tenant(tenant)
        if not self._objects.is_of(key, tenant):
            self._objects.check_opens(key)
            return None
        try:
            stored = self._objects.read(key, tenant)
        except FileNotFoundError:
            return None
        except Damaged:
            self._quarantine(key)
            return None
        self._catalogue.note_use(key)
        if model is not None:
            check_model(stored.manifest.model, model)
        return stored

    def entries(self, tenant: str | None = None) -> list[Entry]:
        """The list, in order of creation; of one tenant, if one is named."""
        if tenant is None:
            return self._catalogue.entries()
        check_tenant(tenant)
        return [entry for entry in self._catalogue.entries() if self._objects.is_of(entry.key, tenant)]

    def verify(self) -> Report:
        """Read and prove every object, and compare the list with the folder. Damaged objects go to quarantine."""
        report = Report(catalogue_intact=self._catalogue.intact())
        known, found = {entry.key for entry in self.entries()}, self._files.keys()
        report.unlisted = [key for key in found if key not in known]
        report.lost = sorted(known - set(found))
        for key in found:
            self._judge(key, report)
        return report

    def gc(self) -> list[str]:
        """Erase temporary files that writers left, and the least recently used objects beyond the limit; their keys.

        Raises:
            ArchiveError, OSError: from the file system; what was erased is off the list.
        """
        with named_errors(self.folder):
            for path in self._files.orphans():
                self._files.erase(path)
        return self._fit()

    def forget(self, tenant: str) -> int:
        """Destroy the tenant's key and every byte of its objects, damaged and unfinished ones too; how many.

        What stands under no key and says nothing is erased with them. After an error the rest is erased all the same,
        and a second call goes on.

        Raises:
            SpecError: for what is no tenant's name.
            ArchiveError, OSError: the first of the file system.
        """
        check_tenant(tenant)
        failed: list[Exception] = []
        try:
            if self._keyring is not None:
                self._keyring.destroy(tenant)
        except (ArchiveError, OSError) as error:
            failed.append(error)
        gone, names = 0, set[str | None]()
        # Again until nothing is found: a reader may move a damaged object meanwhile.
        while paths := [path for path in self._files.everything() if self._objects.holds(path, tenant)]:
            names.update(key_in(path.name) for path in paths)
            gone += self._files.erase_all(paths, failed)
            if failed:
                break
        # Another tenant's object goes too, where its file had come to hold this one's bytes.
        self._catalogue.remove(lambda entry: self._objects.is_of(entry.key, tenant) or self._erased(entry.key, names))
        if failed:
            raise failed[0]
        return gone

    def _fit(self) -> list[str]:
        """Erase the least recently used objects beyond the limit."""
        if self._limit is None:
            return []
        entries = self._catalogue.by_use()
        total, gone = sum(entry.bytes for entry in entries), []
        try:
            for entry in entries:
                if total <= self._limit:
                    break
                gone.append(entry.key)
                self._files.erase_object(entry.key)
                total -= entry.bytes
        finally:
            self._unlist(gone)
        return gone

    def _reconcile(self) -> Report:
        """List what is in the folder and nothing else."""
        report, known, found = Report(), {entry.key for entry in self._catalogue.entries()}, self._files.keys()
        proved = [self._judge(key, report) for key in self._files.by_age(set(found) - known)]
        entries = [entry for entry in proved if entry is not None]
        report.lost = sorted(known - set(found))
        report.unlisted = sorted(entry.key for entry in entries)
        with suppress(ArchiveError, OSError):  # it is said in `repaired`, and the next opening tries again
            if entries:
                self._catalogue.add(entries)
            self._unlist(report.lost)
        return report

    def _judge(self, key: str, report: Report) -> Entry | None:
        """Prove an object, and note what was found; how it is to be listed."""
        try:
            entry, proved = self._objects.entry(key)
        except ForeignVersion:
            report.foreign.append(key)
        except Damaged:
            self._quarantine(key)
            report.quarantined.append(key)
        except FileNotFoundError:
            return None  # erased meanwhile
        except OSError:
            report.unreadable.append(key)
        else:
            report.read += proved
            if not proved:
                report.closed.append(key)
            return entry
        return None

    def _quarantine(self, key: str) -> None:
        """Put a damaged object away; where nothing can be written, it stays, and is a miss whenever it is read."""
        with suppress(ArchiveError, OSError):
            if self._files.put_away(key):
                self._unlist([key])

    def _unlist(self, keys: list[str]) -> None:
        if keys:
            self._catalogue.remove(lambda entry: self._erased(entry.key, keys))

    def _erased(self, key: str, names: Collection[str | None]) -> bool:
        return key in names and not os.path.lexists(self._files.path(key))

    def _take_back(self, key: str) -> None:
        """Erase a chunk that could not be listed, unless another process has listed it."""
        with suppress(ArchiveError, OSError), self._catalogue.unlisted(key) as unlisted:
            if unlisted:
                self._files.erase(self._files.path(key))


class _ProvedObjects:
    """Whose the objects of a folder are, and whether they are whole, under the keys of a ring."""

    def __init__(self, files: ObjectFolder, keyring: Keyring | None) -> None:
        self._files, self._keyring = files, keyring

    def cipher(self, tenant: str, create: bool = False) -> Cipher | None:
        """The tenant's, or None without a key ring; errors as of `Keyring.cipher`."""
        return None if self._keyring is None else self._keyring.cipher(tenant, create)

    def is_of(self, key: str, tenant: str) -> bool:
        """Whether a key is the tenant's; told by its digits."""
        if is_sealed(key):
            return self._keyring is not None and self._keyring.is_of(key, tenant)
        return is_of(key, tenant.encode(), CLEAR)

    def check_opens(self, key: str) -> None:
        """An encrypted object's key that is not the tenant's may be that of another ring, or there is none.

        Raises:
            KeyUnavailable: if so; whether there is such an object makes no difference.
        """
        if is_sealed(key) and key_in(key) == key:
            if self._keyring is None:
                raise KeyUnavailable("the object is encrypted, and no key is given")
            self._keyring.check_master()

    def read(self, key: str, tenant: str) -> Stored:
        """A tenant's object; errors as of `read_object`."""
        return self._read(key, lambda: self.cipher(tenant))

    def is_whole(self, key: str, tenant: str) -> bool:
        """Whether there is an object that `read` would give."""
        try:
            self.read(key, tenant)
        except (Damaged, ForeignVersion, OSError):
            return False
        return True

    def entry(self, key: str) -> tuple[Entry, bool]:
        """An object as it is to be listed, and whether it was proved; only for want of a key it may not be.

        Raises:
            Damaged, ForeignVersion, OSError: as `read_object`.
        """
        path = self._files.path(key)
        size = os.lstat(path).st_size
        try:
            manifest = self._read(key, lambda: None if self._keyring is None else self._keyring.cipher_of(key)).manifest
        except KeyUnavailable:
            claim = read_claim(path)
            if claim.key != key or claim.tenant is not None:
                raise Damaged("it is another chunk") from None
            return Entry(key, None, None, size, claim.created), False
        return _listed(key, manifest, size), True

    def holds(self, path: Path, tenant: str) -> bool:
        """Whether a file is the tenant's by its name or by what it says; or nobody's, having no key and saying nothing.
        """
        key = key_in(path.name)
        if key is not None and self.is_of(key, tenant):
            return True
        try:
            stated, stated_key = stated_owner(path)
        except (Damaged, OSError):
            return key is None
        return stated == tenant or (stated_key is not None and self.is_of(stated_key, tenant))

    def _read(self, key: str, cipher: Callable[[], Cipher | None]) -> Stored:
        name, manifest, tensors = read_object(self._files.path(key), cipher)
        if name != key:
            raise Damaged("it is another chunk")
        return Stored(manifest, tensors)


def _listed(key: str, manifest: Manifest, size: int) -> Entry:
    """An object's row: of an encrypted one, the list says nothing that its file does not."""
    if is_sealed(key):
        return Entry(key, None, None, size, manifest.created)
    return Entry(key, manifest.tenant, manifest.tokens, size, manifest.created)
