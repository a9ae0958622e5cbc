"""One sample under one policy: compact, ask, answer greedily, and count what the cache stored meanwhile."""

from dataclasses import dataclass, replace
from math import ceil

import torch
from torch import Tensor
from transformers import PreTrainedModel

from models_integration.cache.retained_cache import RetainedCache
from models_integration.policies.methods import RetentionPolicy
from models_integration.policies.prefill import prefill
from models_integration.policies.published import Published
from models_integration.session.session import Session
from models_integration.tasks import Placement

__all__ = ["Answer", "answer"]


@dataclass(frozen=True)
class Answer:
    """What a policy let the model say."""

    token_ids: list[int]
    kept: int
    """Slots that the policy kept, per layer and head."""
    mean_cache: float
    """Slots stored per layer and head, mean over the answer's forwards."""
    peak_cache: int
    """The most slots stored per layer and head at any time, the prompt's own forward included."""


@torch.no_grad()
def answer(
    model: PreTrainedModel, method: RetentionPolicy, placement: Placement, max_new_tokens: int,
    stop_ids: frozenset[int],
) -> Answer:
    """Present one sample in its placement and decode greedily until a stop id or `max_new_tokens`.

    A published policy reads token by token inside its context, so that one that decides in its steps does. What is
    dropped and read again leaves no records behind, so such a policy's prompt ends before it.
    """
    prompt = torch.tensor([placement.prompt_ids], device=model.device)
    if not isinstance(method, Published):
        logits, cache, _ = prefill(model, method, prompt)
        return _answered(model, logits, cache, placement, max_new_tokens, stop_ids, len(placement.fed_ids))
    found = method.on(model)
    if found.policy.cadence.every is not None and placement.dropped_slots:
        prompt = prompt[:, : -placement.dropped_slots]
        placement = replace(placement, prompt_ids=placement.prompt_ids[: -placement.dropped_slots], dropped_slots=0)
    with Session(found, model) as run:
        logits = model(input_ids=prompt).logits[:, -1:]
        assert run.cache is not None
        return _answered(model, logits, run.cache, placement, max_new_tokens, stop_ids, 1)


def _answered(
    model: PreTrainedModel, logits: Tensor, cache: RetainedCache, placement: Placement, max_new_tokens: int,
    stop_ids: frozenset[int], at_once: int,
) -> Answer:
    kept, stored = ceil(cache.mean_length), []
    if placement.dropped_slots:
        cache.crop(-placement.dropped_slots)
    for first in range(0, len(placement.fed_ids), at_once or 1):
        fed = torch.tensor([placement.fed_ids[first : first + at_once]], device=model.device)
        logits = model(input_ids=fed, past_key_values=cache).logits
        stored.append(cache.mean_length)
    ids: list[int] = []
    while len(ids) < max_new_tokens:
        token = int(logits[0, -1].argmax())
        ids.append(token)
        if token in stop_ids:
            break
        logits = model(input_ids=torch.tensor([[token]], device=model.device), past_key_values=cache).logits
        stored.append(cache.mean_length)
    return Answer(ids, kept, sum(stored) / len(stored), max(len(placement.prompt_ids), *map(ceil, stored)))
