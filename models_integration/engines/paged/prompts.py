"""Capture of attention inputs of prompts that are processed in pieces, with several prompts in a forward pass."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import nn

from models_integration.attention.capture import Attended
from models_integration.cache.retained_cache import RetainedCache
from models_integration.engines.paged.pool import Pool
from models_integration.model.architecture import Architecture
from models_integration.model.layer_kinds import of_layer
from models_integration.session.observed import ObservedSegment
from spec.policy import Needs
from spec.retention import Granularity

__all__ = ["BatchWatcher", "Piece", "PromptInPages", "prompt_length"]


def prompt_length(state: Any) -> int:
    """Return the length of a request's prompt, without answer tokens that a requeued request reads again."""
    return cast(int, state._true_initial_tokens) or len(state.initial_tokens)


class PromptInPages(ObservedSegment):
    """Prompt of one request. The keys and values are in the pool, and the queries are recorded here."""

    def __init__(self, needs: Needs, architecture: Architecture, empty: RetainedCache, state: Any) -> None:
        super().__init__(needs, architecture, empty)
        ids = torch.tensor([state.initial_tokens[: prompt_length(state)]], device="cpu")
        self.read(ids, torch.ones_like(ids, dtype=torch.bool))

    def sets_of_a_layer(self, granularity: Granularity) -> int:
        """Return the number of sets per layer according to the model's config, because the given cache is empty."""
        if granularity is not Granularity.HEAD:
            return 1
        config, layer = self.architecture.config, self.architecture.full_layers[0]
        heads = of_layer(config, "num_key_value_heads", layer) or of_layer(config, "num_attention_heads", layer)
        return cast(int, heads)


@dataclass(frozen=True)
class Piece:
    """Columns `start` to `stop` of a batch, which contain a part of one request's prompt."""

    state: Any
    observed: PromptInPages | None
    """Prompt of the request, or None if the set of kept tokens is already known."""
    start: int
    stop: int
    ends: bool


@dataclass
class BatchWatcher:
    """Watcher that passes to each prompt of a batch the attention inputs of the prompt's tokens."""

    pool: Pool
    pieces: Sequence[Piece] = field(default_factory=tuple)

    def wants_lse(self, layer: int) -> bool:
        """Return False, because a batch always has a mask."""
        return False

    def attended(self, module: nn.Module, seen: Attended) -> None:
        """Handle the inputs of a layer's attention. The keys and values are already in the pool."""
        for piece in self.pieces:
            if piece.observed is None or seen.layer not in piece.observed.layers:
                continue
            columns = slice(piece.start, piece.stop)
            keys, values = seen.key[:, :, columns], seen.value[:, :, columns]
            if piece.ends:
                slots = self.pool.slots(piece.state.request_id, piece.observed.columns)
                keys, values = self.pool.stored(seen.layer, slots)
            own = replace(seen, query=seen.query[:, :, columns], key=keys, value=values, lse=None)
            piece.observed.attended(module, own)
