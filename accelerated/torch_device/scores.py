"""Scores of the published policies. Each function has the name and the arguments of the function in the reference.

A function computes a score on the device of the keys, and the score stays on the device. Scores are float32, or float64
if the keys are float64. Sums over more tokens than a window are float64. The working memory contains the attention
weights of a window, (H, W, n), or a block of `block_rows` rows.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any, ParamSpec

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import max_pool1d, pad

from accelerated.torch_device.attention import (
    causal_softmax,
    expected_weights,
    largest,
    softmax,
    weights_from_statistics,
)
from accelerated.torch_device.curdkv import curdkv_score
from accelerated.torch_device.device import block_rows, download, on_device, upload
from accelerated.torch_device.fast_kvzip import gate_score
from accelerated.torch_device.kvzap import kvzap_score
from accelerated.torch_device.received import h2o_score, tova_score
from accelerated.torch_device.selection import ranks
from accelerated.torch_device.triattention import largest_z_scores
from spec.arrays import Matrix
from spec.errors import SpecError
from spec.policy import DeviceArray, LayerView

__all__ = ["SCORES", "SCORES_OF_LAYERS"]

P = ParamSpec("P")


def observed(view: LayerView, W: int) -> Tensor:
    """Return the attention weights of the last W queries on all keys, (H, w, n): PO-OBSERVED-ATTENTION."""
    k, n = on_device(view.k), view.k.shape[1]
    return causal_softmax(logits(on_device(view.q, k.device).to(k.dtype)[:, -min(W, n) :], k, view), view.sinks)


def logits(q: Tensor, k: Tensor, view: LayerView) -> Tensor:
    """Return the logits (H, w, n) of queries q (H, w, d) and keys k (H_kv, n, d)."""
    S = torch.matmul(q.reshape(len(k), -1, q.shape[2]) * view.scaling, k.mT).view(*q.shape[:2], k.shape[1])
    return S if view.softcap is None else view.softcap * torch.tanh(S / view.softcap)


def before(A: Tensor) -> Tensor:
    """Return the attention weights on the keys before the window."""
    return A[:, :, : A.shape[2] - A.shape[1]]


def groups(X: Tensor, H_kv: int) -> Tensor:
    """Return the array with the query heads grouped by KV head: (H_kv, G, ...)."""
    return X.view(H_kv, len(X) // H_kv, *X.shape[1:])


def max_pool(x: Tensor, kernel: int) -> Tensor:
    """Replace each entry of x (rows, n) by the largest of the `kernel` entries around this entry (PO-POOL)."""
    return max_pool1d(x, kernel, 1, kernel // 2) if x.shape[1] else x


def average_pool(x: Tensor, kernel: int) -> Tensor:
    """Replace each entry of x (rows, n) by the sum of the `kernel` entries around it, divided by `kernel` (PO-POOL)."""
    return pad(x, (kernel // 2, kernel // 2)).unfold(1, kernel, 1).mean(dim=2) if x.shape[1] else x


def with_window(past: Tensor, n: int) -> Tensor:
    """Return the scores of all n tokens, with NaN for the tokens of the window."""
    return pad(past, (0, n - past.shape[1]), value=torch.nan)


def snapkv_score(view: LayerView, W: int, kernel: int) -> Tensor:
    """Implements: PO-SNAPKV"""
    A = observed(view, W)
    return with_window(groups(max_pool(before(A).sum(dim=1), kernel), len(view.k)).mean(dim=1), A.shape[2])


def adakv_score(view: LayerView, W: int, kernel: int) -> Tensor:
    """Implements: PO-ADAKV"""
    A = observed(view, W)
    return with_window(max_pool(groups(before(A).mean(dim=1), len(view.k)).mean(dim=1), kernel), A.shape[2])


def morphkv_score(view: LayerView, W: int, fusion: str) -> Tensor:
    """Implements: PO-MORPHKV"""
    A = observed(view, W)
    fused = before(A).sum(dim=1) if fusion == "sum" else before(A).amax(dim=1)
    return with_window(groups(fused, len(view.k)).mean(dim=1), A.shape[2])


def window_members(view: LayerView, W: int) -> Tensor:
    """Implements: PO-CHUNKKV"""
    A = observed(view, W)
    return with_window(before(A).sum(dim=(0, 1), dtype=torch.float64)[None], A.shape[2])


def all_members(view: LayerView, received: object = None) -> Tensor:
    """Implements: PO-CHUNKKV-DESCRIBED"""
    return h2o_score(view).sum(dim=0, keepdim=True)


def keydiff_score(view: LayerView) -> Tensor:
    """Implements: PO-KEYDIFF"""
    k = on_device(view.k)
    unit = k / k.abs().amax(dim=2, keepdim=True)  # scaled keys, so that no square overflows or vanishes
    unit /= torch.linalg.vector_norm(unit, dim=2, keepdim=True)
    anchor = unit.mean(dim=1, keepdim=True, dtype=torch.float64).to(unit.dtype)
    length = torch.linalg.vector_norm(anchor, dim=2, keepdim=True)
    cosine: Tensor = torch.matmul(unit, torch.where(length > 0, anchor / length, 0.0).mT)[:, :, 0]
    return -cosine


def knorm_score(view: LayerView) -> Tensor:
    """Implements: PO-KNORM"""
    norm: Tensor = torch.linalg.vector_norm(on_device(view.k), dim=2)
    return -norm


def filter_score(k: DeviceArray, filters: Matrix) -> Tensor:
    """Implements: PO-Q-FILTERS"""
    keys = on_device(k)
    directions = upload(filters, np.float64, keys.device).to(keys.dtype)
    projections: Tensor = torch.matmul(keys, directions[:, :, None])[:, :, 0]
    return projections


def caote_score(view: LayerView) -> Tensor:
    """Implements: PO-CAOTE"""
    alpha, v = groups(observed(view, 1)[:, 0], len(view.k)).mean(dim=1), on_device(view.v)
    distance = torch.linalg.vector_norm(torch.matmul(alpha[:, None], v) - v, dim=2)
    rest = 1.0 - alpha
    return torch.where(rest > 0, alpha * distance / rest, torch.inf)


def lagkv_score(view: LayerView, N_sink: int, lag: int) -> Tensor:
    """Implements: PO-LAGKV"""
    k, v = on_device(view.k), on_device(view.v)
    H_kv, n = k.shape[:2]
    parts = max(1, (n - N_sink) // lag)
    tail = min(n, N_sink + (parts - 1) * lag)
    scores = torch.full((H_kv, n), torch.nan, dtype=torch.float64, device=k.device)
    scores[:, tail:] = torch.arange(1, n - tail + 1, device=k.device)
    if parts > 1:
        judged = (x[:, N_sink : tail + lag].reshape(H_kv, parts, lag, -1) for x in (k, v))
        scores[:, N_sink:tail] = -ranks(torch.stack([_spread(x) for x in judged]).sum(dim=0)).flatten(1).double()
    return scores


def _spread(x: Tensor) -> Tensor:
    """Scale channels by the next partition's range. Return the softmax of the tokens' deviations per partition."""
    low, high = x[:, 1:].amin(dim=2, keepdim=True), x[:, 1:].amax(dim=2, keepdim=True)
    scaled = (x[:, :-1] - low) / torch.where(high > low, high - low, torch.inf)
    scaled -= scaled.mean(dim=3, keepdim=True)
    return torch.softmax(torch.linalg.vector_norm(scaled, dim=3) / (x.shape[3] - 1) ** 0.5, dim=-1)


def rkv_score(view: LayerView, W: int, kernel: int, lam: float) -> Tensor:
    """Implements: PO-RKV"""
    k = on_device(view.k)
    q = on_device(view.q, k.device).to(k.dtype)[:, -W:]
    n, past = k.shape[1], k.shape[1] - q.shape[1]
    if past == 0:
        return torch.full(k.shape[:2], torch.nan, device=k.device)
    largest = groups(logits(q, k[:, :past], view), len(k)).amax(dim=1)
    sinks = None if view.sinks is None else groups(on_device(view.sinks, k.device), len(k)).amax(dim=1)
    importance = max_pool(softmax(largest, sinks).mean(dim=1), kernel)
    redundancy = torch.stack([_redundancy(head) for head in k])[:, :past]
    return with_window(lam * importance - (1 - lam) * redundancy, n)


def _redundancy(k: Tensor) -> Tensor:
    """Compute each key's mean cosine with all different keys (n, d) of the head. Return the softmax of the means.

    The mean of a row excludes one column. A sum of cosines is a product with the sum of the unit keys. The excluded
    cosines are summed as integers, so that the order of addition has no effect.
    """
    unit = k / (torch.linalg.vector_norm(k, dim=1, keepdim=True) + 1e-8)
    column, at = _last_similar(unit), torch.arange(len(k), device=k.device)
    left_out = (unit * unit[column]).sum(dim=1).masked_fill(column == at, 0.0).double() * 2**40
    left_out = torch.zeros_like(column).scatter_add_(0, column, left_out.long()).double() / 2**40
    total = torch.matmul(unit, unit.sum(dim=0, dtype=torch.float64).to(unit.dtype)) - (unit * unit).sum(dim=1)
    return torch.softmax((total - left_out) / len(k), dim=0)


def _last_similar(unit: Tensor) -> Tensor:
    """Return the index of the last different key with a cosine above 1/2, or 0 if there is none, for each key, (n,)."""
    n, number = len(unit), torch.arange(1, len(unit) + 1, dtype=unit.dtype, device=unit.device)
    last = torch.zeros_like(number)
    # Six passes read a block after the product, so half a block is faster on a CPU: the block stays in the cache.
    for first in range(0, n, size := block_rows(unit, 2 * n)):
        rows, end = slice(first, first + size), min(n, first + size)
        similar = torch.matmul(unit[rows], unit[:end].T)
        similar.diagonal(first).zero_()
        last[rows] = similar.gt_(0.5).mul_(number[:end]).amax(dim=1)
        last[:end] = torch.maximum(last[:end], similar.gt_(0.5).mul_(number[rows, None]).amax(dim=0))
    return (last - 1).clamp(min=0).long()


def value_range(v: DeviceArray) -> Tensor:
    """Implements: PO-VASE"""
    v = on_device(v)
    spread: Tensor = v.amax(dim=2) - v.amin(dim=2)
    return spread


def window_attention(view: LayerView, W: int, kernel: int) -> Tensor:
    """Implements: PO-VASE"""
    k = on_device(view.k)
    q = on_device(view.q, k.device).to(k.dtype)[:, -W:]
    past = k[:, : k.shape[1] - q.shape[1]]
    A = softmax(logits(q, past, view), view.sinks) if past.shape[1] else q.new_zeros(*q.shape[:2], 0)
    return groups(average_pool(A.mean(dim=1), kernel), len(k)).mean(dim=1)


def value_norms(v: DeviceArray) -> Tensor:
    """Implements: PO-VATP"""
    return on_device(v).abs().sum(dim=2)


def output_size(v: DeviceArray, W_o: DeviceArray) -> Tensor:
    """Return the L1 norm of W_o v, averaged over the query heads. To save memory, W_o is converted head by head.

    Implements: PO-CRITICALKV, PO-DEFENSIVEKV
    """
    v = on_device(v)
    total = torch.zeros(v.shape[:2], dtype=torch.float64, device=v.device)
    for head, rows, output in outputs(v, W_o):
        total[head // (len(W_o) // len(v)), rows] += output.abs_().sum(dim=1)
    return total * len(v) / len(W_o)


def outputs(v: Tensor, W_o: DeviceArray) -> Iterator[tuple[int, slice, Tensor]]:
    """Yield the projected values W_o v, (rows, hidden), of each query head and block of tokens."""
    for head, weights in enumerate(W_o):
        projection, values = on_device(weights, v.device).to(v.dtype), v[head // (len(W_o) // len(v))]
        for first in range(0, len(values), size := block_rows(v, projection.shape[1])):
            yield head, slice(first, first + size), torch.matmul(values[first : first + size], projection)


def defensive_score(view: LayerView, W_o: DeviceArray, B: int, W: int, kernel: int) -> Tensor:
    """Implements: PO-DEFENSIVEKV"""
    A, H_kv, n = observed(view, W), len(view.k), view.k.shape[1]
    if n == A.shape[1]:
        return torch.full((H_kv, n), torch.nan, device=A.device)
    A = before(A)
    size = output_size(on_device(view.v)[:, : A.shape[2]], W_o)
    scores = _defensive_maximum(A, kernel, H_kv) * (size / size.sum(dim=0))
    mean = groups(A.mean(dim=1), H_kv).mean(dim=1)
    share = mean / mean.sum(dim=1, keepdim=True)
    covered, order = torch.sort(share, dim=1, descending=True, stable=True)
    count = (covered.cumsum(dim=1) < 0.9 - A[:, :, -W:].sum(dim=2).mean()).sum(dim=1, keepdim=True)
    first = torch.arange(A.shape[2], device=A.device) < count.clamp(max=max(0, B - W))
    first = torch.zeros_like(first).scatter_(1, order, first)
    return with_window(torch.where(first, scores.max(), scores), n)


def _defensive_maximum(A: Tensor, kernel: int, H_kv: int) -> Tensor:
    """Pool weights with unchanged row sums. Return each key's maximum over heads and queries, at least the mean."""
    pooled = average_pool(A.flatten(0, 1), kernel).view_as(A)
    mass = pooled.sum(dim=2, keepdim=True)
    pooled *= torch.where(mass > 0, A.sum(dim=2, keepdim=True) / mass, 0.0)
    worst = groups(pooled, H_kv).amax(dim=(1, 2))
    return torch.maximum(worst, worst.mean(dim=1, keepdim=True))


def cake_layer(
    view: LayerView, W: int, kernel: int, gamma: float, tau1: float, tau2: float,
) -> tuple[Tensor, Tensor]:
    """Implements: PO-CAKE"""
    A, n = before(observed(view, W)), view.k.shape[1]
    if A.shape[2] == 0:
        return A.new_full((len(view.k), n), torch.nan), A.new_zeros(1, 1)
    mean, least = A.mean(dim=1), torch.finfo(A.dtype).tiny
    variance = (A - mean[:, None]).square_().sum(dim=1) / max(1, A.shape[1] - 1)
    pooled = groups(average_pool(mean + gamma * variance, kernel), len(view.k)).mean(dim=1)
    entropy = -(A * A.clamp(min=least).log_()).sum(dim=1).sum(dtype=torch.float64).clamp(max=0.0)
    preference = entropy ** (1 / tau1) * variance.sum(dtype=torch.float64) ** (1 / tau2)
    return with_window(pooled, n), preference[None, None]


def rehearsed(view: LayerView, N_sink: int, plus: bool, size: Tensor | float = 1.0) -> Tensor:
    """Return each key's largest (weight times `size` (H, n)) while the model repeats the key's chunk, (H_kv, n).

    If `plus` is true, each weight is divided by the norm of the query's token.
    """
    k = on_device(view.k)
    scores = torch.full(k.shape[:2], torch.nan, dtype=torch.float64, device=k.device)
    for repeat in view.repeats or ():
        chunk, norms = slice(repeat.start, repeat.stop), torch.as_tensor(repeat.norms, device=k.device)
        keys = torch.cat([k[:, :N_sink], k[:, chunk], on_device(repeat.k, k.device).to(k.dtype)], dim=1)
        norms = norms if plus else torch.ones_like(norms)
        A = largest(on_device(repeat.q, k.device), keys, norms, view.scaling, view.softcap, view.sinks)
        A = A[:, N_sink : N_sink + repeat.stop - repeat.start] * (size if isinstance(size, float) else size[:, chunk])
        scores[:, chunk] = torch.fmax(scores[:, chunk], groups(A, len(k)).amax(dim=1))
    return scores


def kvzip_score(view: LayerView, N_sink: int, largest: object = None) -> Tensor:
    """Implements: PO-KVZIP

    Raises:
        SpecError: if the model did not repeat the prompt.
    """
    if view.repeats is None:
        raise SpecError("repeats", None, "are needed: KVzip scores tokens while the model repeats the prompt")
    return rehearsed(view, N_sink, plus=False)


def kvzip_plus_score(view: LayerView, N_sink: int, W_o: DeviceArray, largest: object = None) -> Tensor:
    """Return the scores of KVzip+. All tokens of a chunk with a norm of 0 have the score NaN.

    Implements: PO-KVZIP-PLUS

    Raises:
        SpecError: if the values were not captured.
    """
    if view.v is None:
        raise SpecError("v", None, "KVzip+ needs the values, and norms above 0")
    v = on_device(view.v)
    size = torch.zeros(len(W_o), v.shape[1], dtype=torch.float64, device=v.device)
    for head, rows, output in outputs(v, W_o):
        size[head, rows] = torch.linalg.vector_norm(output, dim=1, dtype=torch.float64)
    return rehearsed(view, N_sink, plus=True, size=size)


def host_score(score: Callable[P, Tensor]) -> Callable[P, Matrix]:
    """Return a function that computes a score and copies the result to the host in float64."""
    @wraps(score)
    def run(*args: P.args, **kwargs: P.kwargs) -> Matrix:
        result: Matrix = download(score(*args, **kwargs), np.float64)
        return result

    return run


@wraps(keydiff_score)
def directed(view: LayerView) -> Matrix:
    """Return the score of KeyDiff.

    Raises:
        SpecError: if a key is zero and therefore has no direction.
    """
    result = host_score(keydiff_score)(view)
    if np.isnan(result).any():
        zero = (on_device(view.k) == 0).all(dim=2).nonzero()
        for head, token in zero.tolist():
            raise SpecError("k", 0.0, f"a zero key has no direction: KV head {head}, token {token}")
    return result


@wraps(defensive_score)
def shared(*args: Any) -> Matrix:
    """Return the score of DefensiveKV.

    Raises:
        SpecError: if the projected value of a token is zero in every head.
    """
    result, W = host_score(defensive_score)(*args), args[3]
    lost = np.isnan(result[:, : max(0, result.shape[1] - W)]).all(axis=0)
    if lost.any():
        raise SpecError(
            "v", 0.0,
            f"the projected value of token {int(np.argmax(lost))} is zero in every head, so no share can be computed",
        )
    return result


SCORES_OF_LAYERS: Mapping[str, Callable[..., Any]] = {
    score.__name__: score for score in (
        snapkv_score, adakv_score, morphkv_score, window_members, all_members, knorm_score, caote_score, lagkv_score,
        rkv_score, value_norms, output_size, h2o_score, tova_score, keydiff_score, defensive_score, expected_weights,
        cake_layer, largest_z_scores, value_range, window_attention, curdkv_score, filter_score, kvzap_score,
        gate_score, weights_from_statistics,
    )
} | {"expected_attention": expected_weights}
"""Functions that compute the scores of one layer, by name. The scores stay on the device."""
SCORES: Mapping[str, Callable[..., Any]] = {
    **{name: score for name, score in SCORES_OF_LAYERS.items() if not name.startswith("expected")},
    **{score.__name__: score for score in (directed, shared, kvzip_score, kvzip_plus_score)},
}
"""Functions with names and arguments as in `reference.policies`. The results are on the host or on the device."""
