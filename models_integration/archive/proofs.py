"""Whose objects are, and whether they are whole: what an archive reads for its tenants."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from models_integration.archive.catalogue import Entry
from models_integration.archive.errors import ForeignVersion, KeyUnavailable
from models_integration.archive.keyring import Cipher, Keyring
from models_integration.archive.names import CLEAR, is_of, is_sealed, key_in
from models_integration.archive.object_folder import ObjectFolder
from models_integration.archive.objects import Manifest, read_claim, read_object, stated_owner
from models_integration.cache.tensor_file import Damaged

__all__ = ["ProvedObjects", "Stored", "listed"]


class Stored(NamedTuple):
    """What an object holds."""

    manifest: Manifest
    tensors: dict[str, Tensor]


class ProvedObjects:
    """The objects of a folder, under the keys of a ring."""

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
        return listed(key, manifest, size), True

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


def listed(key: str, manifest: Manifest, size: int) -> Entry:
    """An object's row: of an encrypted one, the list says nothing that its file does not."""
    if is_sealed(key):
        return Entry(key, None, None, size, manifest.created)
    return Entry(key, manifest.tenant, manifest.tokens, size, manifest.created)
