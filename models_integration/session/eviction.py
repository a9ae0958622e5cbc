"""The cache of kvspec as a test subject: `kvspec verify --cache models_integration.session.eviction:after_eviction`."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from models_integration.cache.continuation import Decision
from models_integration.session.verbs import compact, observe, read
from spec.retention import Granularity, Retention

__all__ = ["after_eviction"]


def after_eviction(
    prompt_ids: list[int], kept: Mapping[int, Sequence[Sequence[int]]], next_ids: list[int], model: str,
) -> Tensor:
    """Return the logits of tokens that a model processes after the eviction of prompt tokens.

    Args:
        prompt_ids: n token ids of the prompt.
        kept: kept positions, ascending, for each full-attention layer and KV head.
        next_ids: ids of the tokens after the prompt. The first of these tokens has the position n.
        model: folder or name of a transformers model. The model is loaded in float32.

    Returns:
        Logits (next tokens, vocabulary).

    Raises:
        SpecError: if kvspec does not support the model.
    """
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    sets = [own for layer in sorted(kept) for own in kept[layer]]
    offsets = np.cumsum([0, *map(len, sets)])
    retention = Retention(np.concatenate(sets), offsets, len(prompt_ids), Granularity.HEAD)
    cache = compact(observe(loaded, torch.tensor([prompt_ids], device="cpu")).cache, Decision((retention,)))
    logits = read(loaded, cache, torch.tensor([next_ids], device="cpu"), last=len(next_ids)).logits
    assert logits is not None
    return logits[0]
