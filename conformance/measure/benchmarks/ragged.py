"""Attention of one query over heads of different lengths: which route is fastest.

`python -m conformance.measure.benchmarks.ragged` prints, for each shape, the time of every route over that of the
first, the median over rounds in which the routes take turns; then what the pocket model's cache takes at a budget
of 0.25. On a GPU the same routes, and one more, are a part of `conformance.measure.gpu`.
"""

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from models_integration import Published
from models_integration.cache.retained_cache import storage_bytes
from models_integration.pocket import load_pocket
from models_integration.tasks import draw_sample

__all__ = ["ROUTES", "Heads", "compared", "stored", "variable_length"]

H_KV, G, D = 8, 4, 128
ROUNDS = 40


class Heads:
    """Flat keys and values of KV heads whose lengths differ as Ada-KV's do, and one query (1, H, 1, d)."""

    def __init__(self, mean: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(0)
        share = torch.rand(H_KV, generator=generator) ** 2 + 0.2
        self.lengths = (share / share.sum() * mean * H_KV).int().clamp(min=8).tolist()
        self.keys, self.values, query = (
            torch.randn(rows, D, generator=generator).to(device, dtype) for rows in (*2 * [sum(self.lengths)], H_KV * G)
        )
        self.query = query[None, :, None]
        self.views = list(zip(
            (one[None, None] for one in torch.split(self.keys, self.lengths)),
            (one[None, None] for one in torch.split(self.values, self.lengths)), strict=True,
        ))


def per_head(heads: Heads) -> Tensor:
    """One call for each KV head, over a view: no copy, no padding."""
    parts = [
        sdpa(heads.query[:, G * head : G * (head + 1)], k, v, enable_gqa=True)
        for head, (k, v) in enumerate(heads.views)
    ]
    return torch.cat(parts, dim=1)


def per_head_rows(heads: Heads) -> Tensor:
    """The same, with the queries of a group as rows of one head."""
    parts = [
        sdpa(heads.query[:, G * head : G * (head + 1)].transpose(1, 2), k, v)
        for head, (k, v) in enumerate(heads.views)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2)


def padded(heads: Heads) -> Tensor:
    """A rectangle as long as the longest head, filled anew for this query, and a mask."""
    longest = max(heads.lengths)
    k, v = (heads.query.new_zeros(1, H_KV, longest, D) for _ in range(2))
    mask = heads.query.new_zeros(1, H_KV, 1, longest, dtype=torch.bool)
    for head, ((own, values), n) in enumerate(zip(heads.views, heads.lengths, strict=True)):
        k[0, head, :n], v[0, head, :n], mask[0, head, 0, :n] = own[0, 0], values[0, 0], True
    query = heads.query.reshape(1, H_KV, G, D)
    return sdpa(query, k, v, attn_mask=mask).reshape(1, -1, 1, D)


def nested(heads: Heads) -> Tensor:
    """Torch's nested tensors, jagged."""
    offsets = torch.tensor([0, *heads.lengths], device=heads.keys.device).cumsum(0)
    k, v = (
        torch.nested.nested_tensor_from_jagged(one, offsets).unsqueeze(2).transpose(1, 2)
        for one in (heads.keys, heads.values)
    )
    rows = torch.arange(0, H_KV * G + 1, G, device=heads.keys.device)
    query = torch.nested.nested_tensor_from_jagged(heads.query.reshape(-1, D), rows).unsqueeze(2).transpose(1, 2)
    output: Tensor = sdpa(query, k, v)
    return output.transpose(1, 2).values().reshape(1, -1, 1, D)


def variable_length(heads: Heads) -> Tensor:
    """Flash attention over sequences of different lengths: each KV head is one, its group's queries are the rows."""
    from torch.nn.attention.varlen import varlen_attn

    rows, ends = (
        torch.tensor([0, *lengths], device=heads.keys.device, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        for lengths in (H_KV * [G], heads.lengths)
    )
    query, keys, values = (one.reshape(-1, 1, D) for one in (heads.query, heads.keys, heads.values))
    found = varlen_attn(query, keys, values, rows, ends, G, max(heads.lengths))
    assert isinstance(found, Tensor)
    return found.reshape(1, -1, 1, D)


ROUTES: dict[str, Callable[[Heads], Tensor]] = {
    "per head": per_head, "per head, group as rows": per_head_rows, "padded": padded, "nested": nested,
}


def compared(mean: int) -> dict[str, tuple[float, float]]:
    """Milliseconds of each route, and its ratio to the first: medians."""
    heads = Heads(mean)
    expected = per_head(heads)
    times: dict[str, list[float]] = {name: [] for name in ROUTES}
    for _ in range(ROUNDS):
        for name, route in ROUTES.items():
            start = time.perf_counter()
            found = route(heads)
            times[name].append(time.perf_counter() - start)
            assert float((found - expected).abs().max()) < 1e-4
    ratios = {
        name: median(own / first for own, first in zip(times[name], times["per head"], strict=True)) for name in ROUTES
    }
    return {name: (median(times[name]) * 1000, ratios[name]) for name in ROUTES}


def stored(name: str, n: int = 1024) -> tuple[float, float]:
    """Bytes over a quarter of the full cache's, and what they would be if all heads had room for the fullest."""
    model, tokenizer = load_pocket()
    ids = draw_sample("needle", tokenizer, n, 0, 42).context_ids
    with Published(name, 0.25)(model) as run, torch.no_grad():
        model(input_ids=torch.tensor([ids]))
    assert run.cache is not None
    found = storage_bytes(run.cache.layers)
    fullest = sum(layer.stored_length for layer in run.cache.full_layers) / len(run.cache.full_layers)
    quarter = (found + run.bytes_freed) / 4
    return found / quarter, found / quarter * fullest / run.cache.mean_length


if __name__ == "__main__":
    torch.set_num_threads(1)
    for mean in (128, 512, 2048, 8192):
        print(mean, {name: f"{ms:.2f} ms, {ratio:.2f}" for name, (ms, ratio) in compared(mean).items()})
    for name in ("nestedkv", "adakv", "snapkv", "pyramidkv"):
        print(name, "{:.4f} of a quarter, {:.4f} padded".format(*stored(name)))
