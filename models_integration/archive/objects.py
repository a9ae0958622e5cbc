"""One safetensors file per chunk that proves its own bytes, by a digest or by the tag of its encryption.

The header's first entry is `__metadata__`, and its first value the digest: sha256 of the whole file in which the 64
digits of the digest itself are zeros. Any safetensors reader opens such a file. An encrypted object is one tensor of
bytes, the AES-256-GCM ciphertext of such a file; the header is authenticated with it, and there is no digest.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models_integration.archive.errors import ForeignVersion, KeyUnavailable
from models_integration.archive.keyring import Cipher
from models_integration.archive.manifest import Manifest, meaning, raw_bytes
from models_integration.cache.atomic_file import Late
from spec import SPEC_VERSION

__all__ = ["FORMAT", "Corrupt", "pieces", "read_manifest", "read_object"]

FORMAT = "kvarc/2"
NAMES = {
    torch.float64: "F64", torch.int64: "I64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16",
    torch.int8: "I8", torch.uint8: "U8",
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}
ZEROS = b"0" * 64
OPENING = b'{"__metadata__":{"digest":"'
DIGEST_AT = 8 + len(OPENING)
HEADER_MOST = 100_000_000
"""The largest header that safetensors itself reads."""


class Corrupt(Exception):
    """The bytes are not those that were written."""


@dataclass(frozen=True)
class _Head:
    metadata: dict[str, str]
    tensors: dict[str, dict[str, Any]]
    size: int


def pieces(
    manifest: Manifest, tensors: Mapping[str, Tensor], cipher: Cipher | None,
) -> tuple[list[memoryview], Late | None]:
    """The file, in parts that are written one after the other, and the digest, where it is not encrypted.

    The tensors are not copied unless encrypted. The digest's place holds zeros in the parts.
    """
    plain = _plain(manifest, tensors)
    if cipher is None:
        return plain, Late(DIGEST_AT, lambda: _digest(plain))
    nonce = cipher.fresh_nonce()
    size = sum(len(part) for part in plain) + cipher.overhead
    metadata = {
        "digest": "", "format": FORMAT, "spec": SPEC_VERSION, "manifest": manifest.to_json(), "nonce": nonce.hex(),
    }
    header = _header(metadata, {"sealed": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}})
    return [memoryview(header), memoryview(cipher.encrypt(nonce, b"".join(plain), header))], None


def _digest(parts: Iterable[memoryview | bytes]) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest().encode()


def _plain(manifest: Manifest, tensors: Mapping[str, Tensor]) -> list[memoryview]:
    """Wide dtypes first, so that every tensor is aligned."""
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    entries: dict[str, dict[str, object]] = {}
    parts, at = [], 0
    for name in order:
        tensor, view = tensors[name], raw_bytes(tensors[name])
        end = at + len(view)
        entries[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        parts.append(view)
        at = end
    metadata = {"digest": ZEROS.decode(), "format": FORMAT, "spec": SPEC_VERSION, "manifest": manifest.to_json()}
    return [memoryview(_header(metadata, entries)), *parts]


def _header(metadata: Mapping[str, str], entries: Mapping[str, Mapping[str, object]]) -> bytes:
    text = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_manifest(path: Path) -> Manifest:
    """What an object says of itself, without its tensors; nothing is proved yet.

    Raises:
        Corrupt: when the header cannot be read.
        ForeignVersion: when another version of the format, or of the specification's meaning, is stated.
        OSError: from the file system.
    """
    return _manifest(_head_of(path))


def _head_of(path: Path) -> _Head:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(HEADER_MOST, path.stat().st_size):
            raise Corrupt(f"its header claims {length} bytes")
        return _head(file.read(length), length)


def read_object(path: Path, key: Callable[[], Cipher | None]) -> tuple[Manifest, dict[str, Tensor]]:
    """A proved object: tensors that share one buffer, which nobody else holds. `key` is asked if it is encrypted.

    Raises:
        Corrupt: when the bytes are not those that were written.
        ForeignVersion: when another version of the format, or of the specification's meaning, is stated, and the bytes
            are as they were written.
        KeyUnavailable: for an encrypted object without a cipher.
        OSError: from the file system.
    """
    data = _read(path)
    length = int.from_bytes(bytes(data[:8].numpy()), "little")
    if length > min(HEADER_MOST, len(data) - 8):
        raise Corrupt(f"its header claims {length} bytes")
    head = _head(bytes(data[8 : 8 + length].numpy()), length)
    if "nonce" in head.metadata:
        cipher = key()
        if cipher is None:
            raise KeyUnavailable("the object is encrypted, and no key is given")
        opened = cipher.decrypt(head.metadata["nonce"], data[8 + length :], bytes(data[: 8 + length].numpy()))
        if opened is None:
            raise Corrupt("its tag does not fit")
        manifest = _manifest(head)
        data = opened
        length = int.from_bytes(bytes(data[:8].numpy()), "little")
        head = _head(bytes(data[8 : 8 + length].numpy()), length)
    else:
        _prove(data)
        manifest = _manifest(head)
    return manifest, _tensors(head, data[8 + length :])


def _read(path: Path) -> Tensor:
    with path.open("rb", buffering=0) as file:
        size = file.seek(0, 2)
        file.seek(0)
        data = torch.empty(max(size, 8), dtype=torch.uint8)
        view, at = raw_bytes(data), 0
        while at < size and (got := file.readinto(view[at:size])):
            at += got
    if at != size or size < DIGEST_AT + 64:
        raise Corrupt(f"it has {at} bytes")
    return data


def _prove(data: Tensor) -> None:
    view = raw_bytes(data)
    if bytes(view[DIGEST_AT : DIGEST_AT + 64]) != _digest([view[:DIGEST_AT], ZEROS, view[DIGEST_AT + 64 :]]):
        raise Corrupt("its digest does not fit")


def _head(text: bytes, size: int) -> _Head:
    try:
        entries = json.loads(text)
        metadata = entries.pop("__metadata__")
        if len(text) != size or not all(isinstance(metadata[name], str) for name in ("digest", "format", "manifest")):
            raise ValueError("its metadata are not complete")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Corrupt(f"its header cannot be read: {error}") from error
    return _Head(metadata, entries, size)


def _manifest(head: _Head) -> Manifest:
    if head.metadata["format"] != FORMAT:
        raise ForeignVersion(f"it was written as {head.metadata['format']!r}; this is {FORMAT}")
    if meaning(head.metadata.get("spec", "")) != meaning(SPEC_VERSION):
        raise ForeignVersion(f"it was written under specification {head.metadata.get('spec')}; this is {SPEC_VERSION}")
    try:
        return Manifest.from_json(head.metadata["manifest"])
    except (ValueError, KeyError, TypeError) as error:
        raise Corrupt(f"its manifest cannot be read: {error}") from error


def _tensors(head: _Head, data: Tensor) -> dict[str, Tensor]:
    found = {}
    for name, entry in head.tensors.items():
        low, high = entry["data_offsets"]
        shape = entry["shape"]
        dtype = DTYPES[str(entry["dtype"])]
        if high - low != math.prod(shape) * dtype.itemsize:
            raise Corrupt(f"tensor {name} does not fit its place")
        found[name] = data[low:high].view(dtype).reshape(tuple(shape))
    return found
