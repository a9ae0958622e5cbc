"""Process a prompt under a policy, for a generation loop of the caller."""

from numbers import Integral
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from models_integration.cache.retained_cache import RetainedCache
from models_integration.model.cache_argument import cache_name
from models_integration.policies.methods import RetentionPolicy
from models_integration.session.inputs import check_input_ids
from models_integration.session.session import Session
from spec.errors import SpecError

__all__ = ["Prefilled", "blocks_of", "prefill"]


class Prefilled(NamedTuple):
    """Result of `prefill`: logits, compacted cache and session."""

    logits: Tensor
    """Logits of the token after the prompt, (rows, 1, vocabulary)."""
    cache: RetainedCache
    run: Session


def prefill(
    model: PreTrainedModel, policy: RetentionPolicy, input_ids: Tensor, block: int | None = None,
) -> Prefilled:
    """Process a prompt, evict tokens, and return the logits and the cache for your own generation loop.

        logits, cache, run = kvspec.prefill(model, kvspec.StreamingLLM(512), input_ids)
        output = model(input_ids=logits.argmax(-1), cache=cache)  # past_key_values before transformers 5.24

    Your own generation loop does not need to pass position ids or masks. To continue with `generate` instead, pass the
    prompt again, followed by the new tokens.

    With `block`, the model reads a long prompt in blocks, and the policy evicts after each block. The cache never
    stores more than the tokens that the policy keeps and one block. Later blocks cannot attend to evicted tokens, so
    the answers can differ from eviction after the whole prompt.

    Args:
        model: a causal language model.
        policy: a policy that keeps the same tokens in all layers and heads. If the policy keeps different tokens in
            different layers or heads, pass the cache to the model inside a new `with policy(model)` block.
        input_ids: one prompt, (1, n).
        block: number of tokens in a block, at least 2. A last block of one token belongs to the block before. None
            (the default) reads the whole prompt at once.

    Returns:
        The logits of the next token (computed before the last eviction), the compacted cache, and the session.

    Raises:
        SpecError: if kvspec does not support the model or the prompt, or if the policy cannot evict after each block.
    """
    if not isinstance(policy, RetentionPolicy):
        reason = "must be a policy with a budget: type kvspec.prefill(model, kvspec.StreamingLLM(512), input_ids)"
        raise SpecError("policy", type(policy).__name__, reason)
    run = policy(model)
    if block is not None:
        run.check_blocks()
    with torch.no_grad(), run:
        for part in blocks_of(check_input_ids(input_ids), block):
            output = model(input_ids=part, use_cache=True, **{cache_name(model): run.cache})
    assert run.cache is not None
    return Prefilled(output.logits[:, -1:], run.cache, run)


def blocks_of(input_ids: Tensor, block: int | None) -> list[Tensor]:
    """Return the blocks of a prompt. No block has one token, because one token is a decode step.

    Raises:
        SpecError: if `block` is neither a number of at least 2 nor None.
    """
    if block is None:
        return [input_ids]
    if not isinstance(block, Integral) or int(block) < 2:
        raise SpecError("block", block, "must be a number of tokens, at least 2, or None")
    size = int(block)
    parts = [input_ids[..., at : at + size] for at in range(0, max(1, input_ids.shape[-1]), size)]
    if len(parts) > 1 and parts[-1].shape[-1] == 1:
        parts[-2:] = [torch.cat(parts[-2:], dim=-1)]
    return parts
