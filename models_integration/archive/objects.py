"""An archived chunk as one file: what it says of itself, and its proof.

A plain object is a file of `cache.tensor_file`. An encrypted one holds one tensor of bytes, the AES-256-GCM ciphertext
of such a file; the header is authenticated with it. The digest of an encrypted object proves the header alone, so that
an object that was encrypted under another salt, which its mark says, is told from a damaged one without the key.
A plain object's digest needs no key: it tells damage, not who wrote the object.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from models_integration.archive.errors import ForeignVersion, KeyUnavailable
from models_integration.archive.keyring import NONCE_BYTES, Cipher
from models_integration.archive.manifest import SECONDS_MOST, Manifest, canonical, check_contents, meaning
from models_integration.cache.atomic_file import Late
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
"""Bytes of an object's header; 300 layers need 200 KiB."""
PADDING_LEAST = 256
MARK_BYTES = 32


def key_for(manifest: Manifest, cipher: Cipher | None) -> str:
    """The key of a chunk, encrypted or not."""
    return manifest.key if cipher is None else cipher.key_of(manifest.identity)


def pieces(
    manifest: Manifest, tensors: Mapping[str, Tensor], cipher: Cipher | None,
) -> tuple[list[memoryview], Late | None]:
    """The file, in parts that are written one after the other, and the digest, where it is not encrypted.

    The tensors are not copied unless encrypted. The digest's place holds zeros in the parts. An encrypted object says
    in the clear its key and when it was made, and is padded, so that its size tells its length only roughly.
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
    """The next of the few sizes that encrypted objects have: at most 12 % more (PADME)."""
    size = max(size, PADDING_LEAST)
    exponent = size.bit_length() - 1
    step = 1 << (exponent - exponent.bit_length())
    return -(-size // step) * step


class Claim(NamedTuple):
    """What an object says in the clear; nothing is proved."""

    key: str
    created: float
    tenant: str | None
    tokens: int | None
    """None, as the tenant, of an encrypted object."""
    nonce: bytes
    mark: bytes
    """Empty, as the nonce, of an object in the clear."""


def read_claim(path: Path) -> Claim:
    """What an object says of itself, without its tensors.

    Raises:
        Damaged: when the header cannot be read.
        ForeignVersion: when another version of the format, or of the specification's meaning, is stated.
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
    """The tenant and the key of which a file of any version speaks; None where it does not. Nothing is proved.

    Raises:
        Damaged: when its header cannot be read.
        OSError: from the file system.
    """
    try:
        stated = json.loads(header_at(path, HEADER_MOST).metadata["manifest"])
    except (ValueError, RecursionError) as error:
        raise Damaged(f"its manifest cannot be read: {error}") from error
    if not isinstance(stated, dict):
        raise Damaged("its manifest is none")
    key = stated.get("key")
    return stated.get("tenant"), key if isinstance(key, str) else None


def read_object(
    path: Path, key: str, cipher: Callable[[Claim], Cipher | None],
) -> tuple[Manifest, dict[str, Tensor]]:
    """The manifest and tensors of a proved object; the tensors share one buffer that nobody else holds.

    `cipher` is asked if the object is encrypted, and its header whole.

    Raises:
        Damaged: when the bytes are not those that were written, or are another key's.
        ForeignVersion: when another version of the format, or of the specification's meaning, is stated, and the bytes
            are as they were written; of an encrypted object of `kvarc/3`, nothing tells that.
        KeyUnavailable: for an encrypted object without a cipher, or with that of another salt.
        OSError: from the file system.
    """
    data = read_bytes(path, HEADER_MOST, follow_links=False)
    header = header_of(data)
    if "nonce" not in header.metadata:
        prove(data)
        manifest = _manifest(header)
        found, name = tensors_of(header, data), manifest.key
    else:
        if not header.metadata["digest"]:  # up to kvarc/3 there was none
            _check_versions(header)
        prove(data[: header.size])
        manifest, found, name = _decrypted(header, data, key, cipher)
    if name != key:
        raise Damaged("it is another chunk")
    check_contents(manifest, found)
    return manifest, found


def _decrypted(
    header: Header, data: Tensor, key: str, cipher: Callable[[Claim], Cipher | None],
) -> tuple[Manifest, dict[str, Tensor], str]:
    """Manifest, tensors and key of an encrypted object; errors as of `read_object`."""
    claim = _claim(header)
    if claim.key != key:
        raise Damaged("it is another chunk")
    own = cipher(claim)
    if own is None:
        raise KeyUnavailable("the object is encrypted, and no key is given")
    if own.mark(claim.nonce) != claim.mark:
        raise KeyUnavailable(
            "the object was encrypted under another salt than its tenant's: put the file of `keys` back that it had"
        )
    plain = own.decrypt(claim.nonce, data[header.size :], bytes(data[: header.size].numpy()))
    if plain is None:
        raise Damaged("its tag does not fit")
    inner = header_of(plain)
    manifest = _manifest(inner)
    return manifest, tensors_of(inner, plain), key_for(manifest, own)


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
        raise Damaged(f"its manifest cannot be read: {error}") from error
