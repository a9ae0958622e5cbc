"""The archive: one file for each chunk.

The name of the file is a hash of the inputs, and each read checks the contents.

The archive has no index besides the files. So the archive cannot detect deleted files.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from models_integration.archive.errors import ArchiveError, ForeignVersion, KeyUnavailable, NotEncrypted, named_errors
from models_integration.archive.keyring import CLEAR, Cipher, Keyring, check_tenant, is_of, is_sealed, key_in
from models_integration.archive.manifest import Manifest, check_input, check_model
from models_integration.archive.object_folder import File, ObjectFolder
from models_integration.archive.objects import Claim, key_for, pieces, read_claim, read_object, stated_owner
from models_integration.cache.tensor_file import Damaged
from models_integration.model.identity import ModelIdentity
from spec.errors import SpecError

__all__ = ["Archive", "Entry", "Report", "Stored"]


class Entry(NamedTuple):
    """Header of a stored object. The tenant and the tokens of an encrypted object are unknown."""

    key: str
    tenant: str | None
    tokens: int | None
    bytes: int
    created: float


class Stored(NamedTuple):
    """Contents of a stored object."""

    manifest: Manifest
    tensors: dict[str, Tensor]


@dataclass
class Report:
    """Problems that `Archive.verify` found: keys of objects, or paths inside the archive."""

    read: int = 0
    quarantined: list[str] = field(default_factory=list)
    """Damaged objects. This check has moved them to the quarantine, if the disk can be written."""
    in_quarantine: list[str] = field(default_factory=list)
    """Files that were in the quarantine before this check."""
    foreign: list[str] = field(default_factory=list)
    """Objects with a different format or specification version."""
    locked: list[str] = field(default_factory=list)
    """Encrypted objects that were not read, because the key is missing."""
    clear: list[str] = field(default_factory=list)
    """Unencrypted objects in an encrypted archive."""
    unreadable: list[str] = field(default_factory=list)
    """Objects that the file system cannot read."""
    strays: list[str] = field(default_factory=list)
    """Files whose names are not names of objects, and salts that do not fit this master key."""

    @property
    def clean(self) -> bool:
        """Return True if there are no problems."""
        return not any(value for value in vars(self).values() if isinstance(value, list))


class Archive(AbstractContextManager["Archive"]):
    """Folder of stored chunks, which several threads and processes can use at the same time.

    With a `keyring`, each object is encrypted with the key of its tenant. If an archive ever had an encrypted object,
    the archive neither stores nor returns unencrypted objects. `limit` is the largest total size of objects and
    quarantine in bytes. If a `put` exceeds the limit, the archive deletes the quarantine first, then the least recently
    used objects, by the modification times of the files.

    Raises:
        SpecError: if the limit is below 1.
        ArchiveError, OSError: if the folder cannot be created.
    """

    def __init__(self, folder: Path, keyring: Keyring | None = None, limit: int | None = None) -> None:
        if limit is not None and limit < 1:
            raise SpecError("limit", limit, "must be at least 1 byte")
        self.folder, self._keyring, self._limit = folder, keyring, limit
        self._files = ObjectFolder(folder)
        self._objects = _ProvedObjects(self._files, keyring)

    def __exit__(self, *error: object) -> None:
        """Leave the context. No file stays open between calls."""

    def put(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> str:
        """Store a chunk and return its key. An undamaged object with the same key is not written again.

        Raises:
            SpecError: if the name of the tenant is invalid, or if the chunk is larger than the limit. Also if the
                manifest or the tensors cannot be stored.
            ArchiveError, OSError: if the write fails. Either nothing has changed, or the chunk is stored completely.
            KeyUnavailable: if the master key is missing or does not fit the keys of the tenants, or if the tenant is
                deleted at the same time.
        """
        check_input(manifest, tensors)
        cipher = self._objects.cipher(manifest.tenant, create=True)
        key = key_for(manifest, cipher)
        if self._objects.is_whole(key, manifest.tenant):
            self._files.keep(key)
            self._files.touch(key)
        else:
            parts, digest = pieces(manifest, tensors, cipher)
            size = sum(map(len, parts))
            if self._limit is not None and size > self._limit:
                raise SpecError("tensors", size, f"must fit the archive's limit of {self._limit} bytes")
            self._files.publish(self._files.path(key), parts, digest)
            with suppress(ArchiveError, OSError):  # the chunk is stored; the next put makes room again
                self._fit(key)
        if cipher is not None and key_for(manifest, self._objects.cipher(manifest.tenant)) != key:
            raise KeyUnavailable("the tenant was forgotten, and has a new key, while the chunk was put")
        if not self._files.path(key).exists():
            raise ArchiveError(f"the chunk {key} was removed by another process while it was put")
        return key

    def get(self, key: str, tenant: str, model: ModelIdentity | None = None, use: bool = True) -> Stored | None:
        """Return a chunk of the tenant after a check of its contents, or None if the chunk is missing or damaged.

        A damaged object is moved to `quarantine`. If `model` is given, the chunk must belong to this model. The key of
        a different tenant always gives None, whether the object exists or not. If `use` is False, `gc` does not count
        this read as a use.

        Raises:
            SpecError: if the name of the tenant is invalid.
            WrongModel, OtherDtype, OtherFrequencies: if `model` cannot read the chunk.
            ForeignVersion: if the object has a different format or specification version.
            KeyUnavailable: if the object is encrypted, and the key of the tenant is missing or has a different salt.
            NotEncrypted: if the object is unencrypted in an encrypted archive.
            ArchiveError, OSError: if the file system fails. The chunk may exist.
        """
        check_tenant(tenant)
        if not self._objects.is_of(key, tenant):
            self._objects.check_opens(key)
            return None
        file = self._files.describe(self._files.path(key))
        try:
            stored = self._objects.read(key, tenant)
        except FileNotFoundError:
            return self.get(key, tenant, model, use) if self._restored(key) else None
        except Damaged:
            if self._was_replaced(key, file):
                return self.get(key, tenant, model, use)
            self._quarantine(key, file)
            return None
        if use:
            self._files.touch(key)
        if model is not None:
            check_model(stored.manifest.model, model)
        return stored

    def entries(self, tenant: str | None = None) -> list[Entry]:
        """Return the headers of all objects, or of the objects of one tenant, in order of creation.

        This method reads only the headers and checks no contents. Objects whose header is damaged, has a different
        version or is unencrypted in an encrypted archive are left out. `verify` reports these objects.

        Raises:
            SpecError: if the name of the tenant is invalid.
            OSError: if the file system fails.
        """
        if tenant is not None:
            check_tenant(tenant)
        keys = (key for key in self._files.object_keys() if tenant is None or self._objects.is_of(key, tenant))
        entries = [entry for key in keys if (entry := self._objects.entry(key)) is not None]
        return sorted(entries, key=lambda entry: (entry.created, entry.key))

    def verify(self) -> Report:
        """Read and check every object, and move damaged objects to the quarantine.

        This method cannot detect deleted objects. The hash of an unencrypted object needs no key, so the hash does not
        prove who wrote the object.
        """
        with suppress(OSError):  # a medium that cannot be written
            self._files.restore_all()
        report = Report(strays=self._files.strays(), unreadable=self._files.set_aside())
        report.in_quarantine = [self._files.name(path) for path in self._files.in_quarantine()]
        if self._keyring is not None:
            report.strays += [f"{self._keyring.folder.name}/{name}" for name in self._keyring.strays()]
        for key in self._files.object_keys():
            self._judge(key, report)
        return report

    def gc(self) -> list[str]:
        """Delete unfinished temporary files, then objects until the archive fits `limit`.

        Return the deleted keys or paths.

        Raises:
            ArchiveError, OSError: if the file system fails.
        """
        with named_errors(self.folder):
            self._files.restore_all()
            for path in self._files.orphans():
                self._files.erase(path)
        return self._fit()

    def forget(self, tenant: str) -> int:
        """Delete the key of the tenant, and overwrite all objects of the tenant. Return the number of objects.

        Damaged and unfinished objects of the tenant are included. Files that belong to no key and have no readable
        header are deleted too. If an error occurs, the remaining files are still deleted, and a second call continues.

        Raises:
            SpecError: if the name of the tenant is invalid.
            KeyUnavailable: if the archive is encrypted and the master key is missing. Nothing has changed.
            ArchiveError, OSError: the first error of the file system.
        """
        check_tenant(tenant)
        self._objects.check_knows(tenant)
        failed: list[Exception] = []
        try:
            if self._keyring is not None:
                self._keyring.destroy(tenant)
        except (ArchiveError, OSError) as error:
            failed.append(error)
        self._files.erase_all(self._files.leftovers(), failed)
        gone = 0
        # Again until nothing is found: a reader may move a damaged object meanwhile.
        while paths := [path for path in self._files.everything() if self._objects.holds(path, tenant)]:
            gone += self._files.erase_all(paths, failed)
            if failed:
                break
        if failed:
            raise failed[0]
        return gone

    def _fit(self, newest: str | None = None) -> list[str]:
        """Erase the quarantine and the least recently used objects beyond the limit, not the newest."""
        files = [] if self._limit is None else self._files.by_use()
        total, gone = sum(size for _, _, size in files), []
        for name, path, size in files:
            if self._limit is None or total <= self._limit:
                break
            if name != newest:
                self._files.erase(path)
                gone.append(name)
                total -= size
        return gone

    def _judge(self, key: str, report: Report) -> None:
        """Verify an object, and add the result to the report."""
        try:
            file = self._files.describe(self._files.path(key))
            self._objects.prove(key)
        except ForeignVersion:
            report.foreign.append(key)
        except NotEncrypted:
            report.clear.append(key)
        except KeyUnavailable:
            report.locked.append(key)
        except Damaged:
            if self._was_replaced(key, file):
                return self._judge(key, report)
            self._quarantine(key, file)
            report.quarantined.append(key)
        except FileNotFoundError:
            pass  # erased meanwhile
        except OSError:
            report.unreadable.append(key)
        else:
            report.read += 1

    def _was_replaced(self, key: str, file: File | None) -> bool:
        """Return True if a different process has replaced the object since it was read."""
        return self._files.describe(self._files.path(key)) not in (None, file)

    def _restored(self, key: str) -> bool:
        """Put back a file that a killed reader had set aside, and return True if there was one.

        Raises:
            ArchiveError, OSError: if the file, which may be an undamaged object, cannot be put back.
        """
        with named_errors(self._files.path(key)):
            return self._files.restore(key)

    def _quarantine(self, key: str, file: File | None) -> None:
        """Move a damaged object to the quarantine. If the folder is read-only, the object stays, and reads miss it."""
        with suppress(OSError):
            self._files.put_away(key, file)


class _ProvedObjects:
    """Objects of a folder, with checks of their tenants and of their integrity under the keys of a ring."""

    def __init__(self, files: ObjectFolder, keyring: Keyring | None) -> None:
        self._files, self._keyring = files, keyring

    @property
    def encrypted(self) -> bool:
        """Return True if unencrypted objects raise NotEncrypted."""
        return self._keyring is not None or self._files.has_keys

    def cipher(self, tenant: str, create: bool = False) -> Cipher | None:
        """Return the cipher of a tenant, or None in an unencrypted archive. Errors are those of `Keyring.cipher`."""
        if self._keyring is not None:
            return self._keyring.cipher(tenant, create)
        if create and self.encrypted:
            raise KeyUnavailable("the archive is encrypted, and no master key is given")
        return None

    def is_of(self, key: str, tenant: str) -> bool:
        """Return True if the key has the digits of the tenant."""
        if is_sealed(key):
            return self._keyring is not None and self._keyring.is_of(key, tenant)
        return is_of(key, tenant.encode(), CLEAR)

    def check_opens(self, key: str) -> None:
        """Check the master key before an encrypted object of a different tenant is reported as a miss.

        Raises:
            KeyUnavailable: if there is no master key, or a wrong one, for existing and missing objects alike.
        """
        if is_sealed(key) and key_in(key) == key:
            if self._keyring is None:
                raise KeyUnavailable("the object is encrypted, and no key is given")
            self._keyring.check_master()

    def check_knows(self, tenant: str) -> None:
        """Check that the encrypted objects of the tenant can be recognised.

        Raises:
            KeyUnavailable: if there is no master key, a wrong one, or one that neither a salt nor an object proves.
        """
        sealed = [key for key in self._files.object_keys() if is_sealed(key)]
        if self._keyring is None:
            if sealed or self.encrypted:
                raise KeyUnavailable("the archive is encrypted: its master key alone tells whose the objects are")
            return
        self._keyring.check_master()
        if sealed and not self._keyring.opens_any and not any(self.is_of(key, tenant) for key in sealed):
            raise KeyUnavailable("no salt and no object of the tenant is here, which would prove the master key")

    def read(self, key: str, tenant: str) -> Stored:
        """Read an object of a tenant. The errors are the errors of `read_object`, and NotEncrypted."""
        return self._read(key, lambda _: self.cipher(tenant))

    def is_whole(self, key: str, tenant: str) -> bool:
        """Return True if `read` would return an object."""
        try:
            self.read(key, tenant)
        except (Damaged, ForeignVersion, KeyUnavailable, OSError):
            return False
        return True

    def prove(self, key: str) -> None:
        """Check an object of any tenant. Errors are those of `read`."""
        ring = self._keyring
        self._read(key, lambda claim: None if ring is None else ring.cipher_of(key, claim.nonce, claim.mark))

    def entry(self, key: str) -> Entry | None:
        """Return the description of an object from its header, or None if `read` could not return the object.

        Raises:
            OSError: if the file cannot be read.
        """
        path = self._files.path(key)
        try:
            file, claim = self._files.describe(path), read_claim(path)
        except (Damaged, ForeignVersion, FileNotFoundError):
            return None
        if file is None or claim.key != key or (self.encrypted and not is_sealed(key)):
            return None
        return Entry(key, claim.tenant, claim.tokens, file.bytes, claim.created)

    def holds(self, path: Path, tenant: str) -> bool:
        """Return True if the name or the header of a file names the tenant, or if neither names any tenant."""
        key = key_in(path.name)
        if key is not None and self.is_of(key, tenant):
            return True
        try:
            stated, stated_key = stated_owner(path)
        except (Damaged, OSError):
            return key is None
        return stated == tenant or (stated_key is not None and self.is_of(stated_key, tenant))

    def _read(self, key: str, cipher: Callable[[Claim], Cipher | None]) -> Stored:
        if self.encrypted and not is_sealed(key):
            raise NotEncrypted(f"the archive is encrypted, and the chunk {key} is not: put its text again")
        return Stored(*read_object(self._files.path(key), key, cipher))
