"""What a policy is shown of prompts that are read in pieces, many in one forward."""

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
from models_integration.session.segment import ObservedSegment
from spec.policy import Needs
from spec.retention import Granularity

__all__ = ["BatchWatcher", "Piece", "PromptInPages", "prompt_length"]


def prompt_length(state: Any) -> int:
    """Tokens of a request's prompt: one that was put back into the queue reads its answer again behind it."""
    return cast(int, state._true_initial_tokens) or len(state.initial_tokens)


class PromptInPages(ObservedSegment):
    """One request's prompt. Its keys and values are in the pool; what is noted is what it asked."""

    def __init__(self, needs: Needs, architecture: Architecture, empty: RetainedCache, state: Any) -> None:
        super().__init__(needs, architecture, empty)
        ids = torch.tensor([state.initial_tokens[: prompt_length(state)]], device="cpu")
        self.read(ids, torch.ones_like(ids, dtype=torch.bool))

    def sets_of_a_layer(self, granularity: Granularity) -> int:
        """As the model's configuration has it: nothing is in the cache that it is given."""
        if granularity is not Granularity.HEAD:
            return 1
        config, layer = self.architecture.config, self.architecture.full_layers[0]
        heads = of_layer(config, "num_key_value_heads", layer) or of_layer(config, "num_attention_heads", layer)
        return cast(int, heads)


@dataclass(frozen=True)
class Piece:
    """Columns `start` to `stop` of a batch: a part of one request's prompt, which ends here or goes on."""

    state: Any
    observed: PromptInPages | None
    """None where the request's kept set is known."""
    start: int
    stop: int
    ends: bool


@dataclass
class BatchWatcher:
    """Tells each prompt of a batch what its own tokens attended with."""

    pool: Pool
    pieces: Sequence[Piece] = field(default_factory=tuple)

    def wants_lse(self, layer: int) -> bool:
        """Never: a batch has a mask."""
        return False

    def attended(self, module: nn.Module, seen: Attended) -> None:
        """After a layer has attended: its keys and values are in the pool."""
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
