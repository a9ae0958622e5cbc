"""Process a prompt under a policy, for a generation loop of the caller."""

from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from models_integration.cache.retained_cache import RetainedCache
from models_integration.policies.methods import RetentionPolicy
from models_integration.session.session import Session
from spec.errors import SpecError

__all__ = ["Prefilled", "prefill"]


class Prefilled(NamedTuple):
    """Result of `prefill`: logits, compacted cache and session."""

    logits: Tensor
    """Logits of the token after the prompt, (rows, 1, vocabulary)."""
    cache: RetainedCache
    run: Session


def prefill(model: PreTrainedModel, policy: RetentionPolicy, input_ids: Tensor) -> Prefilled:
    """Process a prompt, evict tokens, and return the logits and the cache for your own generation loop.

        logits, cache, run = kvspec.prefill(model, kvspec.StreamingLLM(512), input_ids)
        output = model(input_ids=logits.argmax(-1), cache=cache)  # past_key_values before transformers 5.24

    Your own generation loop does not need to pass position ids or masks. To continue with `generate` instead, pass the
    prompt again, followed by the new tokens.

    Args:
        model: a causal language model.
        policy: a policy that keeps the same tokens in all layers and heads. If the policy keeps different tokens in
            different layers or heads, use `with policy(model)` instead of `prefill`.
        input_ids: one prompt, (1, n).

    Returns:
        The logits of the next token (computed with the full cache), the compacted cache, and the session.

    Raises:
        SpecError: if kvspec does not support the model or the prompt.
    """
    if not isinstance(policy, RetentionPolicy):
        reason = "must be a policy with a budget: type kvspec.prefill(model, kvspec.StreamingLLM(512), input_ids)"
        raise SpecError("policy", type(policy).__name__, reason)
    with torch.no_grad(), policy(model) as run:
        output = model(input_ids=input_ids, use_cache=True)
    assert run.cache is not None
    return Prefilled(output.logits[:, -1:], run.cache, run)
