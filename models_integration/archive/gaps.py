"""Layers whose past has gaps: a window that counts positions, and masks for layers that store different positions."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from models_integration.architecture import attention_modules, describe
from models_integration.cache import RetainedCache, RetainedLayer
from models_integration.capture import observing
from models_integration.ragged import RaggedLayer
from models_integration.visibility import SlotOffset, StoredRows
from spec.errors import SpecError

__all__ = ["GappedSlidingLayer", "additive", "layer_masks"]


class GappedSlidingLayer(DynamicSlidingWindowLayer):  # type: ignore[no-untyped-call]  # an untyped __init_subclass__
    """A sliding-window layer that has not read some of the tokens seen.

    transformers counts a window in slots, which would stretch it over the gap. Here it counts positions.
    """

    positions: Tensor
    """Absolute positions behind the slots, (stored,)."""

    @classmethod
    def after(cls, layer: DynamicSlidingWindowLayer, seen: int) -> "GappedSlidingLayer":
        """The same layer once `seen` tokens are behind the session, of which it has read no more than it had."""
        made = cls(sliding_window=layer.sliding_window)
        stored = 0 if layer.keys is None else layer.keys.shape[-2]
        before = int(layer.get_seq_length())
        if isinstance(layer, GappedSlidingLayer):
            made.positions = layer.positions
        else:
            made.positions = torch.arange(before - stored, before)
        made.cumulative_length = seen
        if layer.keys is not None and layer.values is not None:
            made.lazy_initialization(layer.keys, layer.values)
            made.keys, made.values = layer.keys, layer.values
            made._drop_unseen()
        return made

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values of new tokens; all that some of them may see."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        tokens = key_states.shape[-2]
        keys, values = torch.cat([self.keys, key_states], -2), torch.cat([self.values, value_states], -2)
        later = torch.arange(self.cumulative_length, self.cumulative_length + tokens)
        self.positions = torch.cat([self.positions, later])
        self.cumulative_length += tokens
        self.keys, self.values = keys, values
        self._drop_unseen()
        return keys, values

    def _drop_unseen(self) -> None:
        """Free what the next query, at position `cumulative_length`, and all after it cannot see."""
        assert self.keys is not None
        assert self.values is not None
        first = int((self.positions <= self.cumulative_length - self.sliding_window).sum())
        self.keys, self.values = self.keys[:, :, first:], self.values[:, :, first:]
        self.positions = self.positions[first:]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Slots after `query_length` more tokens, and the offset that leads to their positions."""
        stored, seen = len(self.positions), self.cumulative_length
        rows = StoredRows(self.positions[None], torch.tensor([seen]))
        return stored + query_length, SlotOffset(seen - stored, rows)

    def reset(self) -> None:
        """Forget everything: as new."""
        super().reset()
        self.positions = torch.empty(0, dtype=torch.int64)


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask (1, 1, queries, slots) that sdpa and eager attention read alike: 0 where visible, else the lowest."""
    lowest = torch.full(visible.shape, torch.finfo(dtype).min, dtype=dtype, device=visible.device)
    return lowest.masked_fill(visible, 0.0)[None, None]


@contextmanager
def layer_masks(model: PreTrainedModel, cache: RetainedCache) -> Iterator[None]:
    """Read a cache whose full-attention layers store different positions: each layer gets a mask of its own.

    transformers makes one mask for all full-attention layers, from the first of them. Where heads differ, each head
    attends alone.

    Raises:
        SpecError: for attention that is neither sdpa nor eager, and for a model that no policy serves, if heads differ.
    """
    if any(isinstance(layer, RaggedLayer) for layer in cache.layers):
        with observing(describe(model), cache):
            yield
        return
    if model.config._attn_implementation not in ("sdpa", "eager"):
        raise SpecError("attn_implementation", model.config._attn_implementation, "must be sdpa or eager")

    def own_mask(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        layer = cache.layers[cast(int, module.layer_idx)]
        # Families name the argument differently.
        if not isinstance(layer, RetainedLayer) or not any(value is cache for value in (*args, *options.values())):
            return args, options
        states = options["hidden_states"] if "hidden_states" in options else args[0]
        tokens = states.shape[1]
        stored = torch.cat([layer.stored_positions()[0], layer.next_positions(tokens)[0]])
        queries = stored[len(stored) - tokens :]
        mask = additive((stored <= queries[:, None]).to(states.device), states.dtype)
        return args, {**options, "attention_mask": mask}

    with ExitStack() as undo:
        undo.enter_context(cache.in_context())
        for module in attention_modules(model).values():
            undo.callback(module.register_forward_pre_hook(own_mask, with_kwargs=True).remove)
        yield
