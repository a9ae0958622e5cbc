"""Torch's flash attention with the log-sum-exp that it computes on the way, where the model would call it anyway."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

__all__ = ["flash_attention"]

# Heads that the kernel takes as they are: others are padded first, by torch, on CUDA.
_CUDA_WIDTHS = range(8, 257, 8)


def flash_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any],
) -> tuple[Tensor, Tensor] | None:
    """Causal attention without a mask: its output (rows, n, H, d) and log-sum-exp (rows, H, n), from one pass.

    None unless `scaled_dot_product_attention` would itself choose this very kernel for this very call, so that the
    output has the model's own bits. On a CPU half precision gives None too: there the kernel rounds the logits.
    """
    n, scaling = query.shape[2], options.get("scaling")
    plain = (
        1 < n == key.shape[2] and key.shape == value.shape and not options.get("dropout")
        and options.get("is_causal", None) in (None, True) and getattr(module, "is_causal", True)
        and options.get("softcap") is None and options.get("position_bias") is None
    )
    kernel = getattr(torch.ops.aten, _KERNELS.get(query.device.type, ""), None)
    if not plain or kernel is None or torch.is_autocast_enabled(query.device.type):
        return None
    grouped = query.shape[1] != key.shape[1]
    chosen = torch._fused_sdp_choice(query, key, value, None, 0.0, True, scale=scaling, enable_gqa=grouped)
    if chosen != SDPBackend.FLASH_ATTENTION.value or not _exact(query):
        return None
    output, lse = kernel(query, key, value, 0.0, True, scale=scaling)[:2]
    return output.transpose(1, 2).contiguous(), lse


_KERNELS = {"cpu": "_scaled_dot_product_flash_attention_for_cpu", "cuda": "_scaled_dot_product_flash_attention"}


def _exact(query: Tensor) -> bool:
    if query.device.type == "cuda":
        return query.shape[3] in _CUDA_WIDTHS
    return query.dtype in (torch.float32, torch.float64)
