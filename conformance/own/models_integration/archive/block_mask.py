"""The oracle of a splice: one forward over everything on a plain cache, in which masks keep apart what was apart.

It shares no code with the splice: no rotation is ever moved, since every token is computed at its own position.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from conformance.own.models_integration.archive.models import VOCABULARY

__all__ = ["Chunks", "Oracle", "block_masked", "ids"]

Chunks = Sequence[tuple[list[int], int]]
"""Ids of each chunk, and how many of them are hidden."""

SESSION, QUERY = 0, -1


@dataclass(frozen=True)
class Oracle:
    """Logits (1, queries, vocabulary) of the query; keys and values of every layer; and what each slot is."""

    logits: Tensor
    cache: DynamicCache
    visible: Tensor
    """Slots that a splice has: all but hidden preambles, and what was evicted."""
    own: Tensor
    """Slots of the session and the query."""
    positions: Tensor


def ids(n: int, seed: int) -> list[int]:
    """Token ids drawn once for all."""
    drawn: list[int] = torch.randint(3, VOCABULARY, (n,), generator=torch.Generator().manual_seed(seed)).tolist()
    return drawn


def block_masked(
    model: PreTrainedModel, session: list[int], chunks: Chunks, query: list[int], *, evicted: Set[int] = frozenset(),
    lower: Set[int] = frozenset(), window: int | None = None,
    evicted_in: Mapping[int, Sequence[Set[int]]] | None = None,
) -> Oracle:
    """One forward. Chunks see themselves alone, the query sees what is visible and not `evicted` (positions).

    Args:
        lower: layers that see no chunk.
        window: of the model's sliding layers, which see no chunk either, and evict nothing.
        evicted_in: positions that some layers have evicted beside those, from all heads or from each KV head.
    """
    slots = _slots(session, chunks, query)
    asks = torch.tensor([own == QUERY for own in slots.owner])
    gone = [hide or (own != QUERY and place in evicted)
            for hide, own, place in zip(slots.hidden, slots.owner, slots.positions, strict=True)]
    full, apart = _masks(slots.owner, gone)
    positions = torch.tensor(slots.positions)
    shaped: Any = full[None, None]
    if window is not None:
        near = positions[:, None] - positions < window
        shaped = {"full_attention": shaped, "sliding_attention": (apart & near)[None, None]}
    removals = _masks_of(model, lower, apart)
    for layer, gaps in (evicted_in or {}).items():
        own_masks = []
        for lost in gaps:
            stays = torch.tensor([at not in lost for at in slots.positions]) | asks
            own_masks.append(full & (stays | ~asks[:, None]))
        queries = model.config.num_attention_heads // len(gaps) if len(gaps) > 1 else 1
        removals += _masks_of(model, {layer}, torch.stack(own_masks).repeat_interleave(queries, 0))
    cache = DynamicCache()
    try:
        with torch.no_grad():
            logits = model(
                input_ids=torch.tensor([slots.tokens]), position_ids=positions[None], attention_mask=shaped,
                past_key_values=cache, use_cache=True,
            ).logits
    finally:
        for removal in removals:
            removal.remove()
    mine = torch.tensor([own in (SESSION, QUERY) for own in slots.owner])
    return Oracle(logits[:, -len(query) :], cache, ~torch.tensor(gone), mine, positions)


@dataclass
class _Slots:
    """Every token of the one forward: its id, its position, the chunk that owns it, and whether a splice hides it."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    owner: list[int] = field(default_factory=list)
    hidden: list[bool] = field(default_factory=list)

    def add(self, tokens: list[int], start: int, owner: int, preamble: int = 0) -> None:
        self.tokens += tokens
        self.positions += range(start, start + len(tokens))
        self.owner += [owner] * len(tokens)
        self.hidden += [place < preamble for place in range(len(tokens))]


def _slots(session: list[int], chunks: Chunks, query: list[int]) -> _Slots:
    slots = _Slots()
    slots.add(session, 0, SESSION)
    at = len(session)
    for number, (chunk, preamble) in enumerate(chunks, 1):
        slots.add(chunk, at - preamble, number, preamble)
        at += len(chunk) - preamble
    slots.add(query, at, QUERY)
    return slots


def _masks(owner: list[int], gone: list[bool]) -> tuple[Tensor, Tensor]:
    """Who sees whom, (tokens, tokens), where the query sees the chunks, and where it does not."""
    n = len(owner)
    full, apart = torch.zeros(n, n, dtype=torch.bool), torch.zeros(n, n, dtype=torch.bool)
    for row in range(n):
        for column in range(row + 1):
            same = owner[row] == owner[column]
            full[row, column] = same or (owner[row] == QUERY and not gone[column])
            apart[row, column] = same or (owner[row] == QUERY and owner[column] == SESSION)
    return full, apart


def _masks_of(model: PreTrainedModel, layers: Set[int], mask: Tensor) -> list[Any]:
    def swap(module: Any, args: Any, options: dict[str, Any]) -> Any:
        return args, {**options, "attention_mask": mask[None] if mask.dim() == 3 else mask[None, None]}

    return [
        module.register_forward_pre_hook(swap, with_kwargs=True) for name, module in model.named_modules()
        if name.endswith("self_attn") and module.layer_idx in layers
    ]
