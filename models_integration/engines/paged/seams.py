"""Checks, before any work, that kvspec supports the installed continuous batching and the requested options."""

import inspect
from collections.abc import Mapping
from typing import Any

import transformers
from transformers import PreTrainedModel
from transformers.generation.continuous_batching import cache, continuous_api, input_outputs, scheduler

from models_integration.model.architecture import IMPLEMENTATIONS, Architecture
from reference.policies.budgets import even, everything
from spec.errors import SpecError
from spec.retention import Granularity

__all__ = ["check_manager", "check_seams", "check_served"]

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
    (cache, "FullAttentionCacheAllocator"): {"get_read_indices": ("request_id", "past_length", "query_length")},
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


def check_served(architecture: Architecture, method: Any) -> None:
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
    implementation = model.config._attn_implementation
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
