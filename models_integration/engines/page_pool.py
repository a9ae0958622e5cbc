"""Pool of pages that requests share in continuous batching: slots of a request, and compaction of the kept slots.

Two forms of the pool exist. Until transformers 5.17, a block manager and separate tensors of each layer are used. Since
5.18, an allocator uses views of one tensor. Before any work, kvspec checks that it supports the installed continuous
batching and the requested options.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.continuous_batching import cache as paged_cache
from transformers.generation.continuous_batching import continuous_api, input_outputs, scheduler

from models_integration.model.architecture import IMPLEMENTATIONS, Architecture
from models_integration.model.seams import attention_of
from models_integration.session.method import Method
from reference.policies.budgets import even, everything
from spec.errors import SpecError
from spec.retention import Granularity, Retention

__all__ = ["Pool", "check_manager", "check_seams", "check_served", "pages_freed", "pool_of"]

# Positional parameters of each method that kvspec passes or reads.
_SEAMS: Mapping[tuple[object, str], Mapping[str, tuple[str, ...]]] = {
    (continuous_api, "ContinuousMixin"): {
        "init_continuous_batching": ("generation_config", "continuous_batching_config"),
        "destroy_cached_continuous_batching_manager": (),
    },
    (continuous_api, "ContinuousBatchingManager"): {
        "_create_batch_processor": (), "is_running": (), "stop": ("block",),
    },
    (continuous_api, "ContinuousBatchProcessor"): {
        "_generation_step": ("model",), "update_batch": (), "_handle_request_error": ("error", "state"),
    },
    (scheduler, "Scheduler"): {
        "_schedule_request": ("state", "request_tokens", "token_budget"), "finish_request": ("request_id",),
    },
    (input_outputs, "ContinuousBatchingIOs"): {"prepare_batch_tensors": ("requests_in_batch",)},
    (paged_cache, "FullAttentionCacheAllocator"): {"get_read_indices": ("request_id", "past_length", "query_length")},
}

_SHARED = "blocks that requests share cannot be compacted, and the policy is not shown what is not read: must be False"
_UNSERVED = {
    "allow_block_sharing": _SHARED,
    "use_async_batching": "a batch is prepared before the prompts of the one before it are decided: must be off",
    "use_cuda_graph": "a graph replays no observation: must be off",
    "varlen_compile_config": "a compiled forward is not observed: must be left out",
    "decode_compile_config": "a compiled forward is not observed: must be left out",
    "max_blocks_per_request": "the block-table decode path takes positions for slots: must be 0",
    "cpu_offload_space": "requests that are swapped to the host are not served: must be 0",
}


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


def check_seams() -> None:
    """Check that the installed transformers has all names that kvspec uses.

    Raises:
        SpecError: if a name is missing. The message contains the name.
    """
    for (module, owner), methods in _SEAMS.items():
        for name, expected in methods.items():
            method = getattr(getattr(module, owner, None), name, None)
            found = () if method is None else tuple(inspect.signature(method).parameters)[1:]
            if method is None or found[: len(expected)] != expected:
                takes = f" with ({', '.join(expected)}, ...)" if expected else ""
                raise SpecError("transformers", transformers.__version__, f"has no {owner}.{name}{takes}")


def check_served(architecture: Architecture, method: Method) -> None:
    """Check that kvspec supports the model and the policy in continuous batching: all layers keep equally many tokens.

    Raises:
        SpecError: otherwise.
    """
    layers = architecture.config.num_hidden_layers
    if architecture.recurrent or len(architecture.full_layers) < layers:
        raise SpecError(
            "model", architecture.name, "must not have sliding-window or recurrent layers, which have no pages"
        )
    if architecture.wraps:
        reason = "also accepts images, which pages do not store: use text = model.get_decoder() and policy(text)"
        raise SpecError("model", architecture.name, reason)
    if architecture.latent:
        raise SpecError(
            "model", architecture.name, "stores one latent for all heads (MLA), but pages store separate heads"
        )
    policy = method.policy
    if method.decode or method.segment_tokens is not None:
        raise SpecError(
            "policy", policy.name,
            "evicts while tokens are generated; use a policy that evicts after the prompt, such as snapkv",
        )
    if policy.scorer.needs.rehearsal is not None:
        reason = "needs a second pass over each prompt; use a policy without a template, such as snapkv"
        raise SpecError("policy", policy.name, reason)
    if policy.granularity is not Granularity.MODEL and policy.budgets not in (even, everything):
        raise SpecError(
            "policy", policy.name, f"each {policy.granularity.value} must keep the same number of tokens, because a "
            "page has equally many slots for all layers and heads"
        )


def check_manager(model: PreTrainedModel, manager: Any) -> None:
    """Check that kvspec supports the resolved configuration of a manager.

    Raises:
        SpecError: if an argument is not supported. The message contains the argument.
    """
    implementation = attention_of(model.config)
    if implementation.removeprefix("paged|") not in IMPLEMENTATIONS:
        reason = (
            "must be sdpa or eager: load the model with attn_implementation='sdpa', and set auto_switch_to_flash=False"
        )
        raise SpecError("attn_implementation", implementation, reason)
    if manager.num_return_sequences > 1:
        reason = "must be 1, because several sequences would share the blocks of a prompt"
        raise SpecError("num_return_sequences", manager.num_return_sequences, reason)
    if manager.distributed_helper.tp_size > 1:
        raise SpecError("tp_size", manager.distributed_helper.tp_size, "must be 1: each rank has only some heads")
    config = manager.continuous_batching_config
    for name, reason in _UNSERVED.items():
        value = getattr(config, name, None)
        if any(value) if isinstance(value, tuple) else value:
            raise SpecError(name, value, reason)
