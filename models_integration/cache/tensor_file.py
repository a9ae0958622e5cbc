"""A safetensors file that proves its own bytes.

The header's first entry is `__metadata__`, and its first value the digest: sha256 of the whole file in which the 64
digits of the digest itself are zeros. Any safetensors reader opens such a file.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models_integration.cache.atomic_file import Late, publish

__all__ = [
    "Damaged", "Header", "header_at", "header_bytes", "header_of", "parts", "prove", "raw_bytes", "read", "read_bytes",
    "tensors_of", "write",
]

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


class Damaged(Exception):
    """The bytes are not those that were written."""


@dataclass(frozen=True)
class Header:
    """What stands before the tensors."""

    metadata: dict[str, str]
    entries: dict[str, dict[str, Any]]
    """Of each tensor: dtype, shape, and its place behind the header."""
    size: int
    """Bytes before the first tensor."""


def parts(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> tuple[list[memoryview], Late]:
    """The file, in parts that are written one after the other, and its digest, whose place holds zeros in the parts.

    No tensor of the CPU is copied. Wide dtypes come first, so that every tensor is aligned.
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
    return whole, Late(DIGEST_AT, lambda: _digest(whole))


def header_bytes(metadata: Mapping[str, str], entries: Mapping[str, Mapping[str, object]]) -> bytes:
    """A header, of a multiple of 8 bytes."""
    text = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write(path: Path, metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> None:
    """Put the file in the place of the one of before; `metadata` has a `format` and a `manifest`.

    Raises:
        OSError: from the file system; nothing has changed.
    """
    whole, digest = parts(metadata, tensors)
    publish(path, whole, late=digest)


def read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """What a file says of itself and its tensors, once its digest has proved them. The tensors share one buffer.

    Raises:
        Damaged: when the bytes are not those that were written.
        OSError: from the file system.
    """
    data = read_bytes(path)
    header = header_of(data)
    prove(data)
    return header.metadata, tensors_of(header, data)


def read_bytes(path: Path) -> Tensor:
    """All bytes of a file, in one buffer that nobody else holds; nothing is proved yet.

    Raises:
        Damaged: when it is too short.
        OSError: from the file system.
    """
    with path.open("rb", buffering=0) as file:
        size = file.seek(0, 2)
        file.seek(0)
        data = torch.empty(max(size, 8), dtype=torch.uint8)
        view, at = raw_bytes(data), 0
        while at < size and (got := file.readinto(view[at:size])):
            at += got
    if at != size or size < DIGEST_AT + 64:
        raise Damaged(f"it has {at} bytes")
    return data


def header_at(path: Path) -> Header:
    """The header of a file; nothing is proved.

    Raises:
        Damaged: when it cannot be read.
        OSError: from the file system.
    """
    with path.open("rb") as file:
        size = _header_size(file.read(8), path.stat().st_size)
        return _header(file.read(size - 8), size)


def header_of(data: Tensor) -> Header:
    """The header of a file's bytes; nothing is proved.

    Raises:
        Damaged: when it cannot be read.
    """
    view = raw_bytes(data)
    size = _header_size(bytes(view[:8]), len(data))
    return _header(bytes(view[8:size]), size)


def prove(data: Tensor) -> None:
    """A file's bytes have the digest that they state.

    Raises:
        Damaged: otherwise.
    """
    view, end = raw_bytes(data), DIGEST_AT + 64
    digest = _digest([view[:DIGEST_AT], ZEROS, view[end:]])
    if bytes(view[8:DIGEST_AT]) != OPENING or bytes(view[DIGEST_AT:end]) != digest:
        raise Damaged("its digest does not fit")


def tensors_of(header: Header, data: Tensor) -> dict[str, Tensor]:
    """The tensors of a file's bytes, which they share.

    Raises:
        Damaged: when one does not fit its place.
    """
    found = {}
    for name, entry in header.entries.items():
        low, high = (header.size + at for at in entry["data_offsets"])
        shape, dtype = tuple(entry["shape"]), DTYPES[str(entry["dtype"])]
        if high - low != math.prod(shape) * dtype.itemsize:
            raise Damaged(f"tensor {name} does not fit its place")
        found[name] = data[low:high].view(dtype).reshape(shape)
    return found


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, shared with it where it is contiguous and on the CPU."""
    flat = tensor.detach().cpu().contiguous().flatten()
    # Of no or one element, any stride is contiguous; a view as bytes wants 1.
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8).numpy().data


def _digest(parts: Iterable[memoryview | bytes]) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest().encode()


def _header_size(length: bytes, available: int) -> int:
    stated = int.from_bytes(length, "little")
    if stated > min(HEADER_MOST, available - 8):
        raise Damaged(f"its header claims {stated} bytes")
    return 8 + stated


def _header(text: bytes, size: int) -> Header:
    try:
        entries = json.loads(text)
        metadata = entries.pop("__metadata__")
        if not all(isinstance(metadata[name], str) for name in ("digest", "format", "manifest")):
            raise ValueError("its metadata are not complete")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"its header cannot be read: {error}") from error
    return Header(metadata, entries, size)
