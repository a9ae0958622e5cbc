"""File format of an archived chunk: manifest, tensors and digest.

An unencrypted object is a file of `cache.tensor_file`. An encrypted object contains one tensor of bytes, the
AES-256-GCM ciphertext of such a file. The header is also authenticated. The digest of an encrypted object covers only
the header. Therefore the mark shows, even without the key, whether an object has a different salt or is damaged. The
digest of an unencrypted object needs no key, so it detects damage but does not prove the author.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from models_integration.archive.errors import ForeignVersion, KeyUnavailable
from models_integration.archive.keyring import NONCE_BYTES, Cipher
from models_integration.archive.manifest import SECONDS_MOST, Manifest, canonical, check_contents, meaning
from models_integration.cache.atomic_file import DeferredBytes
from models_integration.cache.tensor_file import (
    ZEROS,
    Damaged,
    Header,
    header_at,
    header_bytes,
    header_of,
    parts,
    prove,
    read_bytes,
    sign_header,
    tensors_of,
)
from spec import SPEC_VERSION

__all__ = ["FORMAT", "Claim", "key_for", "padded", "pieces", "read_claim", "read_object", "stated_owner"]

FORMAT = "kvarc/4"
HEADER_MOST = 1 << 20
"""Largest header of an object in bytes. 300 layers need 200 KiB."""
PADDING_LEAST = 256
MARK_BYTES = 32


def key_for(manifest: Manifest, cipher: Cipher | None) -> str:
    """Return the key of a chunk, with or without encryption."""
    return manifest.key if cipher is None else cipher.key_of(manifest.identity)


def pieces(
    manifest: Manifest, tensors: Mapping[str, Tensor], cipher: Cipher | None,
) -> tuple[list[memoryview], DeferredBytes | None]:
    """Return the parts of the file in order, and for an unencrypted object the digest.

    The tensors are copied only for encryption. The parts contain zeros instead of the digest. The key and the time of
    creation of an encrypted object are unencrypted. An encrypted object is padded, so that its size reveals the length
    of the text only approximately.
    """
    versions = {"format": FORMAT, "spec": SPEC_VERSION}
    plain, digest = parts({**versions, "manifest": manifest.to_json()}, tensors)
    if cipher is None:
        return plain, digest
    nonce = cipher.fresh_nonce()
    whole = b"".join(plain)
    whole += bytes(padded(len(whole)) - len(whole))
    size = len(whole) + cipher.overhead
    about = canonical({"created": manifest.created, "key": key_for(manifest, cipher)})
    sealed = {"manifest": about, "nonce": nonce.hex(), "mark": cipher.mark(nonce).hex()}
    header = sign_header(header_bytes(
        {"digest": ZEROS.decode(), **versions, **sealed},
        {"sealed": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}},
    ))
    return [memoryview(header), memoryview(cipher.encrypt(nonce, whole, header))], None


def padded(size: int) -> int:
    """Return the size of an encrypted object after padding to one of few sizes: at most 12 % more (PADME)."""
    size = max(size, PADDING_LEAST)
    exponent = size.bit_length() - 1
    step = 1 << (exponent - exponent.bit_length())
    return -(-size // step) * step


class Claim(NamedTuple):
    """Unencrypted metadata of an object, without a check of the digest."""

    key: str
    created: float
    tenant: str | None
    tokens: int | None
    """Number of tokens. Number and tenant are None for an encrypted object."""
    nonce: bytes
    mark: bytes
    """Mark of the salt. Mark and nonce are empty for an unencrypted object."""


def read_claim(path: Path) -> Claim:
    """Return the unencrypted metadata of an object, without the tensors.

    Raises:
        Damaged: if the header cannot be read.
        ForeignVersion: if the object has a different version of the format or of the specification.
        OSError: from the file system.
    """
    return _claim(header_at(path, HEADER_MOST))


def _claim(header: Header) -> Claim:
    _check_versions(header)
    if "nonce" not in header.metadata:
        manifest = _manifest(header)
        return Claim(manifest.key, manifest.created, manifest.tenant, manifest.tokens, b"", b"")
    try:
        about = json.loads(header.metadata["manifest"])
        key, created = about["key"], about["created"]
        nonce, mark = (bytes.fromhex(header.metadata[name]) for name in ("nonce", "mark"))
        if not isinstance(key, str) or type(created) not in (int, float) or not 0 <= created < SECONDS_MOST:
            raise ValueError("it has no key")
        if (len(nonce), len(mark)) != (NONCE_BYTES, MARK_BYTES):
            raise ValueError("it has no nonce, or no mark of its salt")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Damaged(f"its header cannot be read: {error}") from error
    return Claim(key, float(created), None, None, nonce, mark)


def stated_owner(path: Path) -> tuple[object, str | None]:
    """Return the tenant and the key in a file of any version, or None. The digest is not checked.

    Raises:
        Damaged: if the header cannot be read.
        OSError: from the file system.
    """
    try:
        stated = json.loads(header_at(path, HEADER_MOST).metadata["manifest"])
    except (ValueError, RecursionError) as error:
        raise Damaged(f"must have a readable manifest: {error}") from error
    if not isinstance(stated, dict):
        raise Damaged("its manifest is none")
    key = stated.get("key")
    return stated.get("tenant"), key if isinstance(key, str) else None


def read_object(
    path: Path, key: str, cipher: Callable[[Claim], Cipher | None],
) -> tuple[Manifest, dict[str, Tensor]]:
    """Check an object, and return the manifest and the tensors. The tensors share one new buffer.

    `cipher` is called if the object is encrypted and the header is undamaged.

    Raises:
        Damaged: if the bytes were changed, or belong to a different key.
        ForeignVersion: if an undamaged object has a different version of the format or of the specification. For an
            encrypted object of `kvarc/3`, damage cannot be detected.
        KeyUnavailable: if an encrypted object has no cipher, or a cipher with a different salt.
        OSError: from the file system.
    """
    data = read_bytes(path, HEADER_MOST, follow_links=False)
    header = header_of(data)
    if "nonce" not in header.metadata:
        prove(data)
        manifest = _manifest(header)
        tensors, name = tensors_of(header, data), manifest.key
    else:
        if not header.metadata["digest"]:  # objects up to kvarc/3 have no digest
            _check_versions(header)
        prove(data[: header.size])
        manifest, tensors, name = _decrypted(header, data, key, cipher)
    if name != key:
        raise Damaged("it is another chunk")
    check_contents(manifest, tensors)
    return manifest, tensors


def _decrypted(
    header: Header, data: Tensor, key: str, cipher: Callable[[Claim], Cipher | None],
) -> tuple[Manifest, dict[str, Tensor], str]:
    """Return manifest, tensors and key of an encrypted object. Errors are the same as in `read_object`."""
    claim = _claim(header)
    if claim.key != key:
        raise Damaged("it is another chunk")
    opened = cipher(claim)
    if opened is None:
        raise KeyUnavailable("the object is encrypted, and no key is given")
    if opened.mark(claim.nonce) != claim.mark:
        raise KeyUnavailable(
            "the object was encrypted under another salt than its tenant's: put the file of `keys` back that it had"
        )
    plain = opened.decrypt(claim.nonce, data[header.size :], bytes(data[: header.size].numpy()))
    if plain is None:
        raise Damaged("its tag does not fit")
    inner = header_of(plain)
    manifest = _manifest(inner)
    return manifest, tensors_of(inner, plain), key_for(manifest, opened)


def _check_versions(header: Header) -> None:
    metadata = header.metadata
    if metadata["format"] != FORMAT:
        raise ForeignVersion(f"it was written as {metadata['format']!r}; this is {FORMAT}")
    if meaning(metadata.get("spec", "")) != meaning(SPEC_VERSION):
        raise ForeignVersion(f"it was written under specification {metadata.get('spec')}; this is {SPEC_VERSION}")


def _manifest(header: Header) -> Manifest:
    _check_versions(header)
    try:
        return Manifest.from_json(header.metadata["manifest"])
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"must have a readable manifest: {error}") from error
