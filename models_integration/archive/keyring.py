"""Keys of chunks and of tenants.

A key of a chunk has 64 hexadecimal digits: 48 digits for the identity, and 15 digits for the tenant. The last digit
shows whether the object is encrypted. A key of a different tenant is recognised by its digits, without access to the
folder. Therefore neither the answer nor the response time reveals whether the object exists.

The keys of tenants are derived from one master key and a salt for each tenant. `destroy` deletes the salt of a tenant.
Without the master key, the folder reveals the number of tenants, but not the names.
"""

import hashlib
import hmac
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from models_integration.archive.errors import KeyUnavailable, named_errors
from models_integration.cache.atomic_file import TEMPORARY, NotRegular, erase, publish, read_at, regular_file, sync
from models_integration.cache.tensor_file import raw_bytes
from spec.errors import SpecError

__all__ = [
    "CLEAR", "NONCE_BYTES", "SEALED", "Cipher", "Keyring", "check_tenant", "identity_digits", "is_of", "is_sealed",
    "key_in", "key_of", "read_master",
]

IDENTITY_DIGITS, TENANT_DIGITS = 48, 15
CLEAR, SEALED = "0", "1"
TENANT_MOST = 256


def check_tenant(tenant: str) -> None:
    """Check that the name of a tenant can be stored, listed and printed.

    Raises:
        SpecError: if the name is empty, longer than 256 characters, or not printable.
    """
    if not isinstance(tenant, str) or not 1 <= len(tenant) <= TENANT_MOST or not tenant.isprintable():
        raise SpecError("tenant", str(tenant)[:80], f"must be 1 to {TENANT_MOST} printable characters")


def identity_digits(digest: str) -> str:
    """Return the digits of an identity's digest that are part of the key."""
    return digest[:IDENTITY_DIGITS]


def key_of(digits: str, secret: bytes, kind: str) -> str:
    """Return the key of a chunk. The secret is the tenant's name, or a secret from the tenant's keyring."""
    bound = hmac.new(secret, f"kvarc/3 {kind} {digits}".encode("utf-8", "replace"), hashlib.sha256).hexdigest()
    return digits + bound[:TENANT_DIGITS] + kind


def is_of(key: str, secret: bytes, kind: str) -> bool:
    """Return True if a key was made with this secret."""
    expected = key_of(key[:IDENTITY_DIGITS], secret, kind)
    return hmac.compare_digest(key.encode("utf-8", "replace"), expected.encode("utf-8", "replace"))


def is_sealed(key: str) -> bool:
    """Return True if the object with this key is encrypted."""
    return key.endswith(SEALED)


def key_in(name: str) -> str | None:
    """Return the key in a file name, or None."""
    match = re.search(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])", name)
    return None if match is None else match[0]


MASTER_BYTES = 32
DISTINCT_LEAST = 16
"""Smallest number of different bytes in a master key. Of 10^10 random keys, about one has fewer."""
SALT_BYTES = 32
NONCE_BYTES = 12
TAG_BYTES = 16
OWNER = re.compile("[0-9a-f]{64}")
PURPOSE = b"kvarc/3 "
"""Text in the derivation of keys. It never changes, so that `forget` finds the salts and objects of all versions."""


class Cipher:
    """AES-256-GCM with the key of one tenant, and the derivation of the tenant's chunk keys."""

    overhead = TAG_BYTES

    def __init__(self, key: bytes, identity: bytes, binding: bytes, check: bytes, mask: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._aead = AESGCM(key)
        self._identity, self._binding, self._check, self._mask = identity, binding, check, mask

    def key_of(self, identity: str) -> str:
        """Return the key (name) of a chunk. It cannot be computed from the chunk's text without the tenant's key."""
        digest = hmac.new(self._identity, identity.encode(), hashlib.sha256).hexdigest()
        return key_of(identity_digits(digest), self._binding, SEALED)

    def mark(self, nonce: bytes) -> bytes:
        """Return the mark of the salt. Only with the master key does a mark reveal which salt was used."""
        return _masked(self._mask, nonce, self._check)

    @staticmethod
    def fresh_nonce() -> bytes:
        """Return 12 random bytes, which suffice for 2^32 objects of one tenant."""
        return os.urandom(NONCE_BYTES)

    def encrypt(self, nonce: bytes, data: bytes, header: bytes) -> bytes:
        """Return ciphertext and tag. The header is authenticated, but not encrypted."""
        sealed: bytes = self._aead.encrypt(nonce, data, header)
        return sealed

    def decrypt(self, nonce: bytes, data: Tensor, header: bytes) -> Tensor | None:
        """Decrypt `data` in place. Return None if key, nonce, header or data differ from those of the encryption.

        Allocating a second buffer would take more time than the decryption.
        """
        from cryptography.exceptions import InvalidTag

        if len(data) < TAG_BYTES:
            return None
        opened = data[: len(data) - TAG_BYTES]
        try:
            self._aead.decrypt_into(nonce, raw_bytes(data), header, raw_bytes(opened))
        except (InvalidTag, ValueError):
            return None
        return opened


class Keyring:
    """Keys of an archive. `folder` contains a salt for each tenant, and the master key is stored elsewhere.

    Raises:
        SpecError: if the master key does not have 32 bytes, or is obviously not random.
    """

    def __init__(self, folder: Path, master: bytes) -> None:
        if len(master) != MASTER_BYTES:
            raise SpecError("master", f"{len(master)} bytes", f"must be {MASTER_BYTES} random bytes")
        if len(set(master)) < DISTINCT_LEAST:
            raise SpecError(
                "master", f"{len(set(master))} different bytes",
                f"must be {MASTER_BYTES} random bytes, with at least {DISTINCT_LEAST} different values",
            )
        self.folder = folder
        self._master = master
        self._mask = self._named(b"mask")
        self._known: tuple[int, dict[bytes, list[str]]] = (-1, {})
        """Time of the last change of the folder, and owners by the check of each salt."""

    def cipher(self, tenant: str, create: bool = False) -> Cipher:
        """Return the cipher of the tenant. With `create`, a salt is made if the tenant has no salt.

        Raises:
            KeyUnavailable: if the tenant has no salt (unknown or deleted), or if the master key is wrong.
        """
        owner = self._owner(tenant)
        path = self.folder / owner
        if create:
            self._make_durable(path)
        return self._cipher(owner)

    def is_of(self, key: str, tenant: str) -> bool:
        """Return True if a chunk key belongs to the tenant, even if the tenant's salt was deleted."""
        return is_of(key, self._binding(self._owner(tenant)), SEALED)

    def cipher_of(self, key: str, nonce: bytes, mark: bytes) -> Cipher:
        """Return the cipher with which an object was encrypted.

        Raises:
            KeyUnavailable: if the salt is missing, or belongs to a different tenant.
        """
        owners = self._owners_by_check().get(_masked(self._mask, nonce, mark), [])
        owner = next((owner for owner in owners if is_of(key, self._binding(owner), SEALED)), None)
        if owner is None:
            raise KeyUnavailable("the salt under which the object was encrypted is not its tenant's here")
        return self._cipher(owner)

    def strays(self) -> list[str]:
        """Return files that are not salts of this master key or duplicate a key. Temporary files are excluded."""
        return sorted(name for names in self._owners_by_check().values() if len(names) > 1 for name in names) + sorted(
            path.name for path in self.folder.glob("*")
            if not path.name.startswith(TEMPORARY) and not (OWNER.fullmatch(path.name) and self._opens(path.name))
        )

    @property
    def opens_any(self) -> bool:
        """Return True if the master key is right for at least one tenant."""
        return any(self._opens(owner) for owner in self._owners())

    def check_master(self) -> None:
        """Check that the master key is right for the tenants in the folder.

        Raises:
            KeyUnavailable: if the master key is wrong for every tenant.
        """
        if next(self._owners(), None) is not None and not self.opens_any:
            raise KeyUnavailable("the master key is not the one under which the tenants' keys were made")

    def destroy(self, tenant: str) -> None:
        """Overwrite the salt of a tenant. All objects encrypted with this salt become unreadable for ever."""
        owner = self._owner(tenant)
        with named_errors(self.folder):
            # A killed writer can leave the salt under two names. Both files are deleted.
            for path in [*self.folder.glob(f"{TEMPORARY}{owner}*"), self.folder / owner]:
                erase(path)

    def _make_durable(self, path: Path) -> None:
        """Make a salt and the folder of salts durable. The process that made the salt may have been killed earlier."""
        there = path.exists()
        if not there:
            self.check_master()
        with named_errors(path):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if there:
                sync(self.folder)
            else:
                salt = os.urandom(SALT_BYTES)
                publish(path, [memoryview(salt + self._derived(salt, b"check"))], replace=False)
            sync(self.folder.parent)

    def _cipher(self, owner: str) -> Cipher:
        try:
            stored = self._stored(owner)
        except FileNotFoundError:
            self.check_master()
            raise KeyUnavailable("the tenant has no key: it never had one, or it was forgotten") from None
        salt = stored[:SALT_BYTES]
        if not self._fits(stored):
            raise KeyUnavailable("the master key is not the one under which the tenant's key was made")
        return Cipher(
            self._derived(salt, b"tenant"), self._derived(salt, b"identity"), self._binding(owner), stored[SALT_BYTES:],
            self._mask,
        )

    def _stored(self, owner: str) -> bytes:
        """Return a salt and its check.

        Raises:
            OSError: from the file system, or if the path is not a regular file.
        """
        with regular_file(self.folder / owner) as descriptor:
            return read_at(descriptor, 2 * SALT_BYTES + 1, 0)

    def _owners_by_check(self) -> dict[bytes, list[str]]:
        """Return owners by check. The salts are read again only if the folder changed, not for each object."""
        try:
            changed = os.stat(self.folder).st_mtime_ns
        except FileNotFoundError:
            return {}
        if self._known[0] != changed:
            owners, read_all = dict[bytes, list[str]](), True
            for owner in self._owners():
                try:
                    if self._fits(stored := self._stored(owner)):
                        owners.setdefault(stored[SALT_BYTES:], []).append(owner)
                except OSError as error:  # objects of this tenant cannot be read until the salt can be read
                    read_all = read_all and isinstance(error, NotRegular)
            if not read_all or not owners:
                return owners
            self._known = changed, owners
        return self._known[1]

    def _derived(self, salt: bytes, purpose: bytes) -> bytes:
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        key: bytes = HKDF(algorithm=SHA256(), length=32, salt=salt, info=PURPOSE + purpose).derive(self._master)
        return key

    def _fits(self, stored: bytes) -> bool:
        return hmac.compare_digest(stored[SALT_BYTES:], self._derived(stored[:SALT_BYTES], b"check"))

    def _opens(self, owner: str) -> bool:
        try:
            return self._fits(self._stored(owner))
        except OSError:
            return False

    def _owner(self, tenant: str) -> str:
        """Return the file name of a tenant's salt. Without the master key, it does not reveal the tenant's name."""
        return self._named(b"owner " + tenant.encode()).hex()

    def _binding(self, owner: str) -> bytes:
        return self._named(b"binding " + owner.encode())

    def _named(self, text: bytes) -> bytes:
        return hmac.new(self._master, PURPOSE + text, hashlib.sha256).digest()

    def _owners(self) -> Iterator[str]:
        with suppress(FileNotFoundError), os.scandir(self.folder) as entries:
            yield from (entry.name for entry in entries if OWNER.fullmatch(entry.name))


def read_master(path: Path, archive: Path) -> bytes:
    """Read a master key from a file.

    Raises:
        SpecError: if the file cannot be read, is inside the archive, or can be read by users other than the owner.
    """
    if path.resolve().is_relative_to(archive.resolve()):
        bound = f"must be outside the archive {archive}, because a copy of the archive would contain the key"
        raise SpecError("master_key", str(path), bound)
    try:
        with regular_file(path, follow_links=True) as descriptor:
            mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
            if mode & 0o077:
                raise SpecError(
                    "master_key", str(path),
                    f"must be readable only for the owner; run chmod 600 (the mode is {mode:o})",
                )
            master = read_at(descriptor, MASTER_BYTES + 1, 0)
    except OSError as error:
        raise SpecError("master_key", str(path), f"must be a readable file: {error}") from error
    if len(master) > MASTER_BYTES:
        raise SpecError("master_key", str(path), f"must have exactly {MASTER_BYTES} bytes, but has more")
    return master


def _masked(mask: bytes, nonce: bytes, data: bytes) -> bytes:
    """Mask or unmask 32 bytes. Without the mask, masked bytes contain no information."""
    pad = hmac.new(mask, nonce, hashlib.sha256).digest()
    return bytes(a ^ b for a, b in zip(data, pad, strict=True))
