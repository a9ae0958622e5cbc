"""Insert stored chunks, one after the other, after the tokens that a session has read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from models_integration.cache.continuation import Continuation, CrystalStates
from models_integration.cache.dense_layer import DenseLayer, RetainedLayer, SplicedTokens
from models_integration.cache.fixed_size_layers import GappedSlidingLayer
from models_integration.cache.positions import EMPTY, StoredRows, filled
from models_integration.cache.ragged_layer import RaggedLayer
from models_integration.cache.retained_cache import RetainedCache
from models_integration.model.architecture import restored_rotation
from models_integration.model.rotation import Rotary, angles_between, frequencies_at, plain_layers, prefilled, turned
from spec.errors import SpecError
from spec.retention import Granularity, Retention

__all__ = ["Chunk", "compacted", "computed", "splice", "upper_half"]


@dataclass(frozen=True)
class Chunk:
    """Keys and values (heads, stored, d) by layer of a wrapped chunk, computed at the positions 0 to n - 1.

    The first `hidden` tokens are not inserted. `markers` are indices into `ids`. Layers that a chunk lacks do not
    attend to the chunk.
    """

    ids: tuple[int, ...]
    layers: Mapping[int, tuple[Tensor, Tensor]]
    hidden: int
    markers: tuple[int, ...]
    rotary: Rotary
    kept: Mapping[int, Tensor] | None = None
    """Of a compacted chunk, the places in `ids` of the tokens that each layer stores, (sets, stored); None: all.

    One set, or one for each KV head: each ascending, EMPTY on the left of shorter ones, where keys and values are 0.
    """

    @property
    def visible(self) -> tuple[int, ...]:
        """Return the ids of the tokens that an insertion counts as seen, including evicted tokens."""
        return self.ids[self.hidden :]

    def places(self, layer: int) -> Tensor:
        """Return the indices into `ids` of the tokens that a layer stores, (sets, stored), as in `kept`."""
        return torch.arange(len(self.ids), device="cpu")[None] if self.kept is None else self.kept[layer]


def computed(
    model: PreTrainedModel, ids: Sequence[int], rotary: Rotary, hidden: int = 0, markers: Sequence[int] = (),
) -> Chunk:
    """Compute the keys and values of a wrapped chunk alone, in a separate forward pass from position 0.

    Only full-attention layers are stored. In a sliding-window layer, later tokens would not attend to the chunk.

    Args:
        rotary: rotary embedding of the model, from `recognise`.

    Raises:
        SpecError: if every token is hidden, or if the model has no full-attention layer.
    """
    if not 0 <= hidden < len(ids):
        raise SpecError("hidden", hidden, f"must lie in [0, {len(ids)}), the tokens of the chunk")
    kept = full_attention(model)
    with restored_rotation(model):
        cache = prefilled(model, ids)
    layers = {
        index: (layer.keys[0], layer.values[0]) for index, layer in enumerate(plain_layers(cache)) if index in kept
    }
    return Chunk(tuple(ids), layers, hidden, tuple(markers), frequencies_at(model, rotary, len(ids)))


def full_attention(model: PreTrainedModel) -> list[int]:
    """Return the indices of the layers into which chunks can be inserted.

    Raises:
        SpecError: if the model has no such layer.
    """
    layers = RetainedCache(model.config.get_text_config(decoder=True)).layers
    full = [index for index, layer in enumerate(layers) if isinstance(layer, RetainedLayer)]
    if not full:
        raise SpecError("model", type(model).__name__, "must have a full-attention layer to insert chunks")
    return full


def upper_half(layers: Mapping[int, tuple[Tensor, Tensor]], depth: int) -> dict[int, tuple[Tensor, Tensor]]:
    """Return the layers from depth // 2 on, which the paper's upper-layer archive stores (Section 5.3)."""
    return {index: pair for index, pair in layers.items() if index >= depth // 2}


def compacted(chunk: Chunk, retention: Retention) -> Chunk:
    """Return the chunk without the tokens that a policy evicted. The remaining tokens keep their positions.

    Args:
        chunk: chunk with all its full-attention layers, not yet compacted.
        retention: kept sets of the chunk's ids, including hidden ids.

    Raises:
        SpecError: if the kept sets do not fit the layers, heads or tokens, or if they lack a marker to insert.
    """
    heads = next(iter(chunk.layers.values()))[0].shape[0] if retention.granularity is Granularity.HEAD else 1
    groups = 1 if retention.granularity is Granularity.MODEL else len(chunk.layers) * heads
    if retention.groups != groups:
        raise SpecError(
            "retention", f"{retention.groups} groups", f"must have {groups} groups, to fit the layers and KV heads"
        )
    if chunk.kept is not None or retention.seen != len(chunk.ids):
        raise SpecError(
            "retention", f"{retention.seen} tokens", f"must describe all {len(chunk.ids)} tokens of the chunk"
        )
    sets = [torch.tensor(retention.group(group), dtype=torch.int64, device="cpu") for group in range(groups)]
    kept = {}
    for ordinal, index in enumerate(sorted(chunk.layers)):
        layer_sets = sets if groups == 1 else sets[heads * ordinal : heads * (ordinal + 1)]
        kept[index] = filled(layer_sets, max(map(len, layer_sets)))
    visible = {marker for marker in chunk.markers if marker >= chunk.hidden}
    lost = sorted(visible - set.intersection(*(set(places.tolist()) for places in sets)))
    if lost:
        raise SpecError(
            "retention", f"without markers {lost}", "must keep the role markers; make the policy with `protecting`"
        )
    layers = {
        index: (taken(keys, kept[index]), taken(values, kept[index])) for index, (keys, values) in chunk.layers.items()
    }
    return replace(chunk, layers=layers, kept=kept)


def taken(x: Tensor, places: Tensor) -> Tensor:
    """Return the tokens of x (heads, n, d) at the places (sets, stored): (heads, stored, d). EMPTY places give 0."""
    whose = places.to(x.device).expand(len(x), -1)[..., None]
    return x.gather(1, whose.clamp(min=0).expand(-1, -1, x.shape[2])).masked_fill(whose == EMPTY, 0)


def splice(cache: RetainedCache, chunks: Sequence[Chunk], live: Rotary) -> Tensor:
    """Insert the visible tokens of each chunk after the tokens that the cache has seen.

    Return the positions of the markers.

    The cache grows as in a forward pass over these tokens. Evicted positions, including those of a compacted chunk,
    remain evicted. The position of the next token is the number of tokens seen. Call this function between two turns.
    `live` has the RoPE frequencies of the session at its full length (`frequencies_at`). Chunks with different
    frequencies are rotated to these frequencies. The chunks themselves do not change.

    If a chunk lacks a layer, or keeps different tokens in different layers, the layers of the cache store different
    positions. Read such a cache inside `layer_masks`; everywhere else, reading raises an error. For CrystalCache, the
    tokens of the chunks join the trunks. The states of other policies are deleted.

    Args:
        cache: cache with one row, new or compacted.

    Raises:
        SpecError: if the cache has several rows or padding, or if a chunk has a layer that does not fit. Nothing has
            changed.
    """
    cache.check_usable()
    layers = plain_layers(cache)
    full = [index for index, layer in enumerate(layers) if isinstance(layer, RetainedLayer)]
    _check_takes(cache, chunks, full)
    seen = cache.get_seq_length()
    *starts, total = accumulate((len(chunk.visible) for chunk in chunks), initial=seen)
    added = {index: _added(index, chunks, starts, live) for index in full}
    for index, layer in enumerate(layers):
        if index in added:
            cache.layers[index] = _grown(layer, added[index], total)
        else:
            cache.layers[index] = GappedSlidingLayer.after(layer, total)
    cache.layers_differ |= _differ(cache.full_layers)
    cache.continuation = _noted(cache, chunks, seen)
    marked = [
        start + place - chunk.hidden for start, chunk in zip(starts, chunks, strict=True) for place in chunk.markers
        if place >= chunk.hidden
    ]
    return torch.tensor(marked, dtype=torch.int64, device="cpu")


def _check_takes(cache: RetainedCache, chunks: Sequence[Chunk], full: Sequence[int]) -> None:
    cache.check_kept_positions("spliced into")
    for layer in plain_layers(cache):
        if layer.is_initialized and (rows := layer.batch if layer in cache.full_layers else len(layer.keys)) != 1:
            raise SpecError("cache", f"{rows} rows", "must have one row")
    padding = cache.get_seq_length() - int(cache.tokens[0])
    if padding:
        raise SpecError("cache", f"{padding} columns of padding", "must have one row without padding")
    for ordinal, chunk in enumerate(chunks):
        if not chunk.layers or not set(chunk.layers) <= set(full):
            name = f"chunks[{ordinal}]"
            raise SpecError(name, sorted(chunk.layers), f"must contain only full-attention layers: {full}")


def _added(index: int, chunks: Sequence[Chunk], starts: Sequence[int], live: Rotary) -> list[SplicedTokens]:
    """Return the tokens that each chunk adds to a layer. Chunks without the layer are left out."""
    added = []
    for chunk, start in zip(chunks, starts, strict=True):
        if index in chunk.layers:
            (keys, values), places = _moved(chunk, index, start - chunk.hidden, live), chunk.places(index)
            visible = places >= chunk.hidden
            first = int((~visible.any(0)).sum())  # what no set shows stands on the left
            positions = torch.where(visible, places + (start - chunk.hidden), EMPTY)[:, first:]
            added.append(SplicedTokens(keys[:, first:], values[:, first:], positions))
    return added


def _grown(layer: RetainedLayer, added: Sequence[SplicedTokens], seen: int) -> RetainedLayer:
    """Return the layer with the added tokens at the end, as a ragged layer if the heads now store different tokens."""
    if isinstance(layer, DenseLayer) and any(len(chunk.positions) > 1 for chunk in added):
        if not layer.is_initialized:
            keys, values = (tensor[None, :, :0] for tensor in added[0][:2])
            layer.restore(keys, values, StoredRows.none(), 0)
        layer = RaggedLayer.plan_split(layer, [[layer.stored_positions()[0]] * layer.heads])()
    layer.splice(added, seen)
    return layer


def _noted(cache: RetainedCache, chunks: Sequence[Chunk], seen: int) -> Continuation:
    """Return CrystalCache's states with the chunks after `seen` tokens, or no state if the states lack tokens.

    There is also no state if the layers now store different tokens, or if the policy is different.
    """
    states = cache.continuation if seen else CrystalStates()
    if cache.layers_differ or not isinstance(states, CrystalStates) or (seen and not states.covers(seen)):
        return Continuation()
    for chunk in chunks:
        places = chunk.places(min(chunk.layers))[0] - chunk.hidden
        states = states.splice(np.array(chunk.visible, dtype=np.int64), places[places >= 0].numpy())
    return states


def _differ(layers: Sequence[RetainedLayer]) -> bool:
    """Return True if layers, or heads of a layer, store different positions."""
    if any(isinstance(layer, RaggedLayer) for layer in layers):
        return True
    first, *others = (layer.stored_positions() for layer in layers)
    return any(not torch.equal(first, other) for other in others)


def _moved(chunk: Chunk, index: int, start: int, live: Rotary) -> tuple[Tensor, Tensor]:
    """Return keys and values of a layer of a chunk, rotated so that the first token is at `start`."""
    rule = chunk.rotary.layers[index]
    if rule.slot is None or rule.buffer is None or rule.style is None:
        return chunk.layers[index]
    pair = dict(zip(("keys", "values"), chunk.layers[index], strict=True))
    before, after = chunk.rotary.frequencies[rule.buffer], live.frequencies[rule.buffer]
    angles = angles_between(len(chunk.ids), start, before, after)[chunk.places(index).to(before.device)]
    pair[rule.slot] = turned(pair[rule.slot], angles, rule.style)
    return pair["keys"], pair["values"]
