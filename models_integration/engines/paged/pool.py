"""The pool of pages that requests share: where a request's slots are, and how its kept ones are moved together.

Two forms of it were released. Until transformers 5.17 a manager of blocks stands beside tensors of each layer; since
5.18 an allocator has views of one tensor.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from spec.errors import SpecError
from spec.retention import Granularity, Retention

__all__ = ["Pool", "pages_freed", "pool_of"]


def pages_freed(tokens: int, kept: int, page: int) -> int:
    """Pages of `page` slots that a prompt of so many tokens gives back when it keeps `kept` of them, side by side."""
    return -(-tokens // page) - -(-kept // page)


class Pool(ABC):
    """The pages of one manager. One page holds `page` slots of every layer.

    Args:
        allocator: of the full-attention layers; it has each request's blocks.
        page: slots of a page.
    """

    def __init__(self, allocator: Any, page: int) -> None:
        self.page = page
        self._allocator, self._tables = allocator, allocator.block_table

    @abstractmethod
    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, (slots, H_kv, d), which are written to."""

    @abstractmethod
    def _release(self, state: Any, blocks: list[int]) -> None:
        """These blocks of a request are free for others."""

    @property
    def pages(self) -> int:
        """Pages that requests hold."""
        return sum(map(len, self._tables.values()))

    @property
    def requests(self) -> int:
        """Requests that hold pages."""
        return sum(map(bool, self._tables.values()))

    def slots(self, request_id: str, tokens: int) -> Tensor:
        """Slots of the first tokens that a request stores, (tokens,), in their order."""
        return torch.tensor(self._allocator.get_read_indices(request_id, 0, tokens), device="cpu")

    def stored(self, index: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer in these slots, each (1, H_kv, tokens, d)."""
        keys, values = (view[slots.to(view.device)].transpose(0, 1)[None] for view in self.layer(index))
        return keys, values

    def compact(self, state: Any, layers: tuple[int, ...], retention: Retention) -> int:
        """Move the kept tokens of a request next to each other if needed, then free its pages without kept tokens.

        Nothing is moved where one set for the model keeps whole pages, as policies in blocks of a page do.

        Args:
            state: the request's, which stores the `retention.seen` tokens of its prompt.
            layers: every layer, in the order of the retention's groups.
            retention: its groups keep as many tokens.

        Returns:
            Pages that were freed.
        """
        kept = len(retention.group(0))
        whole = self._whole_pages(retention)
        if whole is not None:
            return self._hold(state, whole)
        slots = self.slots(state.request_id, retention.seen)
        for at, index in enumerate(layers):
            for view in self.layer(index):
                sources = [slots[torch.from_numpy(group)] for group in _groups_of_layer(retention, at, len(layers))]
                target = slots[:kept].to(view.device)
                if len(sources) == 1:
                    view[target] = view[sources[0].to(view.device)]
                else:
                    heads = torch.arange(len(sources), device=view.device)
                    view[target] = view[torch.stack(sources, dim=1).to(view.device), heads]
        return self._hold(state, range(-(-kept // self.page)))

    def _whole_pages(self, retention: Retention) -> Sequence[int] | None:
        """The places of the pages that are kept, where none is kept in part."""
        if retention.granularity is not Granularity.MODEL:
            return None
        pages, counts = np.unique(retention.group(0) // self.page, return_counts=True)
        stored = np.minimum(self.page, retention.seen - pages * self.page)
        return pages.tolist() if np.array_equal(counts, stored) else None

    def _hold(self, state: Any, places: Sequence[int]) -> int:
        """A request's pages are those at these places of its table; the others are free."""
        table, held = self._tables[state.request_id], {*places}
        freed = [block for place, block in enumerate(table) if place not in held]
        table[:] = [table[place] for place in places]
        self._release(state, freed)
        return len(freed)


class SectorPool(Pool):
    """As transformers has it since 5.18."""

    def __init__(self, cache: Any) -> None:
        (allocator,) = cache.cache_allocators.values()
        super().__init__(allocator, allocator.tokens_per_page)
        self._views, self._ledger, self._blocks = allocator._kv_token_views, allocator.ledger, cache.pool

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Views of the one tensor."""
        keys, values = self._views[index]
        return keys, values

    def _release(self, state: Any, blocks: list[int]) -> None:
        free = [block for block in blocks if self._ledger.release(block, no_cache=True)]
        self._blocks.free_blocks(self._allocator.index, free)


class BlockPool(Pool):
    """As transformers has it until 5.17, where a state counts its blocks."""

    def __init__(self, cache: Any) -> None:
        (allocator,) = cache.group_cache_managers
        super().__init__(allocator, cache.block_size)
        self._keys, self._values, self._places = cache.key_cache, cache.value_cache, cache.layer_index_to_group_indices
        self._blocks = cache._block_manager

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """The layer's own tensors."""
        _, place = self._places[index]
        return self._keys[place], self._values[place]

    def _release(self, state: Any, blocks: list[int]) -> None:
        self._blocks.free_blocks(blocks, shareable=self._allocator.uses_block_sharing)
        state.allocated_blocks -= len(blocks)


def pool_of(cache: Any) -> Pool:
    """The pool of a paged cache.

    Raises:
        SpecError: where it has another form than those released so far.
    """
    try:
        return SectorPool(cache) if hasattr(cache, "cache_allocators") else BlockPool(cache)
    except (AttributeError, ValueError) as error:
        reason = f"kvspec does not support the paged cache of this version: {error}"
        raise SpecError("transformers", transformers.__version__, reason) from error


def _groups_of_layer(retention: Retention, at: int, layers: int) -> list[Any]:
    """The kept sets of the layer at this place: one, or one for each KV head."""
    if retention.granularity is Granularity.MODEL:
        return [retention.group(0)]
    sets = retention.groups // layers
    return [retention.group(at * sets + each) for each in range(sets)]
