"""What a model is asked when its prompt is rehearsed, in its tokenizer's ids."""

from typing import Any

from models_integration.tasks.assembly import encode
from models_integration.tasks.chat import chat

__all__ = ["repeat_template"]

FIRST = "\n\nRepeat the previous context exactly."
LATER = "\n\nRepeat the part of the previous context exactly, starting with "
"""The wording of KVzip's code."""


def repeat_template(tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    """The `template` of the policies that rehearse: two requests, and the chat template's way into an answer.

    Without a chat template an answer begins on a new line.

    Raises:
        SpecError: for a chat template that does not print messages as they are.
    """
    answer = "\n" if getattr(tokenizer, "chat_template", None) is None else chat(tokenizer).closing
    return tuple(tuple(encode(tokenizer, text)) for text in (FIRST, LATER, answer))
