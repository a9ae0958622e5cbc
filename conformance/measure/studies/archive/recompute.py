"""Computing chosen tokens of a spliced session again, now that they see everything before them."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from models_integration.archive.layer_masks import additive
from models_integration.cache.dense_layer import RetainedLayer
from models_integration.cache.retained_cache import RetainedCache
from models_integration.model.cache_argument import CACHE
from models_integration.model.rotation import plain_layers
from spec.errors import SpecError

__all__ = ["recompute"]


class _Overwritten(DynamicLayer):  # type: ignore[no-untyped-call]  # the base's __init_subclass__ is untyped
    """New keys and values go to the slots of their tokens, not to the end."""

    def __init__(self, layer: RetainedLayer, slots: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        assert layer.keys is not None
        assert layer.values is not None
        self.lazy_initialization(layer.keys, layer.values)
        self.keys, self.values, self._slots = layer.keys, layer.values, slots

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """Overwrite, and return all that are stored."""
        assert self.keys is not None
        assert self.values is not None
        self.keys = self.keys.index_copy(2, self._slots, key_states)
        self.values = self.values.index_copy(2, self._slots, value_states)
        return self.keys, self.values


def recompute(model: PreTrainedModel, cache: RetainedCache, tokens: Sequence[int], positions: Sequence[int]) -> None:
    """Exchange the keys and values at some positions for those of a forward that sees every stored token before them.

    One forward over these tokens alone; a layer's fresh keys are read by its own later tokens. All tokens of a session
    give its full prefill.

    Args:
        cache: of one row; every layer attends to all that it stores, and stores the same positions.
        tokens: ids at the positions.
        positions: absolute, ascending.

    Raises:
        SpecError: for a cache with sliding windows, or layers that differ, or a position that is not stored; nothing
            has changed then.
    """
    if not positions:
        return
    stored = cache.stored_positions()
    for index, layer in enumerate(cache.layers):
        if not isinstance(layer, RetainedLayer) or not torch.equal(layer.stored_positions()[0], stored):
            raise SpecError("cache", f"layer {index}", "must be a full-attention layer that stores what the first does")
    places = torch.tensor(list(positions))
    slots = torch.searchsorted(stored, places)
    if not torch.equal(stored[slots.clamp(max=len(stored) - 1)], places):
        raise SpecError("positions", list(positions), "must be stored")
    device = model.device
    working = DynamicCache()
    working.layers = [_Overwritten(layer, slots.to(device)) for layer in cache.full_layers]
    with torch.no_grad():
        model(
            input_ids=torch.tensor([list(tokens)], device=device), position_ids=places[None].to(device),
            attention_mask=additive((stored <= places[:, None]).to(device), model.dtype),
            **{CACHE: working}, use_cache=True,
        )
    for layer, fresh in zip(cache.full_layers, plain_layers(working), strict=True):
        layer.keys, layer.values = fresh.keys, fresh.values
