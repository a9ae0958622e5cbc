"""What a chat template puts around a context and its question, as tokens."""

import hashlib
from dataclasses import dataclass
from typing import Any

from models_integration.tasks.assembly import TaskTokenizer, encode, opening_ids
from models_integration.tasks.samples import NO_TEMPLATE
from spec.errors import SpecError

__all__ = ["Frame", "bare", "chat"]

_PLACE = "kvspec-context"


@dataclass(frozen=True)
class Frame:
    """What stands before the context and behind the question.

    Attributes:
        name: `none`, or the digest of the template.
        opening: tokens before the context, counted as its own.
        closing: text behind the question, before the answer starts.
    """

    name: str
    opening: tuple[int, ...]
    closing: str


def bare(tokenizer: TaskTokenizer) -> Frame:
    """No template: what the tokenizer itself puts before a text, and nothing behind it."""
    return Frame(NO_TEMPLATE, opening_ids(tokenizer), "")


def chat(tokenizer: Any) -> Frame:
    """The tokenizer's own template: context and question are one message of the user, the answer is the assistant's.

    Raises:
        SpecError: for a tokenizer without a template, or one that does not print a message as it is.
    """
    template = getattr(tokenizer, "chat_template", None)
    if not isinstance(template, str):
        raise SpecError("tokenizer", type(tokenizer).__name__, "has no chat template")
    message = [{"role": "user", "content": _PLACE}]
    text = str(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))
    before, found, behind = text.partition(_PLACE)
    if not found:
        raise SpecError("tokenizer", type(tokenizer).__name__, "its chat template does not print the user's message")
    name = hashlib.sha256(template.encode()).hexdigest()[:16]
    return Frame(name, encode(tokenizer, before), behind)
