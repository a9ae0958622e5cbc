"""Chunks computed alone, put one after the other behind what a session has read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from models_integration.archive.gaps import GappedSlidingLayer
from models_integration.archive.rope import Rotary, frequencies_at, plain_layers, prefilled
from models_integration.archive.turn import angles_between, turned
from models_integration.cache import RetainedCache, RetainedLayer
from models_integration.ragged import RaggedLayer
from models_integration.states import RowStates
from models_integration.visibility import StoredRows
from spec.errors import SpecError
from spec.retention import Granularity, Retention

__all__ = ["Chunk", "compacted", "computed", "splice", "upper_half"]


@dataclass(frozen=True)
class Chunk:
    """Keys and values (heads, stored, d) by layer of a wrapped chunk computed at positions 0 to n - 1.

    The first `hidden` tokens are not spliced; `markers` are places in `ids`. Layers that it lacks do not see it.
    """

    ids: tuple[int, ...]
    layers: Mapping[int, tuple[Tensor, Tensor]]
    hidden: int
    markers: tuple[int, ...]
    rotary: Rotary
    kept: Mapping[int, Tensor] | None = None
    """Of a compacted chunk, the places in `ids` of the tokens that each layer stores, ascending; None: all of them."""

    @property
    def visible(self) -> tuple[int, ...]:
        """The ids that a splice counts as seen, evicted ones too."""
        return self.ids[self.hidden :]

    def places(self, layer: int) -> Tensor:
        """Places in `ids` of the tokens that a layer stores, (stored,)."""
        return torch.arange(len(self.ids)) if self.kept is None else self.kept[layer]


def computed(
    model: PreTrainedModel, ids: Sequence[int], rotary: Rotary, hidden: int = 0, markers: Sequence[int] = (),
) -> Chunk:
    """The canonical archive of a wrapped chunk: one forward that sees nothing else, from position 0.

    Of a model that slides, only the full-attention layers are kept: a window that has moved on sees no chunk.

    Args:
        rotary: of the model, as `recognise` gives it.

    Raises:
        SpecError: when every token is hidden, or no layer of the model attends to all that it has read.
    """
    if not 0 <= hidden < len(ids):
        raise SpecError("hidden", hidden, f"must lie in [0, {len(ids)}), the tokens of the chunk")
    kept = full_attention(model)
    layers = {
        index: (layer.keys[0], layer.values[0]) for index, layer in enumerate(plain_layers(prefilled(model, ids)))
        if index in kept
    }
    return Chunk(tuple(ids), layers, hidden, tuple(markers), frequencies_at(model, rotary, len(ids)))


def full_attention(model: PreTrainedModel) -> list[int]:
    """Indices of the layers that a splice serves.

    Raises:
        SpecError: when there is none.
    """
    layers = RetainedCache(model.config.get_text_config(decoder=True)).layers
    found = [index for index, layer in enumerate(layers) if isinstance(layer, RetainedLayer)]
    if not found:
        raise SpecError("model", type(model).__name__, "has no full-attention layer: nothing can be spliced")
    return found


def upper_half(layers: Mapping[int, tuple[Tensor, Tensor]], depth: int) -> dict[int, tuple[Tensor, Tensor]]:
    """The layers from depth // 2 on, which are all that the paper's upper-layer archive stores (5.3)."""
    return {index: pair for index, pair in layers.items() if index >= depth // 2}


def compacted(chunk: Chunk, retention: Retention) -> Chunk:
    """The same chunk without the tokens that a policy evicted from it: positions, and the room it takes, stay.

    Args:
        chunk: of all its full-attention layers, uncompacted.
        retention: about the chunk's own ids, hidden ones included; one kept set for all layers, or one for each.

    Raises:
        SpecError: for kept sets of heads, or about another number of tokens or layers, or that lack a visible marker.
    """
    if retention.granularity is Granularity.HEAD or retention.groups not in (1, len(chunk.layers)):
        raise SpecError(
            "retention", f"{retention.groups} groups by {retention.granularity.value}",
            f"must keep one set, or one for each of {len(chunk.layers)} layers",
        )
    if chunk.kept is not None or retention.seen != len(chunk.ids):
        raise SpecError("retention", f"{retention.seen} tokens", f"must be about {len(chunk.ids)} tokens, uncompacted")
    kept = {
        index: torch.tensor(retention.group(at if retention.groups > 1 else 0), dtype=torch.int64)
        for at, index in enumerate(sorted(chunk.layers))
    }
    visible = {marker for marker in chunk.markers if marker >= chunk.hidden}
    lost = sorted(visible - set.intersection(*(set(places.tolist()) for places in kept.values())))
    if lost:
        raise SpecError("retention", f"without markers {lost}", "must keep the markers: `protecting` does")
    layers = {
        index: (keys[:, kept[index].to(keys.device)], values[:, kept[index].to(values.device)])
        for index, (keys, values) in chunk.layers.items()
    }
    return replace(chunk, layers=layers, kept=kept)


def splice(cache: RetainedCache, chunks: Sequence[Chunk], live: Rotary) -> Tensor:
    """Put the visible tokens of each chunk behind what the cache has seen; absolute positions of their markers.

    The cache grows as by a forward over these tokens; evicted positions stay evicted, those of a compacted chunk too,
    and the next token's position is the number of tokens seen. Call it between two turns. `live` holds the frequencies
    of the session at its full length (`frequencies_at`); chunks archived under others are re-based. The chunks stay as
    they are.

    Where some chunk lacks a layer, or keeps other tokens in other layers, layers store different positions: such a
    cache is read inside `layer_masks`, and refuses to be read elsewhere. A policy's records of the rows are forgotten:
    it starts anew with what is stored.

    Args:
        cache: of one row; it may be new, or compacted.

    Raises:
        SpecError: for a cache of several rows, or whose heads differ, or a chunk with a layer that cannot take it;
            nothing has changed then.
    """
    cache.check_usable()
    layers = plain_layers(cache)
    full = [index for index, layer in enumerate(layers) if isinstance(layer, RetainedLayer)]
    for layer in layers:
        if isinstance(layer, RaggedLayer):
            raise SpecError("cache", "heads that differ", "must store the same positions in all heads of a layer")
        if layer.is_initialized and layer.keys.shape[0] != 1:
            raise SpecError("cache", f"{layer.keys.shape[0]} rows", "must hold one row")
    for at, chunk in enumerate(chunks):
        if not chunk.layers or not set(chunk.layers) <= set(full):
            raise SpecError(f"chunks[{at}]", sorted(chunk.layers), f"must hold layers among {full}, of full attention")
    seen = cache.get_seq_length()
    starts = [seen + sum(len(chunk.visible) for chunk in chunks[:at]) for at in range(len(chunks))]
    total = seen + sum(len(chunk.visible) for chunk in chunks)
    grown = {index: _grown(layers[index], index, chunks, starts, live) for index in full}
    for index, layer in enumerate(layers):
        if index in grown:
            _take(layer, *grown[index], total)
        else:
            cache.layers[index] = GappedSlidingLayer.after(layer, total)
    cache.layers_differ |= any(not torch.equal(places, grown[full[0]][2]) for _, _, places in grown.values())
    # What a policy knew of the rows does not know these tokens.
    cache.states, cache.decoding = RowStates(), None
    marked = [
        start + place - chunk.hidden for start, chunk in zip(starts, chunks, strict=True) for place in chunk.markers
        if place >= chunk.hidden
    ]
    return torch.tensor(marked, dtype=torch.int64)


def _grown(
    layer: Any, index: int, chunks: Sequence[Chunk], starts: Sequence[int], live: Rotary,
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Keys, values and positions of one layer with the chunks behind them; no tensors where it holds none at all."""
    held = layer.is_initialized
    keys, values = ([layer.keys], [layer.values]) if held else ([], [])
    positions = [layer.stored_positions()[0]] if held else []
    for chunk, start in zip(chunks, starts, strict=True):
        if index in chunk.layers:
            moved, places = _moved(chunk, index, start - chunk.hidden, live), chunk.places(index)
            first = int((places < chunk.hidden).sum())
            for parts, part in zip((keys, values), moved, strict=True):
                parts.append(part[None, :, first:].to(parts[0] if parts else part))
            positions.append(places[first:] + (start - chunk.hidden))
    if not keys:
        return None, None, torch.empty(0, dtype=torch.int64)
    return torch.cat(keys, -2), torch.cat(values, -2), torch.cat(positions)


def _take(layer: RetainedLayer, keys: Tensor | None, values: Tensor | None, positions: Tensor, seen: int) -> None:
    if keys is not None and values is not None:
        if not layer.is_initialized:
            layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
    layer.rows = StoredRows(positions[None], torch.tensor([seen]))
    layer.evicted = seen - len(positions)


def _moved(chunk: Chunk, index: int, start: int, live: Rotary) -> tuple[Tensor, Tensor]:
    """One layer of a chunk, its first token at `start`; what does not turn is not touched."""
    rule = chunk.rotary.layers[index]
    if rule.slot is None or rule.buffer is None or rule.style is None:
        return chunk.layers[index]
    pair = dict(zip(("keys", "values"), chunk.layers[index], strict=True))
    before, after = chunk.rotary.frequencies[rule.buffer], live.frequencies[rule.buffer]
    angles = angles_between(len(chunk.ids), start, before, after)[chunk.places(index).to(before.device)]
    pair[rule.slot] = turned(pair[rule.slot], angles, rule.style)
    return pair["keys"], pair["values"]
