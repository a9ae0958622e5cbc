"""The archive: one file per chunk, found by the hash of what it was computed from, proved whenever it is read.

There is no list: the files are the archive. So nothing says that an object was deleted by somebody else.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from torch import Tensor

from models_integration.archive.errors import (
    ArchiveError,
    ForeignVersion,
    KeyUnavailable,
    NotEncrypted,
    named_errors,
)
from models_integration.archive.keyring import Cipher, Keyring
from models_integration.archive.manifest import Manifest, check_input, check_model
from models_integration.archive.names import CLEAR, check_tenant, is_of, is_sealed, key_in
from models_integration.archive.object_folder import File, ObjectFolder
from models_integration.archive.objects import Claim, key_for, pieces, read_claim, read_object, stated_owner
from models_integration.cache.tensor_file import Damaged
from models_integration.model.identity import ModelIdentity
from spec.errors import SpecError

__all__ = ["Archive", "Entry", "Report", "Stored"]


class Entry(NamedTuple):
    """One object as its header describes it. Of an encrypted one, tenant and tokens are not known."""

    key: str
    tenant: str | None
    tokens: int | None
    bytes: int
    created: float


class Stored(NamedTuple):
    """What an object holds."""

    manifest: Manifest
    tensors: dict[str, Tensor]


@dataclass
class Report:
    """What a check of everything found: keys of objects, or paths inside the archive."""

    read: int = 0
    quarantined: list[str] = field(default_factory=list)
    """Damaged, and moved to the quarantine by this check, if the medium can be written."""
    in_quarantine: list[str] = field(default_factory=list)
    """Files that were in the quarantine before."""
    foreign: list[str] = field(default_factory=list)
    """Of another version of the format or of the specification."""
    locked: list[str] = field(default_factory=list)
    """Encrypted, and not read: the key is not here."""
    clear: list[str] = field(default_factory=list)
    """Not encrypted, in an encrypted archive."""
    unreadable: list[str] = field(default_factory=list)
    """The file system does not give their bytes."""
    strays: list[str] = field(default_factory=list)
    """Files among the objects that are none by their names, and salts that make no key under this master key."""

    @property
    def clean(self) -> bool:
        """Whether nothing was found."""
        return not any(value for value in vars(self).values() if isinstance(value, list))


class Archive(AbstractContextManager["Archive"]):
    """A folder of archived chunks, which threads and processes share.

    With a `keyring`, objects are encrypted under their tenant's key; an archive in which something was ever encrypted
    takes and gives no others. `limit` bounds the bytes of all objects and of the quarantine: when a put exceeds the
    limit, the quarantine goes first, then the least recently used objects, by the times of their files.

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None,
    ) -> None:
        """Nothing is held open."""

    def put(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> str:
        """Publish a chunk; its key. An object of the same key stays as it is, unless it is damaged.

        Raises:
            SpecError: for a tenant's name, a manifest or tensors that no object can have, or a chunk larger than the
                limit.
            ArchiveError, OSError: and nothing has changed, or the chunk is stored all the same.
            KeyUnavailable: for another master key than the tenants', or none where there are tenants' keys; for a
                tenant who is forgotten meanwhile.
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
        """A chunk of the tenant, proved; None where there is none, or where its bytes are not those written.

        A damaged object is moved to `quarantine`. With `model`, another model's chunk is refused. Another tenant's key
        is a miss by its digits alone, whether or not there is such an object. Without `use`, `gc` does not count it.

        Raises:
            SpecError: for what is no tenant's name.
            WrongModel, OtherDtype, OtherFrequencies: for a chunk that `model` cannot read.
            ForeignVersion: for an object of another version of the format or the specification.
            KeyUnavailable: for an encrypted object's key without the tenant's, or with that of another salt.
            NotEncrypted: for the key of an object in the clear, if the archive is encrypted.
            ArchiveError, OSError: from the file system; the chunk may be there.
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
        """What the objects say of themselves, in order of creation; of one tenant, if one is named.

        Only headers are read, and nothing is proved. An object whose header is damaged, of another version or in the
        clear among encrypted ones is left out; `verify` names it.

        Raises:
            SpecError: for what is no tenant's name.
            OSError: from the file system.
        """
        if tenant is not None:
            check_tenant(tenant)
        own = (key for key in self._files.object_keys() if tenant is None or self._objects.is_of(key, tenant))
        found = [entry for key in own if (entry := self._objects.entry(key)) is not None]
        return sorted(found, key=lambda entry: (entry.created, entry.key))

    def verify(self) -> Report:
        """Read and prove every object; damaged ones go to quarantine.

        An object that was deleted cannot be told from one that was never put, and is not missed. The digest of an
        object in the clear needs no key: it does not tell who wrote the object.
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
        """Erase temporary files that writers left, then what `limit` says; keys, or paths in the quarantine.

        Raises:
            ArchiveError, OSError: from the file system.
        """
        with named_errors(self.folder):
            self._files.restore_all()
            for path in self._files.orphans():
                self._files.erase(path)
        return self._fit()

    def forget(self, tenant: str) -> int:
        """Destroy the tenant's key and every byte of its objects, damaged and unfinished ones too; how many.

        What stands under no key and says nothing is erased with them. After an error the rest is erased all the same,
        and a second call goes on.

        Raises:
            SpecError: for what is no tenant's name.
            KeyUnavailable: for an encrypted archive without its master key; nothing has changed.
            ArchiveError, OSError: the first of the file system.
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
        """Prove an object, and note what was found."""
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
        """Whether another process has put the object, and erased the one that was read."""
        return self._files.describe(self._files.path(key)) not in (None, file)

    def _restored(self, key: str) -> bool:
        """Whether something that a killed reader set aside is in its place again.

        Raises:
            ArchiveError, OSError: where it cannot be put back; it may be a whole object.
        """
        with named_errors(self._files.path(key)):
            return self._files.restore(key)

    def _quarantine(self, key: str, file: File | None) -> None:
        """Put a damaged object away; where nothing can be written, it stays, and is a miss whenever it is read."""
        with suppress(OSError):
            self._files.put_away(key, file)


class _ProvedObjects:
    """Whose the objects of a folder are, and whether they are whole, under the keys of a ring."""

    def __init__(self, files: ObjectFolder, keyring: Keyring | None) -> None:
        self._files, self._keyring = files, keyring

    @property
    def encrypted(self) -> bool:
        """Whether objects in the clear are refused."""
        return self._keyring is not None or self._files.has_keys

    def cipher(self, tenant: str, create: bool = False) -> Cipher | None:
        """The tenant's, or None in an archive in the clear; errors as of `Keyring.cipher`."""
        if self._keyring is not None:
            return self._keyring.cipher(tenant, create)
        if create and self.encrypted:
            raise KeyUnavailable("the archive is encrypted, and no master key is given")
        return None

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

    def check_knows(self, tenant: str) -> None:
        """The tenant's encrypted objects can be told from others'.

        Raises:
            KeyUnavailable: for no master key, another one, or one that neither a salt nor an object proves.
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
        """A tenant's object; errors as of `read_object`, and NotEncrypted."""
        return self._read(key, lambda _: self.cipher(tenant))

    def is_whole(self, key: str, tenant: str) -> bool:
        """Whether there is an object that `read` would give."""
        try:
            self.read(key, tenant)
        except (Damaged, ForeignVersion, KeyUnavailable, OSError):
            return False
        return True

    def prove(self, key: str) -> None:
        """Read anybody's object; errors as of `read`."""
        ring = self._keyring
        self._read(key, lambda claim: None if ring is None else ring.cipher_of(key, claim.nonce, claim.mark))

    def entry(self, key: str) -> Entry | None:
        """An object as its header has it; None for none that could be read.

        Raises:
            OSError: from the file system.
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

    def _read(self, key: str, cipher: Callable[[Claim], Cipher | None]) -> Stored:
        if self.encrypted and not is_sealed(key):
            raise NotEncrypted(f"the archive is encrypted, and the chunk {key} is not: put its text again")
        return Stored(*read_object(self._files.path(key), key, cipher))
