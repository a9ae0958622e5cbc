"""Safetensors file with a digest of its own bytes.

The header's first entry is `__metadata__`, and the first value of this entry is the digest. The digest is the SHA-256
hash of the whole file, with zeros instead of the 64 digits of the digest. Any safetensors reader can open the file.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models_integration.cache.atomic_file import DeferredBytes, NotRegular, publish, read_at, regular_file

__all__ = [
    "NAMES", "TENSORS_MOST", "Damaged", "Header", "header_at", "header_bytes", "header_of", "parts", "prove",
    "raw_bytes", "read", "read_bytes", "sign_header", "tensors_of", "write",
]

NAMES = {
    torch.float64: "F64", torch.int64: "I64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16",
    torch.int8: "I8", torch.uint8: "U8",
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}
ZEROS = b"0" * 64
OPENING = b'{"__metadata__":{"digest":"'
DIGEST_AT = 8 + len(OPENING)
HEADER_MOST = 1 << 24
"""Largest header in bytes. A cache of 4096 rows has 6 MiB. Parsing JSON needs ten times the size of the text."""
TENSORS_MOST = 1 << 16
"""Largest number of tensors. A cache of 4096 rows has 49 152 tensors of states."""
SIZE_MOST, DIMENSIONS_MOST = 1 << 48, 8
SPARSE_FROM, SPARSE_RATIO = 1 << 30, 64
"""A file of at least SPARSE_FROM bytes with less than 1 / SPARSE_RATIO of the bytes on the disk is rejected."""


class Damaged(Exception):
    """Error for a file whose bytes differ from the bytes that were written."""


@dataclass(frozen=True)
class Header:
    """Header of a file, which precedes the tensors."""

    metadata: dict[str, str]
    entries: dict[str, dict[str, Any]]
    """Dtype, shape and offsets after the header, for each tensor."""
    size: int
    """Number of bytes before the first tensor."""
    end: int
    """Number of bytes up to the end of the last tensor."""


def parts(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> tuple[list[memoryview], DeferredBytes]:
    """Return the parts of the file in order, with zeros instead of the digest, and the digest.

    Tensors on the CPU are not copied. Wide dtypes come first, so that every tensor is aligned.
    """
    entries: dict[str, dict[str, object]] = {}
    views, at = [], 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        tensor, view = tensors[name], raw_bytes(tensors[name])
        end = at + len(view)
        entries[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        views.append(view)
        at = end
    whole = [memoryview(header_bytes({"digest": ZEROS.decode(), **metadata}, entries)), *views]
    return whole, DeferredBytes(DIGEST_AT, lambda: _digest(whole))


def header_bytes(metadata: Mapping[str, str], entries: Mapping[str, Mapping[str, object]]) -> bytes:
    """Return a header, padded to a multiple of 8 bytes."""
    text = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def sign_header(header: bytes) -> bytes:
    """Write the digest of the header's bytes over the ZEROS in the header, so that `prove` accepts the header."""
    return header[:DIGEST_AT] + _digest([header]) + header[DIGEST_AT + 64 :]


def write(path: Path, metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> None:
    """Write the file, and replace an existing file. `metadata` has the entries `format` and `manifest`.

    Raises:
        OSError: from the file system. An existing file is unchanged.
    """
    whole, digest = parts(metadata, tensors)
    publish(path, whole, late=digest, nameless=True)


def read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Check the digest of a file, and return the metadata and the tensors. The tensors share one buffer.

    Raises:
        Damaged: if the bytes differ from the bytes that were written.
        OSError: from the file system.
    """
    data = read_bytes(path)
    header = header_of(data)
    prove(data)
    return header.metadata, tensors_of(header, data)


def read_bytes(path: Path, header_most: int = HEADER_MOST, follow_links: bool = True) -> Tensor:
    """Return all bytes of a file in a new buffer. The digest is not checked.

    If the header does not match the file's size, or if the file is sparse, no memory is allocated.

    Raises:
        Damaged: if the file cannot be a file of this format.
        OSError: from the file system.
    """
    with _opened(path, follow_links) as descriptor:
        size = _plausible_size(descriptor, header_most)
        data = torch.empty(size, dtype=torch.uint8, device="cpu")
        view, at = raw_bytes(data), 0
        while at < size and (got := os.readv(descriptor, [view[at:size]])):
            at += got
    if at != size:
        raise Damaged(f"it has {at} bytes")
    return data


@contextmanager
def _opened(path: Path, follow_links: bool) -> Iterator[int]:
    try:
        with regular_file(path, follow_links) as descriptor:
            yield descriptor
    except NotRegular as error:
        raise Damaged("it is no regular file") from error


def _size(descriptor: int) -> int:
    size = os.fstat(descriptor).st_size
    if size < DIGEST_AT + 64:
        raise Damaged(f"it has {size} bytes")
    return size


def _plausible_size(descriptor: int, header_most: int) -> int:
    size, status = _size(descriptor), os.fstat(descriptor)
    if size > SPARSE_FROM and status.st_blocks * 512 < size // SPARSE_RATIO:
        raise Damaged(f"of its {size} bytes, {status.st_blocks * 512} are on the disk")
    head = _header_size(read_at(descriptor, 8, 0), size, header_most)
    end = _header(read_at(descriptor, head - 8, 8), head).end
    if end != size:
        raise Damaged(f"it has {size} bytes, and its header speaks of {end}")
    return size


def header_at(path: Path, header_most: int) -> Header:
    """Return the header of a file without a check of the digest. Links are rejected.

    Raises:
        Damaged: if the header cannot be read.
        OSError: from the file system.
    """
    with _opened(path, follow_links=False) as descriptor:
        size = _header_size(read_at(descriptor, 8, 0), _size(descriptor), header_most)
        return _header(read_at(descriptor, size - 8, 8), size)


def header_of(data: Tensor) -> Header:
    """Return the header from a file's bytes without a check of the digest. The bytes may end with padding.

    Raises:
        Damaged: if the header cannot be read.
    """
    view = raw_bytes(data)
    size = _header_size(bytes(view[:8]), len(data))
    header = _header(bytes(view[8:size]), size)
    if header.end > len(data):
        raise Damaged(f"it has {len(data)} bytes, and its header speaks of {header.end}")
    return header


def prove(data: Tensor) -> None:
    """Check that the bytes of a file, or of a header from `sign_header`, match the digest stored in them.

    Raises:
        Damaged: if the digest does not match.
    """
    view, end = raw_bytes(data), DIGEST_AT + 64
    digest = _digest([view[:DIGEST_AT], ZEROS, view[end:]])
    if bytes(view[8:DIGEST_AT]) != OPENING or bytes(view[DIGEST_AT:end]) != digest:
        raise Damaged("its digest does not fit")


def tensors_of(header: Header, data: Tensor) -> dict[str, Tensor]:
    """Return the tensors in a file's bytes, as views of these bytes.

    Raises:
        Damaged: if the shape of a tensor does not match the tensor's bytes.
    """
    try:
        return {name: _tensor(entry, data[header.size :]) for name, entry in header.entries.items()}
    except (ValueError, RuntimeError, OverflowError) as error:
        raise Damaged(f"a tensor does not fit its place: {error}") from error


def _tensor(entry: Mapping[str, Any], data: Tensor) -> Tensor:
    low, high = entry["data_offsets"]
    return data[low:high].view(DTYPES[entry["dtype"]]).reshape(entry["shape"])


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor, without a copy if the tensor is contiguous and on the CPU."""
    flat = tensor.detach().cpu().contiguous().flatten()
    # A tensor of at most one element is contiguous with any stride, but a view as bytes needs stride 1.
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8).numpy().data


def _digest(parts: Iterable[memoryview | bytes]) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest().encode()


def _header_size(length: bytes, available: int, most: int = HEADER_MOST) -> int:
    stated = int.from_bytes(length, "little")
    if stated > min(most, available - 8):
        raise Damaged(f"its header claims {stated} bytes")
    return 8 + stated


def _header(text: bytes, size: int) -> Header:
    try:
        entries = json.loads(text)
        metadata = entries.pop("__metadata__")
        if not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("its metadata are no texts")
        if not {"digest", "format", "manifest"} <= metadata.keys():
            raise ValueError("its metadata are not complete")
        if len(entries) > TENSORS_MOST:
            raise ValueError(f"it has {len(entries)} tensors")
        end = 0
        for low, high, name in sorted(_place(name, entry) for name, entry in entries.items()):
            if low != end:
                raise ValueError(f"tensor {name} begins at {low}, and the one before ends at {end}")
            end = high
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"its header cannot be read: {error}") from error
    return Header(metadata, entries, size, size + end)


def _place(name: str, entry: dict[str, Any]) -> tuple[int, int, str]:
    """Return the start and the end of a tensor's bytes, and the tensor's name.

    Raises:
        ValueError, KeyError, TypeError: if the entry does not describe a tensor.
    """
    shape, (low, high) = entry["shape"], entry["data_offsets"]
    plausible = type(shape) is list and len(shape) <= DIMENSIONS_MOST
    if not plausible or not all(type(n) is int and 0 <= n <= SIZE_MOST for n in (*shape, low, high)):
        raise ValueError(f"tensor {name} has no place")
    if high - low != math.prod(shape) * DTYPES[entry["dtype"]].itemsize:
        raise ValueError(f"tensor {name} does not fit its place")
    return low, high, name
