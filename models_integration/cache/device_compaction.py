"""Compaction of a layer by kept positions on the device. The host reads the kept positions of all layers at once."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from models_integration.cache.compaction import change_of_layer, kept_by_layer, sets_agree
from models_integration.cache.dense_layer import DenseLayer, RetainedLayer
from models_integration.cache.positions import StoredRows, filled
from models_integration.cache.ragged_layer import HeadLayout, RaggedLayer
from models_integration.cache.retained_cache import RetainedCache, failing_whole, storage_bytes
from spec.arrays import IntVector, Matrix
from spec.errors import SpecError
from spec.retention import Granularity, Retention

__all__ = ["Chosen", "gather", "read_retentions", "settle", "unsettled"]


class Chosen(NamedTuple):
    """Device tensors that describe which tokens one row of a layer keeps."""

    at: Tensor
    """Index of the set of kept tokens times n, plus position, ascending, (kept,)."""
    unscored: Tensor
    """Entry as in `at` of the first unprotected token without a score, or -1 if there is no such token, (1,)."""
    groups: int
    n: int
    """Number of tokens of the row."""
    sums: Tensor | None = None
    """Number that the scorer stores for each kept token, float64, (kept,)."""
    kept: Tensor | None = None
    """Number of first entries of `at` that are kept, (1,), if scores decide this number. `settle` evicts the rest."""


def gather(cache: RetainedCache, index: int, rows: Sequence[Chosen]) -> None:
    """Keep only the chosen tokens of a layer. `settle` later sets the positions of these tokens.

    If no token is evicted, the layer is unchanged.
    """
    layer = cache.layers[index]
    assert isinstance(layer, DenseLayer)
    if any(len(row.at) < row.groups * row.n for row in rows):
        before = storage_bytes([layer])
        with failing_whole(cache):
            cache.layers[index] = gathered = _gathered(layer, rows)
        cache.bytes_freed += before - storage_bytes([gathered])


def _gathered(layer: DenseLayer, rows: Sequence[Chosen]) -> RaggedLayer:
    assert layer.keys is not None
    assert layer.values is not None
    H, columns, slots = layer.heads, layer.stored_length, list[Tensor]()
    for row, (at, _, groups, n, *_) in enumerate(rows):
        slots.append(row * H * columns + at // n * columns + at % n + columns - n)
        if groups < H:
            slots[row] = (torch.arange(H, device=at.device)[:, None] * columns + slots[row]).flatten()
    keys, values = (x.flatten(0, 2).index_select(0, torch.cat(slots)) for x in (layer.keys, layer.values))
    return unsettled(layer, keys, values, [row.n for row in rows])


def unsettled(layer: DenseLayer, keys: Tensor, values: Tensor, tokens: Sequence[int]) -> RaggedLayer:
    """Empty a layer, and return a new layer with the given keys and values.

    `settle` then sets the positions of its tokens.

    Args:
        layer: layer of a first prompt.
        keys: of any shape.
        values: beside them.
        tokens: tokens of each row.
    """
    unknown = [torch.empty(0, dtype=torch.int64, device="cpu")] * (layer.heads * len(tokens))
    empty = torch.empty(len(tokens), 0, dtype=torch.int64, device="cpu")
    seen = StoredRows(empty, torch.tensor(tokens, device="cpu"))
    ragged = RaggedLayer(keys, values, seen, unknown, layer.stored_length)
    layer.reset()
    return ragged


def settle(
    cache: RetainedCache, index: int, rows: Sequence[Chosen], retentions: Sequence[Retention], padding: Tensor | None,
) -> None:
    """Set the positions of the tokens that `gather` kept in a layer, and evict tokens that `gather` kept in excess."""
    layer = cache.layers[index]
    assert isinstance(layer, RetainedLayer)
    kept = [kept_by_layer(one, (index,), (index,), layer.heads)[index] for one in retentions]
    before = storage_bytes([layer])
    with failing_whole(cache):
        if isinstance(layer, RaggedLayer) and any(row.kept is not None for row in rows):
            layer.keys, layer.values = (_without_rest(x, rows, retentions) for x in (layer.keys, layer.values))
        if not isinstance(layer, RaggedLayer):
            cache.layers[index] = change_of_layer(layer, kept, padding)()
        elif all(map(sets_agree, kept)):
            cache.layers[index] = _dense(layer, [heads[0] for heads in kept], padding)
        else:
            layer.layout = HeadLayout(tuple(positions for heads in kept for positions in heads))
    cache.bytes_freed += before - storage_bytes([cache.layers[index]])


def _without_rest(flat: Tensor | None, rows: Sequence[Chosen], retentions: Sequence[Retention]) -> Tensor:
    """Return the first tokens of each row's heads (slots, d). All heads' tokens of a row were chosen as one set."""
    assert flat is not None
    parts = zip(torch.split(flat, [len(row.at) for row in rows]), retentions, strict=True)
    return torch.cat([part[: len(kept.positions)] for part, kept in parts])


def _dense(layer: RaggedLayer, kept: list[Tensor], padding: Tensor | None) -> DenseLayer:
    """Return a dense layer for a layer in which all heads of a row store the same tokens."""
    columns, heads, width = layer.padded_seen, layer.heads, max(map(len, kept))
    rows = StoredRows.none() if padding is None else StoredRows.padded(padding)
    chosen = kept[:1] if padding is None and sets_agree(kept) else kept

    def spread(flat: Tensor | None) -> Tensor:
        assert flat is not None
        if all(len(part) == width for part in kept):
            return flat.view(len(kept), heads, width, -1)
        out = flat.new_zeros(len(kept), heads, width, flat.shape[1])
        for row, part in zip(out, torch.split(flat, [heads * len(part) for part in kept]), strict=True):
            row[:, width - len(part) // heads :] = part.view(heads, -1, flat.shape[1])
        return out

    dense = DenseLayer()
    after = rows.compacted(filled(chosen, width), rows.tokens(columns))
    dense.restore(spread(layer.keys), spread(layer.values), after, columns - width)
    return dense


def read_retentions(
    layers: Iterable[Sequence[Chosen]], granularity: Granularity,
) -> list[tuple[tuple[Retention, Matrix], ...]]:
    """Return the retention and the scorer's numbers of each layer and row, with one transfer from the device.

    Raises:
        SpecError: if a token has no score.
    """
    layers = list(layers)
    parts = [
        part for rows in layers for row in rows
        for part in (row.unscored, row.kept, row.at, row.sums if row.sums is None else row.sums.view(torch.int64))
    ]
    given = [part for part in parts if part is not None]
    at_once = torch.cat([part.to(given[0].device) for part in given]).cpu()
    host = iter(torch.split(at_once, [0 if part is None else len(part) for part in parts]))
    return [
        tuple(_kept(row, next(host), next(host), next(host), next(host), ordinal, granularity) for row in rows)
        for ordinal, rows in enumerate(layers)
    ]


def _kept(
    row: Chosen, unscored: Tensor, count: Tensor, at: Tensor, sums: Tensor, ordinal: int, granularity: Granularity,
) -> tuple[Retention, Matrix]:
    at = at[: int(count)] if len(count) else at
    retention = _retention(row, int(unscored), at.numpy(), ordinal, granularity)
    return retention, sums.view(torch.float64).numpy().reshape(row.groups, -1)


def _retention(row: Chosen, unscored: int, at: IntVector, ordinal: int, granularity: Granularity) -> Retention:
    if unscored >= 0:
        place = f"layer {ordinal}, kept set {unscored // row.n}, token {unscored % row.n}"
        raise SpecError("score", "NaN", f"must be a number at {place}")
    sizes = np.bincount(at // row.n, minlength=row.groups)
    return Retention(at % row.n, np.append(0, np.cumsum(sizes)), row.n, granularity)
