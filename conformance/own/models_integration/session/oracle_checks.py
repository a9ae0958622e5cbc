"""What "eviction equals masking" says of one model and one method, as assertions; mutants must fail them."""

import copy

import torch
from transformers import PreTrainedModel

from conformance.own.models_integration.session.families import Masked, at_once, prompt, relative, step_by_step
from models_integration import FullCache, RetentionPolicy, prefill

__all__ = ["PROMPT", "check_decoding", "check_hidden_token"]

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
