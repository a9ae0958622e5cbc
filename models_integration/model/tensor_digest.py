"""sha256 of tensors: dtype, shape and values, wherever and however a tensor is stored."""

import hashlib
import json
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from spec.errors import SpecError

__all__ = ["CHUNK_BYTES", "digest_of_named", "digest_of_tensor", "plain"]

CHUNK_BYTES = 1 << 24
"""How much of a tensor is on the host at a time."""


def digest_of_named(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """sha256 of names and values; a tensor of several names is read once, and counts under each."""
    digest, read = hashlib.sha256(), dict[int, str]()
    for name, tensor in tensors:
        if id(tensor) not in read:
            read[id(tensor)] = digest_of_tensor(tensor, name)
        digest.update(json.dumps([name, read[id(tensor)]]).encode())
    return digest.hexdigest()


def digest_of_tensor(tensor: Tensor, name: str | None) -> str:
    """sha256 of dtype, shape and values; without a name, a tensor may have none.

    Raises:
        SpecError: for a tensor without values that has a name; for a layout whose values torch does not say.
    """
    digest = hashlib.sha256()
    try:
        for part in [b"meta"] if tensor.is_meta and name is None else _described(name, tensor):
            digest.update(part)
    except (NotImplementedError, RuntimeError, TypeError) as error:
        reason = f"its layout, {tensor.layout}, cannot be read: convert it to a dense tensor"
        raise SpecError("model", name or "a tensor", reason) from error
    return digest.hexdigest()


def _described(name: str | None, tensor: Tensor) -> Iterator[bytes | memoryview]:
    """What a tensor is like, then its bytes, a chunk at a time."""
    if tensor.is_meta:
        raise SpecError("model", name, "has no values: it must be loaded, not on the device meta")
    yield json.dumps([plain(tensor.dtype), list(tensor.shape)]).encode()
    for dense in _dense(tensor.detach()):
        flat = dense.flatten()
        for part in torch.split(flat, CHUNK_BYTES // flat.element_size()):
            # Of no or one element, any stride is contiguous; a view as bytes wants 1.
            one = part.cpu().resolve_conj().resolve_neg()
            yield one.as_strided((one.numel(),), (1,)).view(torch.uint8).numpy().data


def _dense(tensor: Tensor) -> list[Tensor]:
    """Dense tensors that hold the values: codes and what they mean, if it is quantised."""
    if tensor.is_quantized:
        return [tensor.int_repr(), tensor.dequantize()]
    return [tensor if tensor.layout is torch.strided else tensor.to_dense()]


def plain(dtype: torch.dtype) -> str:
    """A dtype's name without torch's."""
    return str(dtype).removeprefix("torch.")
