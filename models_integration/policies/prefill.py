"""A prompt read and compacted by one call, for those who run their own loop."""

from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from models_integration.cache.retained_cache import RetainedCache
from models_integration.policies.methods import RetentionPolicy
from models_integration.session.session import Session

__all__ = ["Prefilled", "prefill"]


class Prefilled(NamedTuple):
    """A prompt that has been read and compacted."""

    logits: Tensor
    """Of the token after the prompt, (rows, 1, vocabulary)."""
    cache: RetainedCache
    run: Session


def prefill(model: PreTrainedModel, policy: RetentionPolicy, input_ids: Tensor) -> Prefilled:
    """Read a prompt under a policy, for those who run their own loop.

    Go on with `model(input_ids=next_token, past_key_values=cache)`: default position ids and masks are right. With
    generate, pass the prompt again before the new tokens: it leaves out what the cache has seen. The logits come from
    the uncompacted prompt.

    Args:
        model: a causal language model.
        policy: such as CrystalCache(...). Where it keeps other tokens in other layers or heads, its cache can be read
            inside the context manager only.
        input_ids: one prompt, (1, n).

    Raises:
        SpecError: for a model or a prompt that is not served.
    """
    with torch.no_grad(), policy(model) as run:
        output = model(input_ids=input_ids, use_cache=True)
    assert run.cache is not None
    return Prefilled(output.logits[:, -1:], run.cache, run)
