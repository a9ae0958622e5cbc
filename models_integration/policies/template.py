"""What a model is asked when its prompt is rehearsed, in its tokenizer's ids."""

from typing import Any

from models_integration.tasks.assembly import encode
from models_integration.tasks.chat import chat

__all__ = ["repeat_template"]

FIRST = "\n\nRepeat the previous context exactly."
LATER = "\n\nRepeat the part of the previous context exactly, starting with "
"""The wording of KVzip's code."""


def repeat_template(tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    """Return the `template` of KVzip: token ids of two requests to repeat the prompt, and of the start of an answer.

        kvspec.policy_from_name("kvzip", 0.3, template=kvspec.repeat_template(tokenizer))

    If the tokenizer has no chat template, the start of an answer is a newline.

    Args:
        tokenizer: a tokenizer of transformers.

    Raises:
        SpecError: if the chat template changes the text of messages.
    """
    answer = "\n" if getattr(tokenizer, "chat_template", None) is None else chat(tokenizer).closing
    return tuple(tuple(encode(tokenizer, text)) for text in (FIRST, LATER, answer))
