"""A safetensors file that proves its own bytes.

The header's first entry is `__metadata__`, and its first value the digest: sha256 of the whole file in which the 64
digits of the digest itself are zeros. Any safetensors reader opens such a file.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spec.errors import SpecError

__all__ = ["FORMAT", "parts", "read"]

FORMAT = "kvspec-cache/1"
_NAMES = {torch.float64: "F64", torch.int64: "I64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_ZEROS = b"0" * 64
_OPENING = b'{"__metadata__":{"digest":"'
_DIGEST_AT = 8 + len(_OPENING)


def parts(manifest: Mapping[str, object], tensors: Mapping[str, Tensor]) -> list[memoryview]:
    """The file, in parts that are written one after the other; wide dtypes first, so that every tensor is aligned."""
    entries: dict[str, Any] = {
        "__metadata__": {"digest": _ZEROS.decode(), "format": FORMAT, "manifest": json.dumps(manifest)}
    }
    parts, at = [], 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        tensor = tensors[name].detach().cpu().contiguous()
        # Of no or one element, any stride is contiguous; a view as bytes wants 1.
        flat = tensor.flatten().as_strided((tensor.numel(),), (1,))
        data = memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
        entries[name] = {
            "dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + len(data)],
        }
        parts.append(data)
        at += len(data)
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = bytearray(len(text).to_bytes(8, "little") + text)
    digest = hashlib.sha256(head)
    for part in parts:
        digest.update(part)
    head[_DIGEST_AT : _DIGEST_AT + 64] = digest.hexdigest().encode()
    return [memoryview(head), *parts]


def read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What a file says of itself and its tensors, once its digest has proved them.

    Raises:
        SpecError: when the bytes are not those that were written, or are of another format.
        OSError: from the file system.
    """
    data = bytearray(path.read_bytes())
    stated = bytes(data[_DIGEST_AT : _DIGEST_AT + 64])
    data[_DIGEST_AT : _DIGEST_AT + 64] = _ZEROS[: len(stated)]
    if data[8:_DIGEST_AT] != _OPENING or hashlib.sha256(data).hexdigest().encode() != stated:
        raise SpecError("path", path.name, "its bytes are not those that were saved")
    start = 8 + int.from_bytes(data[:8], "little")
    entries = json.loads(bytes(data[8:start]))
    metadata = entries.pop("__metadata__")
    if metadata["format"] != FORMAT:
        raise SpecError("path", path.name, f"is of format {metadata['format']}, this is {FORMAT}")
    return json.loads(metadata["manifest"]), {name: _tensor(entry, data, start) for name, entry in entries.items()}


def _tensor(entry: Mapping[str, Any], data: bytearray, start: int) -> Tensor:
    dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype)
    # A copy, as a view would keep the whole file alive.
    low = start + entry["data_offsets"][0]
    return torch.frombuffer(data, dtype=dtype, count=math.prod(shape), offset=low).clone().reshape(shape)
