# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Decode: the norms of cached keys, where they lie (Section 3.8(a))."""

import numpy as np
import torch
import triton
import triton.language as tl

from accelerated.triton_gpu.device import download, key_tensor
from accelerated.triton_gpu.launch import FLOAT64, NORMS
from spec.arrays import Vector
from spec.policy import DeviceArray

__all__ = ["inverse_key_norms"]


@triton.jit
def mean_inverse_norms(
    K, NORM, heads, n, d, k_head, k_row, k_dim, NORMS: tl.constexpr, WIDTH: tl.constexpr,
):
    """NORM (n,): mean over heads of 1 / ||k||, in float64; infinite where a key is zero.

    Implements: CC-KEY-NORM
    """
    i = tl.program_id(0) * NORMS + tl.arange(0, NORMS)
    channel = tl.arange(0, WIDTH)
    live = (i < n)[:, None] & (channel < d)[None, :]
    total = tl.zeros([NORMS], tl.float64)
    for head in range(heads):
        at = K + head * k_head.to(tl.int64) + i[:, None] * k_row + channel[None, :] * k_dim
        k = tl.load(at, mask=live, other=0.0).to(tl.float64)
        square = tl.sum(k * k, 1)
        inverse = 1.0 / tl.sqrt(tl.where(square > 0, square, 1.0))
        total += tl.where(square > 0, inverse, float("inf"))
    tl.store(NORM + i, total / heads.to(tl.float64), mask=i < n)


def inverse_key_norms(k: DeviceArray) -> Vector:
    """Inverse norms (n,) of keys (H_kv, n, d), which are read where they lie.

    Raises:
        SpecError: for a type, shape, dtype, device or value that the kernels do not take.
    """
    keys = key_tensor(k)
    heads, n, d = keys.shape
    norms = torch.empty(n, dtype=torch.float64, device=keys.device)
    with torch.cuda.device_of(keys):
        mean_inverse_norms[triton.cdiv(n, NORMS),](
            keys, norms, heads, n, d, *keys.stride(), NORMS=NORMS, WIDTH=triton.next_power_of_2(d), **FLOAT64
        )
    found: Vector = download(norms, np.float64)
    return found
