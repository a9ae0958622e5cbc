"""SHA-256 of tensors: dtype, shape and values, independent of device and memory layout."""

import hashlib
import json
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from spec.errors import SpecError

__all__ = ["CHUNK_BYTES", "digest_of_named", "digest_of_tensor", "plain"]

CHUNK_BYTES = 1 << 24
"""Number of bytes of a tensor that are copied to the host at a time."""


def digest_of_named(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return the SHA-256 of names and values. A tensor with several names is read once, and included for each name."""
    digest, read = hashlib.sha256(), dict[int, str]()
    for name, tensor in tensors:
        if id(tensor) not in read:
            read[id(tensor)] = digest_of_tensor(tensor, name)
        digest.update(json.dumps([name, read[id(tensor)]]).encode())
    return digest.hexdigest()


def digest_of_tensor(tensor: Tensor, name: str | None) -> str:
    """Return the SHA-256 of dtype, shape and values. Only a tensor without a name may have no values.

    Raises:
        SpecError: if a tensor with a name has no values, or if torch cannot read the values of the layout.
    """
    digest = hashlib.sha256()
    try:
        for part in [b"meta"] if tensor.is_meta and name is None else _described(name, tensor):
            digest.update(part)
    except (NotImplementedError, RuntimeError, TypeError) as error:
        reason = f"the layout {tensor.layout} is not supported: convert the tensor to a dense tensor"
        raise SpecError("model", name or "a tensor", reason) from error
    return digest.hexdigest()


def _described(name: str | None, tensor: Tensor) -> Iterator[bytes | memoryview]:
    """Yield a description of the tensor, then its bytes in chunks."""
    if tensor.is_meta:
        raise SpecError("model", name, "has no values (device meta): load the weights")
    yield json.dumps([plain(tensor.dtype), list(tensor.shape)]).encode()
    for dense in _dense(tensor.detach()):
        flat = dense.flatten()
        for part in torch.split(flat, CHUNK_BYTES // flat.element_size()):
            # A tensor of at most one element is contiguous with any stride, but a view as bytes needs stride 1.
            one = part.cpu().resolve_conj().resolve_neg()
            yield one.as_strided((one.numel(),), (1,)).view(torch.uint8).numpy().data


def _dense(tensor: Tensor) -> list[Tensor]:
    """Return dense tensors with the values. For a quantised tensor these are the codes and the scales."""
    if tensor.is_quantized:
        return [tensor.int_repr(), tensor.dequantize()]
    return [tensor if tensor.layout is torch.strided else tensor.to_dense()]


def plain(dtype: torch.dtype) -> str:
    """Return the name of a dtype without "torch."."""
    return str(dtype).removeprefix("torch.")
