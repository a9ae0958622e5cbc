# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""S6: compaction of one layer's cache (Section 3.7), and the indices at which a mask is 1."""

import numpy as np
import torch
import triton
import triton.language as tl

from accelerated.triton_gpu.device import default_device, download, upload
from accelerated.triton_gpu.launch import GATHER, SCAN
from spec.arrays import IntVector
from spec.errors import SpecError

__all__ = ["compact", "places", "positions_of"]

Tensor = torch.Tensor
# Bits are moved, not numbers: a NaN keeps its payload, and the interpreter has no say in bfloat16.
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def gather_rows(X, R, OUT, kept, width, x_head, x_row, x_dim, GATHER: tl.constexpr, WIDTH: tl.constexpr):
    """Copy the rows R of one head of X to OUT (heads, kept, width).

    Implements: CC-COMPACT
    """
    head = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * GATHER + tl.arange(0, GATHER)
    row = tl.load(R + i, mask=i < kept, other=0)
    channel = tl.arange(0, WIDTH)
    live = (i < kept)[:, None] & (channel < width)[None, :]
    bits = tl.load(X + head * x_head + row[:, None] * x_row + channel[None, :] * x_dim, mask=live, other=0)
    at = (head * kept + i)[:, None] * width + channel[None, :]
    tl.store(OUT + at, bits, mask=live)


@triton.jit
def place_marks(MASK, PLACES, COUNT, n, SCAN: tl.constexpr):
    """Write PLACES, the ascending indices at which MASK is 1, and COUNT, the number of indices. One program."""
    found = tl.zeros([1], tl.int64)
    for start in range(0, n, SCAN):
        i = start + tl.arange(0, SCAN)
        mark = tl.load(MASK + i, mask=i < n, other=0).to(tl.int64)
        tl.store(PLACES + found + tl.cumsum(mark, 0) - mark, i.to(tl.int64), mask=mark != 0)
        found += tl.sum(mark, 0)
    tl.store(COUNT + tl.arange(0, 1), found)


def places(mask: Tensor) -> Tensor:
    """Return the ascending indices at which an int32 mask is 1, on the device."""
    found = torch.empty(len(mask), dtype=torch.int64, device=mask.device)
    count = torch.empty(1, dtype=torch.int64, device=mask.device)
    place_marks[(1,)](mask, found, count, len(mask), SCAN=SCAN)
    return found[: int(count)]


def compact(K: Tensor, V: Tensor, R: IntVector) -> tuple[Tensor, Tensor]:
    """Copy the keys and values (H_kv, n, d) of the kept positions R to new tensors. Bits and RoPE are unchanged.

    Raises:
        SpecError: if a tensor has a wrong rank or is on a wrong device, or if a position is outside [0, n).
    """
    for name, x in (("K", K), ("V", V)):
        if x.ndim != 3 or x.dtype.itemsize not in BITS:
            raise SpecError(name, (tuple(x.shape), x.dtype), "must be a tensor (H_kv, n, d), 1 to 8 bytes an element")
        if x.device.type != default_device().type:
            raise SpecError(name, str(x.device), f"a tensor must be on {default_device().type} here")
        if len(R) and not 0 <= R.min() <= R.max() < x.shape[1]:
            raise SpecError("R", (int(R.min()), int(R.max())), f"must lie in [0, {x.shape[1]})")
    rows = upload(R, np.int64, K.device)
    return _gathered(K, rows), _gathered(V, rows)


def _gathered(X: Tensor, rows: Tensor) -> Tensor:
    heads, _, width = X.shape
    out = torch.empty((heads, len(rows), width), dtype=X.dtype, device=X.device)
    if out.numel():
        bits = BITS[X.dtype.itemsize]
        with torch.cuda.device_of(X):
            gather_rows[triton.cdiv(len(rows), GATHER), heads](
                X.view(bits), rows, out.view(bits), len(rows), width, *X.stride(), GATHER=GATHER,
                WIDTH=triton.next_power_of_2(width),
            )
    return out


def positions_of(mask: Tensor) -> IntVector:
    """Return the result of `places` as a NumPy array."""
    found: IntVector = download(places(mask), np.int64)
    return found
