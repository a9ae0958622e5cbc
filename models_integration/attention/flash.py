"""Attention and its log-sum-exp in one pass, with the kernel that PyTorch would select."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

__all__ = ["flash_attention"]

# Head sizes that the kernel accepts unchanged. On CUDA, torch first pads all other sizes.
_CUDA_WIDTHS = range(8, 257, 8)
# `scaled_dot_product_attention` does not return the log-sum-exp (torch 2.13), so kvspec calls these private kernels.
_KERNELS = {"cpu": "_scaled_dot_product_flash_attention_for_cpu", "cuda": "_scaled_dot_product_flash_attention"}


def flash_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any],
) -> tuple[Tensor, Tensor] | None:
    """Compute causal attention without a mask: output (rows, n, H, d) and log-sum-exp (rows, H, n) in one pass.

    The result is None unless `scaled_dot_product_attention` would select the same kernel for the same call. The output
    therefore equals the model's own output bit for bit. For half precision on a CPU the result is None, because this
    kernel rounds the logits.
    """
    n, scaling = query.shape[2], options.get("scaling")
    plain = (
        1 < n == key.shape[2] and key.shape == value.shape and not options.get("dropout")
        and options.get("is_causal", None) in (None, True) and getattr(module, "is_causal", True)
        and all(options.get(name) is None for name in ("softcap", "position_bias", "s_aux"))
    )
    kernel = getattr(torch.ops.aten, _KERNELS.get(query.device.type, ""), None)
    if not plain or kernel is None or torch.is_autocast_enabled(query.device.type):
        return None
    grouped = query.shape[1] != key.shape[1]
    # torch 2.13 has no public function that returns the kernel of a call.
    chosen = torch._fused_sdp_choice(query, key, value, None, 0.0, True, scale=scaling, enable_gqa=grouped)
    if chosen != SDPBackend.FLASH_ATTENTION.value or not _exact(query):
        return None
    output, lse = kernel(query, key, value, 0.0, True, scale=scaling)[:2]
    return output.transpose(1, 2).contiguous(), lse


def _exact(query: Tensor) -> bool:
    if query.device.type == "cuda":
        return query.shape[3] in _CUDA_WIDTHS
    return query.dtype in (torch.float32, torch.float64)
