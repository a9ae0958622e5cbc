"""Attention of one query over heads of different lengths: the routes that `conformance.measure.gpu` compares."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

H_KV, G, D = 8, 4, 128


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
