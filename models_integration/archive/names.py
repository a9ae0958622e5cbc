"""What chunks and tenants are called: a key says whose it is to those who know the tenant, and to nobody else.

A key has 64 hexadecimal digits: 48 of the chunk's identity, 15 that bind it to its tenant, and one that says whether
the object is encrypted. A key that is not the asking tenant's is told by its digits, without a look at the folder, so
that neither answer nor time says whether there is such an object.
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
    """A tenant can be stored, listed and printed.

    Raises:
        SpecError: for a name that is empty, longer than 256 characters, or not printable.
    """
    if not isinstance(tenant, str) or not 1 <= len(tenant) <= TENANT_MOST or not tenant.isprintable():
        raise SpecError("tenant", str(tenant)[:80], f"must be 1 to {TENANT_MOST} printable characters")


def identity_digits(digest: str) -> str:
    """Of a digest of the identity, what stands in the key."""
    return digest[:IDENTITY_DIGITS]


def key_of(digits: str, secret: bytes, kind: str) -> str:
    """The key of a chunk of who has the secret: a tenant's name, or what its key ring makes of it."""
    return digits + _bound(digits, secret, kind) + kind


def is_of(key: str, secret: bytes, kind: str) -> bool:
    """Whether a key was made with this secret."""
    made = key_of(key[:IDENTITY_DIGITS], secret, kind)
    return hmac.compare_digest(key.encode("utf-8", "replace"), made.encode("utf-8", "replace"))


def is_sealed(key: str) -> bool:
    """Whether the object is encrypted."""
    return key.endswith(SEALED)


def key_in(name: str) -> str | None:
    """The key in a file's name."""
    found = re.search(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])", name)
    return None if found is None else found[0]


def _bound(digits: str, secret: bytes, kind: str) -> str:
    return hmac.new(secret, f"kvarc/3 {kind} {digits}".encode("utf-8", "replace"), hashlib.sha256).hexdigest()[
        :TENANT_DIGITS
    ]
