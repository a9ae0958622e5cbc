"""Attention that keys receive (H2O, TOVA, KVzip, Expected Attention) in PyTorch, without custom kernels.

Custom kernels would not be faster. A decode step needs only four small calls, and matrix products take most of the time
of a prompt. Products and softmax are float32. Sums over blocks and all d x d matrices are float64.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from accelerated.torch_device.device import block_rows, default_device, download, heads_at_once, upload
from spec.arrays import IntVector, Matrix, Vector
from spec.policy import DeviceArray

__all__ = [
    "causal_softmax",
    "expected_attention",
    "expected_weights",
    "largest",
    "largest_attention",
    "received",
    "received_attention",
    "softmax",
    "weights_from_statistics",
]


def received_attention(
    q: DeviceArray, k: DeviceArray, scaling: float, softcap: float | None, sinks: DeviceArray | None = None,
) -> Matrix:
    """Return the attention (H_kv, n) that each key of k (H_kv, n, d) receives from the last m queries q (H, m, d).

    Implements: PO-OBSERVED-ATTENTION
    """
    result: Matrix = download(received(_on_device(q), _on_device(k), scaling, softcap, sinks), np.float64)
    return result


def received(
    q: Tensor, k: Tensor, scaling: float, softcap: float | None, sinks: DeviceArray | None = None,
) -> Tensor:
    """Return the result of `received_attention` as a tensor on the device of the keys."""
    total = torch.zeros(k.shape[:2], dtype=torch.float64, device=k.device)
    for _, weights in _blocks(q, k, scaling, softcap, sinks):
        total[:, : weights.shape[-1]] += weights.sum(dim=(1, 2))
    return total


def largest_attention(
    q: DeviceArray, k: DeviceArray, norms: Vector, scaling: float, softcap: float | None,
    sinks: DeviceArray | None = None,
) -> Matrix:
    """Divide each attention weight by the norm of the query, and return each key's largest quotient, (H, n).

    The keys are k (H_kv, n, d), and the queries q (H, m, d). `norms` (m,) contains the norm of each query.

    Implements: PO-KVZIP, PO-KVZIP-PLUS
    """
    q = _on_device(q)
    result: Matrix = download(
        largest(q, _on_device(k), upload(norms, np.float64, q.device), scaling, softcap, sinks), np.float64
    )
    return result


def largest(
    q: Tensor, k: Tensor, norms: Tensor, scaling: float, softcap: float | None, sinks: DeviceArray | None = None,
) -> Tensor:
    """Return the result of `largest_attention` as a tensor on the device of the keys."""
    shares = (norms.min() / norms).float()[:, None]
    most = torch.zeros(len(q), k.shape[1], device=q.device)
    for rows, weights in _blocks(q, k, scaling, softcap, sinks):
        result = most[:, : weights.shape[-1]]
        torch.maximum(result, (weights * shares[rows]).amax(dim=2).view_as(result), out=result)
    return most.double() / norms.min()


def _blocks(
    q: Tensor, k: Tensor, scaling: float, softcap: float | None, sinks: DeviceArray | None,
) -> Iterator[tuple[slice, Tensor]]:
    """Yield blocks of queries, and the weights (H_kv, group, rows, visible) on the keys that each block attends to."""
    keys = k.transpose(1, 2)
    (H, m, d), (H_kv, _, n) = q.shape, keys.shape
    size = block_rows(q, H * n)
    for first in range(0, m, size):
        rows = q[:, first : first + size].float() * scaling
        count = rows.shape[1]
        visible = n - m + first + count
        S = torch.matmul(rows.reshape(H_kv, -1, d), keys[:, :, :visible].float())
        S = S if softcap is None else softcap * torch.tanh(S / softcap)
        yield slice(first, first + size), causal_softmax(S.view(H_kv, H // H_kv, count, visible), sinks)


def causal_softmax(S: Tensor, sinks: DeviceArray | None) -> Tensor:
    """Return the causal softmax of logits (..., w, n) of the last w of n queries. The logits are overwritten."""
    w, n = S.shape[-2:]
    S[..., n - w :].masked_fill_(torch.ones(w, w, dtype=torch.bool, device=S.device).triu(1), -torch.inf)
    return softmax(S, sinks)


def softmax(S: Tensor, sinks: DeviceArray | None) -> Tensor:
    """Return the softmax of logits (heads, queries, n), (KV heads, group, queries, n) or (heads, n).

    An attention sink adds a term to the denominator, but no column to the result.
    """
    if sinks is None:
        return torch.softmax(S, dim=-1)
    logits = sinks.to(S) if isinstance(sinks, Tensor) else upload(sinks, np.float64, S.device).to(S)
    heads = S.shape[: max(1, S.ndim - 2)]
    beside = logits.view(*heads, *[1] * (S.ndim - len(heads))).expand(*S.shape[:-1], 1)
    return torch.softmax(torch.cat([S, beside], dim=-1), dim=-1)[..., :-1]


def expected_attention(
    q: DeviceArray, k: DeviceArray, v: DeviceArray, at: IntVector, ahead: IntVector, inv_freq: Vector, factor: float,
    scaling: float, sinks: DeviceArray | None = None,
) -> Matrix:
    """Return expected attention weight times norm of the value, (H_kv, n), for keys k and values v (H_kv, n, d).

    Implements: PO-EXPECTED-ATTENTION
    """
    result: Matrix = download(expected_weights(q, k, v, at, ahead, inv_freq, factor, scaling, sinks), np.float64)
    return result


@torch.no_grad()
def expected_weights(
    q: DeviceArray, k: DeviceArray, v: DeviceArray, at: IntVector, ahead: IntVector, inv_freq: Vector, factor: float,
    scaling: float, sinks: DeviceArray | None = None,
) -> Tensor:
    """Return the result of `expected_attention` as a tensor on the device of the keys."""
    q, k, v = _on_device(q), _on_device(k), _on_device(v)
    turn = upload(at, np.float64, q.device)[:, None] * upload(inv_freq, np.float64, q.device)
    cos, sin = (torch.cos(turn) / factor).float(), (torch.sin(turn) / factor).float()
    each = [_query_statistics(queries, cos, sin) for queries in torch.split(q, heads_at_once(q))]
    mean, covariance = (torch.cat(part) for part in zip(*each, strict=True))
    return weights_from_statistics(mean, covariance, k, v, ahead, inv_freq, factor, scaling, sinks)


def weights_from_statistics(
    mean: DeviceArray, covariance: DeviceArray, k: DeviceArray, v: DeviceArray, ahead: IntVector, inv_freq: Vector,
    factor: float, scaling: float, sinks: DeviceArray | None = None,
) -> Tensor:
    """Implements: PO-EXPECTED-ATTENTION, PO-EXPECTED-ATTENTION-STATS"""
    k, v = _on_device(k), _on_device(v)
    mean, covariance = (x if isinstance(x, Tensor) else upload(x, np.float64, k.device) for x in (mean, covariance))
    pairs = upload(inv_freq, np.float64, k.device)
    R, G = _mean_rotation(upload(ahead, np.float64, k.device), pairs, factor), len(mean) // len(k)
    linear, quadratic = (mean @ R.T * scaling).float(), (R @ covariance @ R.T * (scaling**2 / 2)).float()
    size, result = max(1, heads_at_once(k) // G), []
    for first in range(0, len(k), size):
        heads, queries = slice(first, first + size), slice(first * G, (first + size) * G)
        z = _expected_logits(linear[queries], quadratic[queries], k[heads].float())
        weights = softmax(z.flatten(0, 1), None if sinks is None else sinks[queries]).view_as(z)
        size_of_values = torch.linalg.vector_norm(v[heads], dim=2, dtype=torch.float64)
        result.append(weights.mean(dim=1, dtype=torch.float64) * size_of_values)
    return torch.cat(result)


def _query_statistics(q: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean (h, d) and covariance (h, d, d) of the queries (h, m, d) of h heads without rotation, in float64."""
    back = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    (first, second), (low, high) = q.chunk(2, dim=2), back.chunk(2, dim=2)
    torch.mul(first, cos, out=low).addcmul_(second, sin)
    torch.mul(second, cos, out=high).addcmul_(first, sin, value=-1)
    mean = back.mean(dim=1, dtype=torch.float64)
    back -= mean.float()[:, None]
    return mean, torch.matmul(back.mT, back).double() / q.shape[1]


def _expected_logits(linear: Tensor, quadratic: Tensor, k: Tensor) -> Tensor:
    """Return the expected logit of each key, (h, G, n), for G query heads on each head of the keys (h, n, d).

    The logit of a key x is x^T A x + b^T x. `quadratic` (h G, d, d) contains A and `linear` (h G, d) contains b. One
    product of the keys serves all query heads of a group.
    """
    h, n, d = k.shape
    A = quadratic.view(h, -1, d, d).transpose(1, 2).reshape(h, d, -1)
    product = torch.baddbmm(linear.view(h, 1, -1), k, A).view(h, n, -1, d)
    return product.mul_(k[:, :, None]).sum(dim=3).mT.contiguous()


def _mean_rotation(ahead: Tensor, inv_freq: Tensor, factor: float) -> Tensor:
    """Return the mean of the RoPE rotation matrices over the positions `ahead`, (d, d), float64."""
    angle = ahead[:, None] * inv_freq
    cos, sin = (torch.diag(factor * part.mean(dim=0)) for part in (torch.cos(angle), torch.sin(angle)))
    return torch.cat([torch.cat([cos, -sin], dim=1), torch.cat([sin, cos], dim=1)])


def _on_device(x: DeviceArray) -> Tensor:
    """Return a tensor unchanged, or a copy of an array on the default device in float32."""
    return x if isinstance(x, Tensor) else upload(x, np.float32, default_device())
