"""What a chat template puts around a context and its question, as tokens."""

import hashlib
from dataclasses import dataclass
from typing import Any

from models_integration.tasks.assembly import TaskTokenizer, encode, opening_ids
from spec.errors import SpecError

__all__ = ["NO_TEMPLATE", "Frame", "bare", "chat", "frame_of"]

NO_TEMPLATE = "none"

_PLACE, _ANSWER, _NEXT = "kvspec-context", "kvspec-answer", "kvspec-next"


@dataclass(frozen=True)
class Frame:
    """What stands before the context and behind the question.

    Attributes:
        name: `none`, or the digest of the template.
        opening: tokens before the context, counted as its own.
        closing: text behind the question, before the answer starts.
        between: text behind an answer, before the next question.
    """

    name: str
    opening: tuple[int, ...]
    closing: str
    between: str = "\n\n"


def bare(tokenizer: TaskTokenizer) -> Frame:
    """No template: what the tokenizer itself puts before a text, and nothing behind it."""
    return Frame(NO_TEMPLATE, opening_ids(tokenizer), "")


def chat(tokenizer: Any) -> Frame:
    """The tokenizer's own template: context and question are one message of the user, the answer is the assistant's.

    Raises:
        SpecError: for a tokenizer without a template, or one that does not print messages as they are.
    """
    template = getattr(tokenizer, "chat_template", None)
    if not isinstance(template, str):
        raise SpecError("tokenizer", type(tokenizer).__name__, "has no chat template")
    turns = [("user", _PLACE), ("assistant", _ANSWER), ("user", _NEXT)]
    first, all_turns = (_printed(tokenizer, turns[:count]) for count in (1, 3))
    before, found, behind = first.partition(_PLACE)
    between, next_found, _ = all_turns.partition(_ANSWER)[2].partition(_NEXT)
    if not found or not next_found:
        raise SpecError("tokenizer", type(tokenizer).__name__, "its chat template does not print messages as they are")
    name = hashlib.sha256(template.encode()).hexdigest()[:16]
    return Frame(name, encode(tokenizer, before), behind, between)


def frame_of(tokenizer: Any, bare_text: bool = False) -> Frame:
    """The tokenizer's chat template where it has one, unless bare text is asked for."""
    return bare(tokenizer) if bare_text or not getattr(tokenizer, "chat_template", None) else chat(tokenizer)


def _printed(tokenizer: Any, turns: list[tuple[str, str]]) -> str:
    messages = [{"role": role, "content": content} for role, content in turns]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
