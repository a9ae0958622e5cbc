"""A cache keeps what retentions say, at their own granularity."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from models_integration.cache.dense_layer import RetainedLayer
from models_integration.cache.ragged_layer import RaggedLayer
from models_integration.cache.retained_cache import RetainedCache, undone
from spec.errors import SpecError
from spec.retention import Granularity, Retention

__all__ = ["compact"]


def compact(
    cache: RetainedCache, retentions: Sequence[Retention], padding: Tensor | None = None,
    layers: Iterable[int] | None = None,
) -> None:
    """Keep what the retentions say, at their own granularity: one per row, or one for all rows.

    Heads that keep the same stay together, and so do layers: a full budget changes no tensor.

    Args:
        cache: what is compacted.
        retentions: what to keep.
        padding: columns left of each row's first token, (rows,), where a first prompt is padded.
        layers: indices of full-attention layers; None means all of them.

    Raises:
        SpecError: when one is about another number of tokens, or of layers and heads, or names a token that is not
            stored; nothing has changed then.
    """
    if not cache.layers_differ and all(one.granularity is Granularity.MODEL for one in retentions):
        cache.compact(retentions, padding, layers)
        return
    full = [index for index, layer in enumerate(cache.layers) if isinstance(layer, RetainedLayer)]
    kept = [_by_layer(retention, cache, full, row, padding) for row, retention in enumerate(retentions)]
    chosen = [(at, layer) for at, layer in zip(full, cache.full_layers, strict=True) if layers is None or at in layers]
    with undone(layer for _, layer in chosen):
        todo = [_keeping(layer, [sets[full.index(at)] for sets in kept], padding) for at, layer in chosen]
    with cache.whole():
        for apply in todo:
            apply()
    cache.layers_differ |= any(not _agree(own for heads in sets for own in heads) for sets in kept)


def _by_layer(
    retention: Retention, cache: RetainedCache, full: Sequence[int], row: int, padding: Tensor | None,
) -> list[list[Tensor]]:
    """The kept positions of each full-attention layer and KV head."""
    layer = cache.full_layers[0]
    seen = int(layer.next_positions(1)[min(row, len(layer.next_positions(1)) - 1), 0])
    seen -= 0 if padding is None else int(padding[row])
    if retention.seen != seen:
        raise SpecError("retention", f"{retention.seen} tokens", f"the cache has seen {seen}")
    heads = layer.heads
    sets = [torch.tensor(retention.group(group), dtype=torch.int64) for group in range(retention.groups)]
    if retention.granularity is not Granularity.HEAD:
        sets = [own for own in sets for _ in range(heads * (1 if retention.groups > 1 else len(full)))]
    if len(sets) != heads * len(full):
        expected = f"must have a group for each of {len(full)} layers, or for each of their {heads} KV heads"
        raise SpecError("retention", f"{retention.groups} groups", expected)
    return [sets[heads * ordinal : heads * (ordinal + 1)] for ordinal in range(len(full))]


def _keeping(layer: RetainedLayer, kept: list[list[Tensor]], padding: Tensor | None) -> Callable[[], None]:
    """What lets row r and head h keep kept[r][h]; a layer of which no two heads of a row differ stays one rectangle."""
    if isinstance(layer, RaggedLayer):
        return layer.keeping(kept)
    rows = kept * layer.batch if len(kept) == 1 else kept
    if padding is not None:
        layer.pad(padding)
    if not all(map(_agree, rows)):
        return RaggedLayer.splitting(layer, rows)
    one = padding is None and layer.rows.shared and _agree(heads[0] for heads in rows)
    return partial(layer.follow, layer.plan(*(heads[0] for heads in (rows[:1] if one else rows))))


def _agree(sets: Iterable[Tensor]) -> bool:
    first, *others = sets
    return all(torch.equal(first, other) for other in others)
