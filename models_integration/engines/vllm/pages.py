"""Keys and values in the pages of vLLM, as views of the form (blocks, H_kv, slots, d) for every layout."""

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from spec.errors import SpecError

__all__ = ["LAYOUTS", "Pages", "adjacent", "check_pool", "column_major_keys"]

Views: TypeAlias = tuple[Tensor, Tensor]


def column_major_keys(cache: Tensor) -> Views:
    """Return views of the pages of CPU_ATTN: keys are stored as (d, slots) and values as (slots, d)."""
    blocks, heads, size, width = cache.shape
    halves = cache.view(blocks, heads, 2, size * width // 2)
    keys = halves[:, :, 0].view(blocks, heads, width // 2, size).mT
    return keys, halves[:, :, 1].view(blocks, heads, size, width // 2)


def adjacent(cache: Tensor) -> Views:
    """Return views of pages in which each slot contains the key, then the value, for any order of the strides."""
    d = cache.shape[-1] // 2
    return cache[..., :d], cache[..., d:]


LAYOUTS: Mapping[str, Callable[[Tensor], Views]] = {
    "CPU_ATTN": column_major_keys, "FLASH_ATTN": adjacent, "FLASHINFER": adjacent, "TRITON_ATTN": adjacent,
}
"""Views of the pages of each attention backend of vLLM, by the name of the backend."""


class Pages:
    """Pages of one layer.

    Args:
        cache: tensor of the layer, (blocks, H_kv, slots, 2 d).
        backend: name of vLLM's attention backend.

    Raises:
        SpecError: if the layout of the backend is not known.
    """

    def __init__(self, cache: Tensor, backend: str) -> None:
        if backend not in LAYOUTS:
            raise SpecError("attention_backend", backend, f"must be one of {', '.join(LAYOUTS)}")
        if cache.ndim != 4 or not cache.is_floating_point():
            reason = "must have the dimensions blocks, heads, slots and content, in float32, float16 or bfloat16"
            raise SpecError("kv_cache", (tuple(cache.shape), cache.dtype), reason)
        self.keys, self.values = LAYOUTS[backend](cache)
        self.heads, self.size = self.keys.shape[1], self.keys.shape[2]
        self._head = torch.arange(self.heads, device=cache.device)[:, None]

    def read(self, blocks: Tensor, slots: Tensor) -> Views:
        """Return the keys and values in slots of a request, each (H_kv, n, d).

        Args:
            blocks: ids of the request's blocks.
            slots: (n,) for all heads, or (H_kv, n).
        """
        at, offset = self._at(blocks, slots)
        return self.keys[at, self._head, offset], self.values[at, self._head, offset]

    def write(self, blocks: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write keys and values (H_kv, n, d) into slots of a request."""
        at, offset = self._at(blocks, slots)
        self.keys[at, self._head, offset], self.values[at, self._head, offset] = keys, values

    def _at(self, blocks: Tensor, slots: Tensor) -> Views:
        slots = slots.expand(self.heads, slots.shape[-1])
        return blocks[slots // self.size], slots % self.size


def check_pool(available: int, block_bytes: int, size: int, longest: int, blocks: int | None = None) -> None:
    """Check that the pool of blocks stores one request of the longest length. vLLM reserves one block.

    Args:
        available: bytes of the pool.
        block_bytes: bytes of a block in all layers.
        size: number of tokens in a block.
        longest: largest number of tokens of a request.
        blocks: number of blocks, if an option sets the number. None: `available` determines the number.

    Raises:
        SpecError: if the pool is too small. The message has the options to type instead.
    """
    fitting = max(0, (available // block_bytes if blocks is None else blocks) - 1) * size
    if available <= 0 and blocks is None:
        reason = "is left for the cache beside the model: raise --gpu-memory-utilization, or use a smaller model"
        raise SpecError("pool", "no memory", reason)
    if fitting < longest:
        needed = -(-longest // size) + 1
        option = f"--kv-cache-memory-bytes {needed * block_bytes}" if blocks is None else (
            f"--num-gpu-blocks-override {needed}"
        )
        shorter = f", or --max-model-len {fitting}" if fitting else ""
        reason = f"one request can have {longest} tokens: type {option}{shorter}"
        raise SpecError("pool", f"{fitting} tokens", reason)
