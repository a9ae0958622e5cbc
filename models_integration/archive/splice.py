"""Chunks computed alone, put one after the other behind what a session has read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from models_integration.archive.rope import Rotary, plain_layers, prefilled
from models_integration.archive.turn import angles_between, turned
from spec.errors import SpecError

__all__ = ["Chunk", "computed", "spliced"]


@dataclass(frozen=True)
class Chunk:
    """Keys and values (heads, n, d) by layer of a chunk computed at positions 0 to n - 1; `hidden` are not spliced."""

    layers: Mapping[int, tuple[Tensor, Tensor]]
    hidden: int
    rotary: Rotary

    @property
    def visible(self) -> int:
        """Tokens that a splice adds."""
        keys, _ = next(iter(self.layers.values()))
        return keys.shape[1] - self.hidden


def computed(model: PreTrainedModel, ids: Sequence[int], hidden: int, rotary: Rotary) -> Chunk:
    """The canonical archive of a wrapped chunk: one forward that sees nothing else, from position 0.

    Raises:
        SpecError: when every token is hidden.
    """
    if not 0 <= hidden < len(ids):
        raise SpecError("hidden", hidden, f"must lie in [0, {len(ids)}), the tokens of the chunk")
    cache = prefilled(model, ids)
    layers = {index: (layer.keys[0], layer.values[0]) for index, layer in enumerate(plain_layers(cache))}
    return Chunk(layers, hidden, rotary)


def spliced(cache: DynamicCache, chunks: Sequence[Chunk], live: Rotary) -> DynamicCache:
    """A new cache: the session's tokens, then each chunk's visible ones at the positions that follow.

    The session's cache and the chunks stay as they are. `live` holds the frequencies of the session at its full
    length (`frequencies_at`); chunks archived under others are re-based.

    Args:
        cache: plain and full in every layer, of one row, at positions 0 to its length - 1.

    Raises:
        SpecError: for a cache of several rows, or a chunk without some layer of the cache.
    """
    layers = plain_layers(cache)
    depth = len(layers)
    for layer in layers:
        if layer.keys is None or layer.keys.shape[0] != 1:
            raise SpecError("cache", None if layer.keys is None else layer.keys.shape[0], "must hold one row")
    for at, chunk in enumerate(chunks):
        if sorted(chunk.layers) != list(range(depth)):
            raise SpecError(f"chunks[{at}]", sorted(chunk.layers), f"must hold the {depth} layers of the cache")
    found = DynamicCache()
    for index, layer in enumerate(layers):
        keys, values = [layer.keys], [layer.values]
        start = layer.keys.shape[-2]
        for chunk in chunks:
            moved = _moved(chunk, index, start - chunk.hidden, live)
            keys.append(moved[0][None, :, chunk.hidden :].to(layer.keys))
            values.append(moved[1][None, :, chunk.hidden :].to(layer.values))
            start += chunk.visible
        found.update(torch.cat(keys, -2), torch.cat(values, -2), index)
    return found


def _moved(chunk: Chunk, index: int, start: int, live: Rotary) -> tuple[Tensor, Tensor]:
    """One layer of a chunk, its first token at `start`; what does not turn is not touched."""
    rule = chunk.rotary.layers[index]
    if rule.slot is None or rule.buffer is None or rule.style is None:
        return chunk.layers[index]
    pair = dict(zip(("keys", "values"), chunk.layers[index], strict=True))
    before, after = chunk.rotary.frequencies[rule.buffer], live.frequencies[rule.buffer]
    angles = angles_between(pair[rule.slot].shape[1], start, before, after)
    pair[rule.slot] = turned(pair[rule.slot], angles, rule.style)
    return pair["keys"], pair["values"]
