"""Keys of chunks and names of tenants. Only a reader who knows the tenant can see to which tenant a key belongs.

A key has 64 hexadecimal digits: 48 digits for the chunk's identity, 15 digits for the tenant, and one digit that is
different for encrypted objects. A key of a different tenant is recognised by its digits, without access to the folder.
Neither the answer nor the time therefore reveals whether the object exists.
"""

import hashlib
import hmac
import re

from spec.errors import SpecError

__all__ = ["CLEAR", "SEALED", "check_tenant", "identity_digits", "is_of", "is_sealed", "key_in", "key_of"]

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
    return digits + _bound(digits, secret, kind) + kind


def is_of(key: str, secret: bytes, kind: str) -> bool:
    """Return True if a key was made with this secret."""
    made = key_of(key[:IDENTITY_DIGITS], secret, kind)
    return hmac.compare_digest(key.encode("utf-8", "replace"), made.encode("utf-8", "replace"))


def is_sealed(key: str) -> bool:
    """Return True if the object with this key is encrypted."""
    return key.endswith(SEALED)


def key_in(name: str) -> str | None:
    """Return the key in a file name, or None."""
    found = re.search(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])", name)
    return None if found is None else found[0]


def _bound(digits: str, secret: bytes, kind: str) -> str:
    return hmac.new(secret, f"kvarc/3 {kind} {digits}".encode("utf-8", "replace"), hashlib.sha256).hexdigest()[
        :TENANT_DIGITS
    ]
