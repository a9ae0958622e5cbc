"""Budgets as memory, such as "64MiB". A model determines how many tokens the memory stores."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from models_integration.cache.retained_cache import RetainedCache
from models_integration.model.architecture import Architecture, describe
from models_integration.model.isolated_forward import FORWARD_ERRORS, isolated_forward, read_tokens
from models_integration.policies.retention_policy import RetentionPolicy
from models_integration.session.method import Method
from spec.budget import MEMORY, UNITS, Budget
from spec.errors import SpecError

__all__ = ["UNKNOWN", "SizedPolicy", "bytes_per_token", "bytes_without_weights", "is_size", "tokens_of_size"]

_LONGEST = 64  # characters, as for other budgets
UNKNOWN = Budget(count=2**62)
"""Budget in place of a memory while the model is unknown."""


def is_size(budget: object) -> bool:
    """Return True if a budget is a number with a unit of memory: B, kB, MB, GB, KiB, MiB or GiB."""
    return isinstance(budget, str) and len(budget) <= _LONGEST and MEMORY.fullmatch(budget) is not None


@torch.no_grad()
def bytes_per_token(model: PreTrainedModel) -> int:
    """Return the bytes of the keys and values that all full-attention layers store for one token.

    The function runs the model on one token, because families differ in what they store.
    """
    architecture = describe(model)
    with isolated_forward(architecture):
        return _bytes_of_a_token(architecture)


@torch.no_grad()
def bytes_without_weights(config: Any, dtype: Any) -> int:
    """Return `bytes_per_token` of the model with this configuration, which is changed. No weight is read.

    Raises:
        SpecError: if the model reads values of its weights before the last attention.
    """
    config.pad_token_id = None  # transformers 5.24 would compare ids with this token, and ids on "meta" have no values
    with torch.device("meta"):
        model = cast(Any, AutoModelForCausalLM).from_config(config, dtype=dtype).train(False)
    try:
        return _bytes_of_a_token(describe(model), torch.device("meta"))
    except FORWARD_ERRORS as error:
        reason = f"has no known bytes of a token without weights ({error}): give a share, or a number of tokens"
        raise SpecError("model", config.model_type, reason) from error


def _bytes_of_a_token(architecture: Architecture, device: torch.device | None = None) -> int:
    cache = RetainedCache(architecture.config)
    read_tokens(architecture, cache, 1, device=device)
    stored = [tensor for layer in cache.full_layers for tensor in (layer.keys, layer.values)]
    return sum(tensor.nbytes for tensor in stored if tensor is not None)


def tokens_of_size(size: str, each: int, least: int = 1) -> int:
    """Return the number of tokens of a prompt that the full-attention layers of a model store in a memory.

    Sliding windows and recurrent states are not counted, because eviction cannot free them.

    Args:
        size: number with a unit, such as "64MiB".
        each: bytes of a token in all layers, as `bytes_per_token` returns.
        least: smallest number of tokens that a policy keeps.

    Raises:
        SpecError: if the memory stores fewer than `least` tokens. The message has the smallest memory.
    """
    parsed = MEMORY.fullmatch(size)
    if parsed is None:
        raise SpecError("budget", size, f"must be a number with a unit of memory: {', '.join(UNITS)}")
    tokens = int(Fraction(parsed[1]) * UNITS[parsed[2]]) // each
    if tokens < least:
        reason = f"stores {tokens} tokens of {each} bytes, and the policy keeps at least {least}"
        raise SpecError("budget", size, f"{reason}: give at least {least * each}B")
    return tokens


@dataclass(frozen=True)
class SizedPolicy(RetentionPolicy):
    """Policy whose budget is the memory of the kept tokens of each prompt. The budget becomes a number of tokens."""

    size: str
    make: Callable[[Budget], RetentionPolicy] = field(repr=False)
    """Function that returns the policy with a budget. It gets UNKNOWN, and the budget of the result is replaced."""

    def on(self, model: PreTrainedModel) -> Method:
        """Prepare the policy for a model, with the number of tokens that the memory stores.

        Raises:
            SpecError: if the model or the policy is not supported, or if the policy keeps more than the memory stores.
        """
        return self.budgeted(self.make(UNKNOWN).on(model), lambda: bytes_per_token(model))

    def budgeted(self, method: Method, bytes_of_a_token: Callable[[], int]) -> Method:
        """Return a method with the number of tokens that the memory stores.

        Raises:
            SpecError: if the policy keeps more than the memory stores.
        """
        if method.budget != UNKNOWN:  # "fullcache" ignores the budget
            return method
        tokens = tokens_of_size(self.size, bytes_of_a_token(), max(1, method.policy.floor))
        return replace(method, budget=Budget(count=tokens))
