"""Keys of tenants: derived from one master key and a salt per tenant, which `destroy` takes away for ever."""

import hashlib
import hmac
import os
from pathlib import Path

from torch import Tensor

from models_integration.archive.errors import KeyUnavailable, named_errors
from models_integration.cache.atomic_file import erase, publish
from models_integration.cache.tensor_file import raw_bytes
from spec.errors import SpecError

__all__ = ["Cipher", "Keyring"]

SALT_BYTES = 32
NONCE_BYTES = 12
TAG_BYTES = 16


class Cipher:
    """AES-256-GCM under one tenant's key."""

    overhead = TAG_BYTES

    def __init__(self, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._aead = AESGCM(key)

    @staticmethod
    def fresh_nonce() -> bytes:
        """12 random bytes: good for 2^32 objects of one tenant."""
        return os.urandom(NONCE_BYTES)

    def encrypt(self, nonce: bytes, data: bytes, header: bytes) -> bytes:
        """Ciphertext and tag; the header is authenticated, not encrypted."""
        sealed: bytes = self._aead.encrypt(nonce, data, header)
        return sealed

    def decrypt(self, nonce: str, data: Tensor, header: bytes) -> Tensor | None:
        """The plain bytes in the place of `data`; None where key, nonce, header or data are not the encryption's.

        A second buffer would cost more than the decryption: its pages are new.
        """
        from cryptography.exceptions import InvalidTag

        if len(data) < TAG_BYTES:
            return None
        opened = data[: len(data) - TAG_BYTES]
        try:
            self._aead.decrypt_into(bytes.fromhex(nonce), raw_bytes(data), header, raw_bytes(opened))
        except (InvalidTag, ValueError):
            return None
        return opened


class Keyring:
    """The keys of an archive: `folder` holds a salt per tenant, the master key stays outside it."""

    def __init__(self, folder: Path, master: bytes) -> None:
        if len(master) != 32:
            raise SpecError("master", f"{len(master)} bytes", "must be 32 random bytes")
        self.folder = folder
        self._master = master

    def cipher(self, tenant: str, create: bool = False) -> Cipher:
        """The tenant's cipher; `create` makes a salt for a tenant that has none.

        Raises:
            KeyUnavailable: for a tenant without a salt (never seen, or forgotten), or another master key.
        """
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        def derived(salt: bytes, purpose: bytes) -> bytes:
            info = b"kvarc/1 " + purpose + b" " + tenant.encode()
            key: bytes = HKDF(algorithm=SHA256(), length=32, salt=salt, info=info).derive(self._master)
            return key

        path = self._path(tenant)
        if create and not path.exists():
            salt = os.urandom(SALT_BYTES)
            with named_errors(path):
                publish(path, [memoryview(salt + derived(salt, b"check"))], replace=False)
        try:
            stored = path.read_bytes()
        except FileNotFoundError:
            raise KeyUnavailable("the tenant has no key: it never had one, or it was forgotten") from None
        salt, check = stored[:SALT_BYTES], stored[SALT_BYTES:]
        if not hmac.compare_digest(check, derived(salt, b"check")):
            raise KeyUnavailable("the master key is not the one under which the tenant's key was made")
        return Cipher(derived(salt, b"tenant"))

    def destroy(self, tenant: str) -> None:
        """Erase the salt: what was encrypted under it can never be read again."""
        path = self._path(tenant)
        with named_errors(path):
            erase(path)

    def _path(self, tenant: str) -> Path:
        return self.folder / hashlib.sha256(tenant.encode()).hexdigest()
