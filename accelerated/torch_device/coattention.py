"""Stage S1 (Section 3.2) and the norms of cached keys in PyTorch, on the device of the tensors.

`coattention` copies the result to the host once. Weights are float32, or float64 if q and k are float64. Sums over
queries are float64. The working memory contains two blocks of weights (for `block_rows` queries each), the keys in
float32, and four (C, C) matrices for a chunk.
"""

import numpy as np
import torch
from torch import Tensor

from accelerated.torch_device.attention import softmax
from accelerated.torch_device.device import block_rows, download, on_device
from accelerated.torch_device.records import Neighbours, to_host
from spec.arrays import IntVector, Vector
from spec.errors import SpecError
from spec.parameters import CrystalCacheParameters
from spec.policy import DeviceArray
from spec.records import CoAttention
from spec.validate import (
    check_attention_inputs,
    check_attention_tensors,
    check_keys,
    check_lse,
    check_positions,
    check_shapes,
    check_sinks,
)

__all__ = ["coattention", "inverse_key_norms", "inverse_norms", "neighbours", "refuse"]


def coattention(
    q: DeviceArray, k: DeviceArray, positions: IntVector, parameters: CrystalCacheParameters, scaling: float,
    softcap: float | None, lse: DeviceArray | None = None, sinks: DeviceArray | None = None,
) -> CoAttention:
    """Return the result of S1. A given lse is checked but not used.

    Implements: CC-COATTENTION

    Raises:
        SpecError: if q, k, lse or sinks have a wrong shape, type or value.
    """
    _check_form(q, k, lse)
    check_positions(positions, k.shape[1])
    result = to_host(*neighbours(q, k, parameters, scaling, softcap, lse, sinks), positions)
    if result is None:
        refuse(q, k, lse, sinks)
        raise AssertionError("all values are finite, but the device found a value that is not")
    return result


def refuse(
    q: DeviceArray, k: DeviceArray, lse: DeviceArray | None = None, sinks: DeviceArray | None = None,
) -> None:
    """Raise a SpecError about a value that is not finite. The host waits for each tensor."""
    check_attention_tensors(q, k)
    check_sinks(sinks, q)


def neighbours(
    q: DeviceArray, k: DeviceArray, parameters: CrystalCacheParameters, scaling: float, softcap: float | None,
    lse: DeviceArray | None = None, sinks: DeviceArray | None = None,
) -> tuple[Neighbours, Tensor]:
    """Return the result of S1 as tensors, and a mask (1,) that is True if q, k and sinks are finite.

    Implements: CC-COATTENTION

    Raises:
        SpecError: if q, k, lse or sinks have a wrong shape or type, or if an array has a wrong value.
    """
    finite, rows = _rows(q, k, parameters, scaling, softcap, lse, sinks)
    widths = [1, parameters.k_intra, parameters.k_intra, parameters.k_cross, parameters.k_cross]
    S, intra, intra_weight, cross, cross_weight = torch.split(rows, widths, dim=1)
    return Neighbours(S[:, 0], intra.long(), intra_weight, cross.long(), cross_weight), finite


def _rows(
    q: DeviceArray, k: DeviceArray, p: CrystalCacheParameters, scaling: float, softcap: float | None,
    lse: DeviceArray | None, sinks: DeviceArray | None,
) -> tuple[Tensor, Tensor]:
    """Return a mask (1,) that is True if q, k and sinks are finite, and the columns of `_chunk` for all tokens."""
    _check_form(q, k, lse)
    check_sinks(sinks, q, read=False)
    n, keys = q.shape[1], on_device(k)
    before = k.shape[1] - n
    queries = q if isinstance(q, Tensor) else on_device(q, keys.device)
    finite = queries.isfinite().all() & keys.isfinite().all()
    if isinstance(sinks, Tensor):
        finite = finite & sinks.to(keys.device, non_blocking=True).isfinite().all()
    return finite[None], torch.cat([
        _chunk(queries[:, c : c + p.C], keys[:, : before + min(n, c + p.C)], p, scaling, softcap, sinks)
        for c in range(0, n, p.C)
    ])


def _check_form(q: DeviceArray, k: DeviceArray, lse: DeviceArray | None) -> None:
    """Check types and shapes, and the values of NumPy arrays. Values of tensors are checked later, on the device."""
    if isinstance(q, np.ndarray):
        check_attention_inputs(q, k)
        check_lse(lse, q)
        return
    for name, tensor in (("q", q), ("k", k)):
        if not isinstance(tensor, Tensor) or tensor.ndim != 3 or not (tensor.is_floating_point() and tensor.numel()):
            shape = getattr(tensor, "shape", type(tensor).__name__)
            raise SpecError(name, shape, "must be a floating-point tensor (heads, tokens, d), no axis empty")
    check_shapes(q, k)
    if lse is not None and tuple(lse.shape) != tuple(q.shape[:2]):
        raise SpecError("lse", tuple(lse.shape), f"must be a tensor (heads, queries), {tuple(q.shape[:2])}")


def _chunk(
    q: Tensor, k: Tensor, p: CrystalCacheParameters, scaling: float, softcap: float | None, sinks: DeviceArray | None,
) -> Tensor:
    """Return salience, and slots and weights of both lists of neighbours, (Q, _), for the tokens of one chunk.

    q (H, Q, d) contains the queries of the chunk, and k all keys up to the last key of the chunk.

    Implements: CC-SALIENCE, CC-MEAN-SALIENCE, CC-ROW-NORM, CC-INTRA, CC-CROSS
    """
    H, Q = q.shape[:2]
    first, size = k.shape[1] - Q, block_rows(k, H * k.shape[1])
    h, within, cross = torch.zeros(H, Q, dtype=torch.float64, device=k.device), list[Tensor](), list[Tensor]()
    for start in range(0, Q, size):
        A = attention(q[:, start : start + size].to(k.dtype), k, first + start, scaling, softcap, sinks)
        h += A[:, :, first:].sum(dim=1, dtype=torch.float64)
        mean = A.mean(dim=0)
        within.append(mean[:, first:])
        cross.append(strongest(mean[:, :first], p.k_cross, p.tau_cross))
    rows = torch.cat(within)
    rows = rows / (torch.linalg.vector_norm(rows, dim=1, keepdim=True) + p.epsilon)
    intra = strongest(torch.matmul(rows, rows.mT).fill_diagonal_(-1.0), p.k_intra, p.tau_intra)
    intra[:, : p.k_intra] += torch.where(intra[:, : p.k_intra] < 0, 0, first)
    top = torch.sort(h, dim=0, descending=True).values[: p.k_heads]
    S = top.sum(dim=0) / (max(1, len(top)) if p.heads == "mean" else 1)
    return torch.cat([S.clamp(p.M_min, p.M_max)[:, None], intra, torch.cat(cross)], dim=1)


def attention(
    q: Tensor, k: Tensor, at: int, scaling: float, softcap: float | None, sinks: DeviceArray | None,
) -> Tensor:
    """Return the causal attention weights (H, rows, keys) of queries (H, rows, d). The first query is token `at`.

    Implements: CC-ATTENTION
    """
    S = torch.matmul(q.reshape(len(k), -1, q.shape[2]), k.mT).mul_(scaling).view(*q.shape[:2], -1)
    S = S if softcap is None else S.div_(softcap).tanh_().mul_(softcap)
    slot = torch.arange(k.shape[1], device=k.device)
    return softmax(S.masked_fill_(slot > slot[at : at + q.shape[1], None], -torch.inf), sinks)


def strongest(weights: Tensor, k: int, tau: float) -> Tensor:
    """Return columns, then values, of the k largest weights above tau in each row, as one tensor (rows, 2 k).

    An unused entry has column -1 and weight 0. Weights are compared in float32. If weights are equal, the lower column
    comes first. To compare both at once, the bits of weight and column are combined into one integer.
    """
    order = (weights.float().view(torch.int32).long() << 32) - torch.arange(weights.shape[1], device=weights.device)
    columns = torch.topk(order, min(k, weights.shape[1]), dim=1).indices
    best = weights.gather(1, columns)
    passes = best.float() > float(np.float32(tau))
    result = torch.zeros(len(weights), 2, k, dtype=torch.float64, device=weights.device)
    result[:, 0] = -1
    result[:, 0, : columns.shape[1]] = torch.where(passes, columns, -1).double()
    result[:, 1, : columns.shape[1]] = torch.where(passes, best, 0.0).double()
    return result.flatten(1)


def inverse_key_norms(k: DeviceArray) -> Vector:
    """Return each token's mean of 1 / ||k|| over the KV heads, (n,) in float64. A zero key gives inf.

    Implements: CC-KEY-NORM

    Raises:
        SpecError: if the keys have a wrong shape, type or value.
    """
    if not isinstance(k, Tensor):
        check_keys(k)
    result: Vector = download(inverse_norms(on_device(k)), np.float64)
    return result


def inverse_norms(keys: Tensor) -> Tensor:
    """Return the result of `inverse_key_norms` as a tensor."""
    wide = keys.double()
    largest = wide.abs().amax(dim=2)
    inverse = 1.0 / torch.linalg.vector_norm(wide / largest[:, :, None], dim=2) / largest
    return torch.where(largest > 0, inverse, torch.inf).mean(dim=0)
