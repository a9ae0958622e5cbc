"""Poisoned memory: all arrays that a kernel sees lie in fields of NaN (-7 for integers), which stay whole.

A read outside an array brings poison into a result (unless the kernel throws the value away), a write outside
leaves a mark. What is allocated without a value is poisoned inside, too: a kernel that reads what none has
written is found out.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

from accelerated.triton_gpu.device import upload

__all__ = ["POISON", "Field", "guarded", "poisoned_allocations"]

# A NaN of our own: a kernel that writes NaN outside its array leaves a mark, too.
POISON = {
    torch.bfloat16: (torch.int16, 0x7FDE),
    torch.float16: (torch.int16, 0x7E2D),
    torch.float32: (torch.int32, 0x7FC0DEAD),
    torch.float64: (torch.int64, 0x7FF8DEADDEADDEAD),
}
BAND = 4096  # four steps of the widest kernel: what runs over an end still lands in the field


class Field:
    """A tensor in the middle of poison."""

    def __init__(self, like: torch.Tensor) -> None:
        size = like.numel()
        bits, self.poison = POISON[like.dtype] if like.is_floating_point() else (like.dtype, -7)
        self.memory = torch.full((size + 2 * BAND,), self.poison, dtype=bits, device=like.device)
        self.tensor = self.memory[BAND : BAND + size].view(like.dtype).view(like.shape)

    def is_whole(self) -> bool:
        """Whether the bands hold their poison, to the bit."""
        bands = torch.cat([self.memory[:BAND], self.memory[BAND + self.tensor.numel() :]])
        return bool((bands == self.poison).all())


def guarded(values: torch.Tensor, fields: list[Field]) -> torch.Tensor:
    """A copy of the values inside a new field."""
    fields.append(Field(values))
    return fields[-1].tensor.copy_(values)


@contextmanager
def poisoned_allocations(modules: list[ModuleType]) -> Iterator[list[Field]]:
    """Inside, whatever these modules upload or allocate lies in the fields that are given."""
    fields: list[Field] = []
    make = {name: getattr(torch, name) for name in ("empty", "full", "zeros", "empty_like")}

    def poisoned(name: str) -> Any:
        def allocate(*arguments: Any, **options: Any) -> torch.Tensor:
            values = make[name](*arguments, **options)
            if name in ("full", "zeros"):
                return guarded(values, fields)
            fields.append(Field(values))
            return fields[-1].tensor

        return allocate

    class Torch:
        """The module, with other allocations."""

        def __getattr__(self, name: str) -> Any:
            return poisoned(name) if name in make else getattr(torch, name)

    def guarded_upload(*arguments: Any, **options: Any) -> torch.Tensor:
        return guarded(upload(*arguments, **options), fields)

    with ExitStack() as patches:
        for module in modules:
            patches.enter_context(patch.object(module, "torch", Torch()))
            if hasattr(module, "upload"):
                patches.enter_context(patch.object(module, "upload", guarded_upload))
        yield fields
