# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Norms of cached keys for decode-time eviction, computed on the device of the keys (Section 3.8(a))."""

import numpy as np
import torch
import triton
import triton.language as tl

from accelerated.triton_gpu.device import download, key_tensor
from accelerated.triton_gpu.launch import FLOAT64, NORMS
from spec.arrays import Vector
from spec.policy import DeviceArray

__all__ = ["inverse_key_norms", "inverse_norms"]

SMALL: tl.constexpr = tl.constexpr(2.0**-400)
LARGE: tl.constexpr = tl.constexpr(2.0**500)
UP: tl.constexpr = tl.constexpr(2.0**600)
DOWN: tl.constexpr = tl.constexpr(2.0**-600)
ZERO: tl.constexpr = tl.constexpr(2.0**-846)  # up to this square, float64 cannot represent the inverse of a scaled norm


@triton.jit
def mean_inverse_norms(
    K, NORM, heads, n, d, k_head, k_row, k_dim, NORMS: tl.constexpr, WIDTH: tl.constexpr,
):
    """Write each token's mean of 1 / ||k|| over the heads to NORM (n,), in float64. A zero key gives infinity.

    If float64 cannot represent the squares of a key, the key is first scaled by a power of two.

    Implements: CC-KEY-NORM
    """
    i = tl.program_id(0) * NORMS + tl.arange(0, NORMS)
    channel = tl.arange(0, WIDTH)
    live = (i < n)[:, None] & (channel < d)[None, :]
    total = tl.zeros([NORMS], tl.float64)
    for head in range(heads):
        at = K + head * tl.cast(k_head, tl.int64) + i[:, None] * k_row + channel[None, :] * k_dim
        k = tl.load(at, mask=live, other=0.0).to(tl.float64)
        largest = tl.max(tl.abs(k), 1)
        scale = tl.where(largest < SMALL, UP, tl.where(largest > LARGE, DOWN, tl.full([NORMS], 1.0, tl.float64)))
        k = k * scale[:, None]
        square = tl.sum(k * k, 1)
        inverse = scale / tl.sqrt(tl.where(square > ZERO, square, 1.0))
        total += tl.where(square > ZERO, inverse, float("inf"))
    tl.store(NORM + i, total / tl.cast(heads, tl.float64), mask=i < n)


def inverse_key_norms(k: DeviceArray) -> Vector:
    """Compute each token's mean of 1 / ||k|| over the KV heads, (n,), on the device of the keys (H_kv, n, d).

    Raises:
        SpecError: if the kernels do not accept the type, shape, dtype, device or a value of the keys.
    """
    result: Vector = download(inverse_norms(key_tensor(k)), np.float64)
    return result


def inverse_norms(keys: torch.Tensor) -> torch.Tensor:
    """Return the result of `inverse_key_norms` as a tensor."""
    heads, n, d = keys.shape
    norms = torch.empty(n, dtype=torch.float64, device=keys.device)
    with torch.cuda.device_of(keys):
        mean_inverse_norms[triton.cdiv(n, NORMS),](
            keys, norms, heads, n, d, *keys.stride(), NORMS=NORMS, WIDTH=triton.next_power_of_2(d), **FLOAT64
        )
    return norms
