"""Which tokens end a sentence, for any tokenizer of `transformers`."""

from transformers import PreTrainedTokenizerBase

from spec.errors import SpecError

__all__ = ["sentence_ends"]

_MARKS = (".", "!", "?")


def sentence_ends(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every id whose text, stripped of spaces, ends in `.`, `!` or `?`, or contains a newline.

    The text of an id is what the tokenizer decodes it to alone. Special tokens (padding, end of text, roles of a
    chat) are not text: they never end a sentence, however they are spelt.

    Raises:
        SpecError: when it is no tokenizer, or none of its tokens ends a sentence.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise SpecError("tokenizer", type(tokenizer).__name__, "must be a tokenizer of transformers")
    special = set(tokenizer.all_special_ids)
    special.update(added for added, token in tokenizer.added_tokens_decoder.items() if token.special)
    ids = sorted(set(tokenizer.get_vocab().values()) - special)
    ends = frozenset(token_id for token_id in ids if _ends_a_sentence(_text(tokenizer, token_id)))
    if not ends:
        raise SpecError("tokenizer", type(tokenizer).__name__, f"none of its {len(ids)} text tokens ends a sentence")
    return ends


def _text(tokenizer: PreTrainedTokenizerBase, token_id: int) -> str:
    # Cleaning up would drop the spaces and marks that this is about.
    text = tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
    return text if isinstance(text, str) else "".join(text)


def _ends_a_sentence(text: str) -> bool:
    return "\n" in text or text.strip(" ").endswith(_MARKS)
