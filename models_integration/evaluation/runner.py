"""One sample under one policy: compact, ask, answer greedily, and count what the cache stored meanwhile."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from models_integration.methods import Method
from models_integration.session import prefill
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
    model: PreTrainedModel, method: Method, placement: Placement, max_new_tokens: int, stop_ids: frozenset[int],
) -> Answer:
    """Present one sample in its placement and decode greedily until a stop id or `max_new_tokens`."""
    prompt = torch.tensor([placement.prompt_ids], device=model.device)
    logits, cache, _ = prefill(model, method, prompt)
    kept, stored = cache.stored_length, []
    if placement.dropped_slots:
        cache.crop(-placement.dropped_slots)
    if placement.fed_ids:
        fed = torch.tensor([placement.fed_ids], device=model.device)
        logits = model(input_ids=fed, past_key_values=cache).logits
        stored.append(cache.stored_length)
    ids: list[int] = []
    while len(ids) < max_new_tokens:
        token = int(logits[0, -1].argmax())
        ids.append(token)
        if token in stop_ids:
            break
        logits = model(input_ids=torch.tensor([[token]], device=model.device), past_key_values=cache).logits
        stored.append(cache.stored_length)
    return Answer(ids, kept, sum(stored) / len(stored), max(len(placement.prompt_ids), *stored))
