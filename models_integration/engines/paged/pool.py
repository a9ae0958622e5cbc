"""Pool of pages that requests share: location of a request's slots, and compaction of the kept slots.

Two forms of the pool exist. Until transformers 5.17, a block manager and separate tensors of each layer are used. Since
5.18, an allocator uses views of one tensor.
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
    """Return how many pages of `page` slots a prompt of `tokens` tokens frees if it keeps `kept` adjacent tokens."""
    return -(-tokens // page) - -(-kept // page)


class Pool(ABC):
    """Pages of one manager. One page contains `page` slots of every layer.

    Args:
        allocator: allocator of the full-attention layers, with the blocks of each request.
        page: number of slots in a page.
    """

    def __init__(self, allocator: Any, page: int) -> None:
        self.page = page
        self._allocator, self._tables = allocator, allocator.block_table

    @abstractmethod
    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the writable keys and values of one layer, (slots, H_kv, d)."""

    @abstractmethod
    def _release(self, state: Any, blocks: list[int]) -> None:
        """Free these blocks of a request."""

    @property
    def pages(self) -> int:
        """Number of pages that requests use."""
        return sum(map(len, self._tables.values()))

    @property
    def requests(self) -> int:
        """Number of requests that use pages."""
        return sum(map(bool, self._tables.values()))

    def slots(self, request_id: str, tokens: int) -> Tensor:
        """Return the slots of a request's first `tokens` stored tokens, (tokens,), in order."""
        return torch.tensor(self._allocator.get_read_indices(request_id, 0, tokens), device="cpu")

    def stored(self, index: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of one layer in these slots, each (1, H_kv, tokens, d)."""
        keys, values = (view[slots.to(view.device)].transpose(0, 1)[None] for view in self.layer(index))
        return keys, values

    def compact(self, state: Any, layers: tuple[int, ...], retention: Retention) -> int:
        """Move the kept tokens of a request next to each other if needed, then free its pages without kept tokens.

        No token is moved if the model has one set of kept tokens and keeps whole pages, as with policies in blocks.

        Args:
            state: state of the request, which stores the `retention.seen` tokens of the prompt.
            layers: indices of all layers, in the order of the retention's groups.
            retention: kept tokens. All groups keep the same number of tokens.

        Returns:
            Number of freed pages.
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
        """Return the indices of the kept pages in the request's table, or None if a page is kept only in part."""
        if retention.granularity is not Granularity.MODEL:
            return None
        pages, counts = np.unique(retention.group(0) // self.page, return_counts=True)
        stored = np.minimum(self.page, retention.seen - pages * self.page)
        return pages.tolist() if np.array_equal(counts, stored) else None

    def _hold(self, state: Any, places: Sequence[int]) -> int:
        """Keep the request's pages at these indices of its table, free all others, and return how many were freed."""
        table, held = self._tables[state.request_id], {*places}
        freed = [block for place, block in enumerate(table) if place not in held]
        table[:] = [table[place] for place in places]
        self._release(state, freed)
        return len(freed)


class SectorPool(Pool):
    """Pool of transformers 5.18 and later."""

    def __init__(self, cache: Any) -> None:
        (allocator,) = cache.cache_allocators.values()
        super().__init__(allocator, allocator.tokens_per_page)
        self._views, self._ledger, self._blocks = allocator._kv_token_views, allocator.ledger, cache.pool

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return views of the common tensor."""
        keys, values = self._views[index]
        return keys, values

    def _release(self, state: Any, blocks: list[int]) -> None:
        free = [block for block in blocks if self._ledger.release(block, no_cache=True)]
        self._blocks.free_blocks(self._allocator.index, free)


class BlockPool(Pool):
    """Pool of transformers up to 5.17, in which a state counts the blocks."""

    def __init__(self, cache: Any) -> None:
        (allocator,) = cache.group_cache_managers
        super().__init__(allocator, cache.block_size)
        self._keys, self._values, self._places = cache.key_cache, cache.value_cache, cache.layer_index_to_group_indices
        self._blocks = cache._block_manager

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the tensors of the layer."""
        _, place = self._places[index]
        return self._keys[place], self._values[place]

    def _release(self, state: Any, blocks: list[int]) -> None:
        self._blocks.free_blocks(blocks, shareable=self._allocator.uses_block_sharing)
        state.allocated_blocks -= len(blocks)


def pool_of(cache: Any) -> Pool:
    """Return the pool of a paged cache.

    Raises:
        SpecError: if the cache has an unknown form.
    """
    try:
        return SectorPool(cache) if hasattr(cache, "cache_allocators") else BlockPool(cache)
    except (AttributeError, ValueError) as error:
        reason = f"kvspec does not support the paged cache of this version: {error}"
        raise SpecError("transformers", transformers.__version__, reason) from error


def _groups_of_layer(retention: Retention, at: int, layers: int) -> list[Any]:
    """Return the sets of kept tokens of the layer with index `at`: one set, or one set per KV head."""
    if retention.granularity is Granularity.MODEL:
        return [retention.group(0)]
    sets = retention.groups // layers
    return [retention.group(at * sets + each) for each in range(sets)]
