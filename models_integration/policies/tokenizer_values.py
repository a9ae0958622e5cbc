"""Functions that get policy arguments from a tokenizer: `sentence_ends` and `repeat_template`."""

from typing import Any

from transformers import PreTrainedTokenizerBase

from models_integration.tasks.assembly import chat, encode
from spec.errors import SpecError

__all__ = ["repeat_template", "sentence_ends"]

_MARKS = (".", "!", "?")
FIRST = "\n\nRepeat the previous context exactly."
LATER = "\n\nRepeat the part of the previous context exactly, starting with "
"""Requests to repeat the prompt, in the wording of KVzip's code."""


def repeat_template(tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    """Make the `template` of KVzip: token ids of two requests to repeat the prompt, and of the start of an answer.

        kvspec.policy_from_name("kvzip", 0.3, template=kvspec.repeat_template(tokenizer))

    If the tokenizer has no chat template, the start of an answer is a newline.

    Args:
        tokenizer: a tokenizer of transformers.

    Raises:
        SpecError: if the chat template of the tokenizer changes the text of a message.
    """
    answer = "\n" if getattr(tokenizer, "chat_template", None) is None else chat(tokenizer).closing
    return tuple(tuple(encode(tokenizer, text)) for text in (FIRST, LATER, answer))


def sentence_ends(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids of all tokens that end a sentence, for CrystalCache.

        policy = kvspec.CrystalCache(0.4, kvspec.sentence_ends(tokenizer))

    A token ends a sentence if the text of the token contains a newline, or ends in `.`, `!` or `?`. Spaces at the end
    of the text are ignored. Special tokens never end a sentence.

    Args:
        tokenizer: a tokenizer of transformers.

    Raises:
        SpecError: if `tokenizer` is not a tokenizer of transformers, or if no token ends a sentence.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise SpecError("tokenizer", type(tokenizer).__name__, "must be a tokenizer of transformers")
    special = set(tokenizer.all_special_ids)
    special.update(added for added, token in tokenizer.added_tokens_decoder.items() if token.special)
    ids = sorted(set(tokenizer.get_vocab().values()) - special)
    ends = frozenset(token_id for token_id in ids if _ends_a_sentence(_text(tokenizer, token_id)))
    if not ends:
        reason = f"must have a token that ends a sentence; none of the {len(ids)} text tokens does"
        raise SpecError("tokenizer", type(tokenizer).__name__, reason)
    return ends


def _text(tokenizer: PreTrainedTokenizerBase, token_id: int) -> str:
    # Clean-up would remove spaces before punctuation marks.
    text = tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
    return text if isinstance(text, str) else "".join(text)


def _ends_a_sentence(text: str) -> bool:
    return "\n" in text or text.strip(" ").endswith(_MARKS)
