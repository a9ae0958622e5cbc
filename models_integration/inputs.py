"""What a prompt must look like, checked before anything changes."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from models_integration.architecture import Architecture
from spec.errors import SpecError

__all__ = ["check_forward", "check_generate", "check_prompt"]

# Ways to generate that this part does not serve, by the argument that asks for them.
_GENERATE = {
    "inputs_embeds": "pass input_ids: policies read the tokens",
    "prefill_chunk_size": "a prompt must be one forward so far: chunked prefill is not served",
    "cache_implementation": "must be left alone: static, offloaded and quantised caches cannot be compacted",
    "assistant_model": "assisted decoding is not served: it takes tokens back from the cache",
    "prompt_lookup_num_tokens": "assisted decoding is not served: it takes tokens back from the cache",
    "assistant_early_exit": "assisted decoding is not served: it takes tokens back from the cache",
}


def check_generate(model: PreTrainedModel, kwargs: Mapping[str, Any]) -> None:
    """Refuse what generate would do with the cache in ways that are not served.

    Raises:
        SpecError: that names the argument.
    """
    configs = (kwargs.get("generation_config"), model.generation_config)

    def effective(name: str) -> Any:
        stated = (kwargs.get(name), *(getattr(config, name, None) for config in configs))
        return next((value for value in stated if value is not None), None)

    for name, reason in _GENERATE.items():
        value = effective(name)
        if value is not None and value != "dynamic":
            shown = value if isinstance(value, (int, str)) else type(value).__name__
            raise SpecError(name, shown, reason)
    if effective("use_cache") is False:
        raise SpecError("use_cache", False, "must be on: there is no cache to compact")


def check_forward(arguments: Mapping[str, Any], default_use_cache: bool) -> None:
    """What holds for every forward inside the context.

    Raises:
        SpecError: for embeddings in place of ids, ids of a wrong shape or dtype, or no cache.
    """
    if arguments.get("inputs_embeds") is not None:
        raise SpecError("inputs_embeds", "given", "pass input_ids: policies read the tokens")
    ids = arguments.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.dtype not in (torch.int64, torch.int32):
        shown = (tuple(ids.shape), ids.dtype) if isinstance(ids, Tensor) else ids
        raise SpecError("input_ids", shown, "must be an integer tensor (rows, n)")
    use_cache = arguments.get("use_cache")
    if use_cache is False or (use_cache is None and not default_use_cache):
        raise SpecError("use_cache", False, "must be on: there is no cache to compact")
    cache = arguments.get("past_key_values")
    if cache is not None and not isinstance(cache, Cache):
        raise SpecError("past_key_values", type(cache).__name__, "must be a DynamicCache, or left to the policy")


def check_prompt(architecture: Architecture, arguments: Mapping[str, Any]) -> None:
    """What holds for a prompt: one sequence of at least two tokens, from position 0, unpadded.

    Raises:
        SpecError: otherwise, with the argument that differs.
    """
    ids: Tensor = arguments["input_ids"]
    n = ids.shape[1]
    if len(ids) == 0 or n == 0:
        raise SpecError("input_ids", tuple(ids.shape), "must not be empty")
    if n == 1:
        raise SpecError("input_ids", tuple(ids.shape), "one query is a decode step, not a segment")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= architecture.vocabulary:
        raise SpecError("input_ids", low if low < 0 else high, f"must lie in [0, {architecture.vocabulary})")
    _check_mask(arguments.get("attention_mask"), ids)
    if not torch.equal(ids, ids[:1].expand_as(ids)):
        raise SpecError("input_ids", tuple(ids.shape), "rows must be one prompt (beams): batches are not served yet")
    positions = arguments.get("position_ids")
    if positions is not None and not (
        positions.ndim == 2 and bool((positions == torch.arange(n, device=positions.device)).all())
    ):
        raise SpecError("position_ids", tuple(positions.shape), f"must be 0 to {n - 1}: a prompt starts the sequence")


def _check_mask(mask: object, ids: Tensor) -> None:
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.shape != ids.shape:
        shown = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise SpecError("attention_mask", shown, f"must have the shape of input_ids, {tuple(ids.shape)}")
    if not bool((mask == 1).all()):
        raise SpecError("attention_mask", "zeros", "padded prompts are not served yet")
