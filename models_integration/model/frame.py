"""Tokens and text around a prompt: the special tokens of a tokenizer, and the frame of a chat template."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from spec.errors import SpecError

__all__ = [
    "NO_TEMPLATE", "PROBE", "Frame", "TaskTokenizer", "bare", "chat", "decode", "encode", "frame_of", "opening_ids",
]

PROBE = "The end."
"""Text that shows which tokens a tokenizer puts before and between texts."""


class TaskTokenizer(Protocol):
    """The two methods of a tokenizer that the tasks use. Every tokenizer of transformers has these methods."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str | list[str]: ...


def encode(tokenizer: TaskTokenizer, text: str) -> tuple[int, ...]:
    """Return the token ids of `text` alone, without special tokens."""
    return tuple(int(token) for token in tokenizer.encode(text, add_special_tokens=False))


def decode(tokenizer: TaskTokenizer, ids: Sequence[int]) -> str:
    """Return the text of `ids` without special tokens."""
    return str(tokenizer.decode([int(token) for token in ids], skip_special_tokens=True))


def opening_ids(tokenizer: TaskTokenizer) -> tuple[int, ...]:
    """Return the special tokens that the tokenizer adds before a text (often one, often none)."""
    plain = encode(tokenizer, PROBE)
    full = tuple(int(token) for token in tokenizer.encode(PROBE, add_special_tokens=True))
    starts = (start for start in range(len(full)) if full[start : start + len(plain)] == plain)
    return full[: next(starts, 0)]


NO_TEMPLATE = "none"

_PLACE, _ANSWER, _NEXT = "kvspec-context", "kvspec-answer", "kvspec-next"


@dataclass(frozen=True)
class Frame:
    """Tokens before the context, and text after the question.

    Attributes:
        name: `none`, or the hash of the chat template.
        opening: tokens before the context. They count as tokens of the context.
        closing: text after the question, before the answer.
        between: text after an answer, before the next question.
    """

    name: str
    opening: tuple[int, ...]
    closing: str
    between: str = "\n\n"


def bare(tokenizer: TaskTokenizer) -> Frame:
    """Return a frame without a chat template: only the tokens that the tokenizer puts before a text."""
    return Frame(NO_TEMPLATE, opening_ids(tokenizer), "")


def chat(tokenizer: Any) -> Frame:
    """Return the frame of the tokenizer's chat template. Context and question are one message of the user.

    Raises:
        SpecError: if the tokenizer has no chat template, or if the template changes the text of messages.
    """
    template = getattr(tokenizer, "chat_template", None)
    if not isinstance(template, str):
        raise SpecError("tokenizer", type(tokenizer).__name__, "has no chat template")
    turns = [("user", _PLACE), ("assistant", _ANSWER), ("user", _NEXT)]
    first, all_turns = (_printed(tokenizer, turns[:count]) for count in (1, 3))
    before, prompt_mark, behind = first.partition(_PLACE)
    between, next_mark, _ = all_turns.partition(_ANSWER)[2].partition(_NEXT)
    if not prompt_mark or not next_mark:
        raise SpecError(
            "tokenizer", type(tokenizer).__name__, "must have a chat template that prints messages unchanged"
        )
    name = hashlib.sha256(template.encode()).hexdigest()[:16]
    return Frame(name, encode(tokenizer, before), behind, between)


def frame_of(tokenizer: Any, bare_text: bool = False) -> Frame:
    """Return the frame of the chat template, or a bare frame if there is no template or `bare_text` is True."""
    return bare(tokenizer) if bare_text or not getattr(tokenizer, "chat_template", None) else chat(tokenizer)


def _printed(tokenizer: Any, turns: list[tuple[str, str]]) -> str:
    messages = [{"role": role, "content": content} for role, content in turns]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
