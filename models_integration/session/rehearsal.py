"""KVzip's rehearsal: the model repeats the context after a prompt. The repeated tokens are removed from the cache."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from models_integration.attention.capture import Attended, Repeated, observing
from models_integration.cache.retained_cache import RetainedCache
from models_integration.model.architecture import Architecture, restored_rotation
from models_integration.model.cache_argument import cache_name
from reference.policies.kvzip import rehearsal_chunks
from spec.policy import Rehearsal

__all__ = ["rehearse"]


class _Watcher:
    """Record the queries and keys of each layer, and remove the repeated tokens after the attention of the layer."""

    def __init__(self, cache: RetainedCache) -> None:
        self.cache, self._before = cache.branch(), cache
        self.attention: dict[int, tuple[Tensor, Tensor]] = {}
        self.norms: dict[int, Tensor] = {}

    def wants_lse(self, layer: int) -> bool:
        """Return False: the log-sum-exp is not needed."""
        return False

    def attended(self, module: nn.Module, seen: Attended) -> None:
        """After the attention of a layer, keep the queries and keys of the repeat, and restore the layer."""
        index, r = seen.layer, seen.query.shape[2]
        self.attention[index] = seen.query.detach(), seen.key[:, :, -r:].detach().clone()
        self.cache.layers[index] = copy.copy(self._before.layers[index])

    def reads(self, index: int) -> Callable[..., None]:
        """Return a hook for the attention of a layer that records the norms of the hidden states."""
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            self.norms[index] = hidden.detach().double().norm(dim=-1)

        return note


def rehearse(
    architecture: Architecture, cache: RetainedCache, input_ids: Tensor, rehearsal: Rehearsal, device: torch.device,
) -> dict[int, tuple[Repeated, ...]]:
    """Let the model repeat each chunk after the prompts in a cache. The tensors of the cache are not changed.

    Implements: PO-REHEARSAL

    Args:
        architecture: description of the model.
        cache: cache with all tokens of the prompts.
        input_ids: (rows, n), without padding, on the host.
        rehearsal: settings of the repetition.
        device: device of the model's inputs.

    Returns:
        Queries, keys and norms of each full-attention layer, one entry for each chunk.
    """
    found: dict[int, list[Repeated]] = {layer: [] for layer in architecture.full_layers}
    rows = [rehearsal_chunks(ids, rehearsal) for ids in input_ids.numpy()]
    for parts in zip(*rows, strict=True):
        (start, stop, _), watcher = parts[0], _Watcher(cache)
        hooks = [
            architecture.attention[layer].register_forward_pre_hook(watcher.reads(layer), with_kwargs=True)
            for layer in found
        ]
        ids = torch.from_numpy(np.stack([one for _, _, one in parts])).to(device, non_blocking=True)
        try:
            with (
                torch.no_grad(), restored_rotation(architecture.decoder),
                observing(architecture, watcher.cache, watcher, found),
            ):
                given = {cache_name(architecture.decoder): watcher.cache}
                architecture.decoder.forward(input_ids=ids, use_cache=True, **given)
        finally:
            for hook in hooks:
                hook.remove()
        for layer, (q, k) in watcher.attention.items():
            found[layer].append(Repeated(start, stop, q, k, watcher.norms[layer]))
    return {layer: tuple(repeats) for layer, repeats in found.items()}
