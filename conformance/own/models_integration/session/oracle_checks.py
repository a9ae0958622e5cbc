"""What "eviction equals masking" says of one model and one method, as assertions; saboteurs must fail them."""

import copy

import torch
from torch import Tensor
from transformers import PreTrainedModel

from conformance.own.models_integration.session.families import Masked, at_once, greedy, prompt, relative, step_by_step
from models_integration import FullCache, RetentionPolicy, prefill

__all__ = ["PROMPT", "check_decoding", "check_generation", "check_hidden_token", "check_stored_tensors"]

PROMPT = 64
NEW = 8
TOLERANCE = 1e-5
VISIBLE_EFFECT = 1e-2


def check_decoding(model: PreTrainedModel, method: RetentionPolicy) -> None:
    """Logits of the next 8 tokens, in single steps and in one forward, by default positions and masks."""
    ids, following = prompt(PROMPT), prompt(NEW, seed=9)
    prefilled = prefill(model, method, ids)
    kept = prefilled.cache.stored_positions().tolist()
    expected = Masked(model, ids, kept).read(following)
    assert relative(at_once(model, following, copy.deepcopy(prefilled.cache)), expected) < TOLERANCE
    assert relative(step_by_step(model, following, prefilled.cache), expected) < TOLERANCE
    assert prefilled.cache.get_seq_length() == PROMPT + NEW
    assert prefilled.cache.stored_length == len(kept) + NEW
    full = Masked(model, ids, range(PROMPT)).read(following)
    if isinstance(method, FullCache):
        assert kept == list(range(PROMPT))
    else:
        assert len(kept) < PROMPT
        assert relative(full, expected) > VISIBLE_EFFECT


def check_hidden_token(model: PreTrainedModel, method: RetentionPolicy) -> None:
    """A 2D attention mask counts tokens seen: hiding a token hides that token, wherever its slot is."""
    ids, following = prompt(PROMPT), prompt(NEW, seed=9)
    prefilled = prefill(model, method, ids)
    kept = prefilled.cache.stored_positions().tolist()
    hidden = kept[4]
    # Where slot and position differ by another amount than at the end, or reading the mask by slot would do as well.
    assert hidden - 4 < PROMPT - len(kept)
    mask = torch.ones(1, PROMPT + NEW, dtype=torch.int64)
    mask[0, hidden] = 0
    expected = Masked(model, ids, [position for position in kept if position != hidden]).read(following)
    # The token stays visible to the sliding layers of the oracle, so this is for models without any.
    assert relative(at_once(model, following, prefilled.cache, attention_mask=mask), expected) < TOLERANCE


def check_generation(model: PreTrainedModel, method: RetentionPolicy) -> None:
    """Greedy tokens of generate inside the context."""
    ids = prompt(PROMPT)
    with method(model) as run:
        chosen = greedy(model, ids, NEW)[0].tolist()
    assert run.kept is not None
    assert chosen == Masked(model, ids, run.kept.tolist()).greedy(NEW)


def check_stored_tensors(model: PreTrainedModel, method: RetentionPolicy) -> None:
    """Slot j of a full-attention layer holds the key and value of the j-th stored position; others hold all."""
    ids = prompt(PROMPT)
    cache = prefill(model, method, ids).cache
    oracle = Masked(model, ids, range(PROMPT)).cache
    stored = cache.stored_positions()
    assert bool((stored.diff() > 0).all())
    for compacted, full in zip(cache.full_layers, _full_layers(cache, oracle), strict=True):
        for found, expected in ((compacted.keys, full[0]), (compacted.values, full[1])):
            assert isinstance(found, Tensor)
            assert relative(found, expected[:, :, stored]) < TOLERANCE


def _full_layers(cache: object, oracle: object) -> list[tuple[Tensor, Tensor]]:
    from models_integration.cache.dense_layer import RetainedLayer
    from models_integration.cache.retained_cache import RetainedCache

    assert isinstance(cache, RetainedCache)
    return [
        (keys, values)
        for layer, (keys, values, _) in zip(cache.layers, oracle, strict=True)  # type: ignore[call-overload]
        if isinstance(layer, RetainedLayer)
    ]
