"""NestedKV's score in PyTorch, on the device of the keys, in float64. Window sums are running sums of differences.

The working memory is six times the keys of one head in float64, and eight float64 numbers per token and head. Heads
with less than an eighth of the numbers of a block are processed together (`heads_at_once`).
"""

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from accelerated.torch_device.device import download, heads_at_once, on_device
from spec.arrays import Matrix
from spec.backend import NestedKVStages
from spec.errors import SpecError
from spec.parameters import NestedKVParameters
from spec.policy import DeviceArray, LayerView
from spec.validate import check_keys

__all__ = ["anomaly_score", "nestedkv_score"]

NEGLIGIBLE = 2.0**-16
LARGEST_EXPONENT = 700.0


def anomaly_score(k: DeviceArray, parameters: NestedKVParameters) -> Matrix:
    """Return the score a* (H_kv, n) of one layer's keys (H_kv, n, d).

    Implements: NK-SCORE

    Raises:
        SpecError: if the keys have a wrong shape, type or value, or if a key is zero.
    """
    if isinstance(k, np.ndarray):
        check_keys(k)
        # A dtype wider than float64 can represent lengths that float64 cannot represent.
        if k.dtype.itemsize > 8:
            k = np.ldexp(k, -np.frexp(np.abs(k).max(axis=2, keepdims=True))[1]).astype(np.float64)
    elif not (isinstance(k, Tensor) and k.is_floating_point() and k.ndim == 3 and k.numel()):
        raise SpecError("k", getattr(k, "shape", type(k).__name__), "must be floating-point keys (heads, tokens, d)")
    keys = on_device(k)
    _refuse(~torch.isfinite(keys).all(dim=2), keys, "must be finite, and is not")
    _refuse((keys == 0).all(dim=2), keys, "a zero key has no direction")
    result: Matrix = download(scores(keys, parameters), np.float64)
    return result


def _refuse(lost: Tensor, keys: Tensor, reason: str) -> None:
    if bool(lost.any()):
        head, token = lost.nonzero()[0].tolist()
        key = keys[head, token]
        raise SpecError("k", key[key.isfinite().int().argmin()].item(), f"{reason}: KV head {head}, token {token}")


def nestedkv_score(view: LayerView, stages: NestedKVStages, parameters: NestedKVParameters) -> Tensor:
    """Return the score a* of a layer as a tensor on the device. The score is NaN if a key is zero."""
    return scores(on_device(view.k), parameters)


def scores(k: Tensor, p: NestedKVParameters) -> Tensor:
    """Implements: NK-BLEND, NK-SURPRISE, NK-ROUTE"""
    a = min_max(torch.cat([anomalies(heads, p) for heads in torch.split(k, max(1, heads_at_once(k) // 8))], dim=1))
    gain = p.beta * gap(a, max(1, math.floor(p.p * a.shape[2])))
    w = torch.exp(gain - (gain.amax(dim=0) - LARGEST_EXPONENT).clamp(min=0.0))
    w = w * torch.tensor(p.w0, dtype=torch.float64).to(k.device, non_blocking=True)[:, None]
    blended = ((w / w.sum(dim=0))[:, :, None] * a).sum(dim=0)
    s = min_max((a - a.mean(dim=0)).square_().mean(dim=0).sqrt_())
    s = (s - s.mean(dim=1, keepdim=True)).clamp(min=0.0)
    alpha = torch.sigmoid(p.kappa * (s - p.tau))
    return (1.0 - alpha) * blended + alpha * a.amax(dim=0)


def anomalies(k: Tensor, p: NestedKVParameters) -> Tensor:
    """Return the negative cosines of keys (h, n, d) with the stable, episodic and current memory, (3, h, n).

    Implements: NK-UNIT-KEYS, NK-STABLE, NK-EPISODIC, NK-CURRENT, NK-ANOMALY
    """
    (h, n, d), unit = k.shape, k.double()
    unit /= torch.linalg.vector_norm(k, ord=torch.inf, dim=2, keepdim=True)
    unit /= torch.linalg.vector_norm(unit, dim=2, keepdim=True)
    b = min(max(n // p.blocks, p.b_min), p.b_max)
    at = torch.arange(n, device=k.device)
    blocks = (pad(unit, (0, 0, 0, -n % b)) if n % b else unit).view(h, -1, b, d)
    episodic = blocks.sum(dim=2, keepdim=True)
    stable = episodic.sum(dim=1)
    # A GPU computes running sums in parallel only along contiguous numbers. Each key that leaves the window is
    # subtracted where the key that enters the window is added.
    current = unit.mT.clone(memory_format=torch.contiguous_format)
    current[..., p.W :] -= unit.mT[..., : -p.W]
    current = current.cumsum_(dim=2).mT
    return -torch.stack([
        cosine(torch.matmul(unit, stable.mT)[..., 0], stable, n),
        cosine(
            torch.matmul(blocks, episodic.mT)[..., 0], episodic, (n - at[::b, None]).clamp(max=b)
        ).flatten(1)[:, :n],
        cosine((unit * current).sum(dim=2), current, (at + 1).clamp(max=p.W)),
    ])


def cosine(product: Tensor, total: Tensor, count: Tensor | int) -> Tensor:
    """Return product / length of `total`, the sum of `count` unit keys. The result is 0 if `total` is negligible."""
    length = torch.linalg.vector_norm(total, dim=-1)
    return torch.where(length > NEGLIGIBLE * count, product / length, 0.0)


def min_max(a: Tensor) -> Tensor:
    """Implements: NK-MIN-MAX"""
    above = a - a.amin(dim=-1, keepdim=True)
    spread = above.amax(dim=-1, keepdim=True)
    return torch.where(spread > NEGLIGIBLE, above / spread, torch.where(spread >= 0, 0.0, spread))


def gap(a: Tensor, m: int) -> Tensor:
    """Implements: NK-GAP"""
    return a.topk(m, dim=2).values.mean(dim=2) - a.topk(m, dim=2, largest=False).values.mean(dim=2)
