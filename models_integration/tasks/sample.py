"""One sample of a retrieval task, and what the tasks ask of a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from spec.errors import SpecError


class TaskTokenizer(Protocol):
    """The two methods that the tasks use; every ``transformers`` tokenizer has them."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str | list[str]: ...


@dataclass(frozen=True, slots=True)
class Sample:
    """A context with one critical fact, and a question whose answer is the fact's value.

    Attributes:
        task: ``needle`` or ``delayed_association``.
        context_ids: Token ids of the context, exactly as many as were asked for, opening token included.
        question_ids: Token ids of the question with its ``Answer:`` prompt.
        expected: The value as text; an answer that contains it is right.
        needle: The fact's token span ``[start, stop)`` in the context.
        distractors: Spans of facts of the same form that carry other values.
        metadata: What describes the sample in a result: template, depth or density, seed, value.
    """

    task: str
    context_ids: tuple[int, ...]
    question_ids: tuple[int, ...]
    expected: str
    needle: tuple[int, int]
    distractors: tuple[tuple[int, int], ...] = ()
    metadata: Mapping[str, str | int | float] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Number of context tokens."""
        return len(self.context_ids)


def encode(tokenizer: TaskTokenizer, text: str) -> tuple[int, ...]:
    """Token ids of ``text`` alone, without special tokens."""
    return tuple(int(token) for token in tokenizer.encode(text, add_special_tokens=False))


def decode(tokenizer: TaskTokenizer, ids: Sequence[int]) -> str:
    """Text of ``ids`` without special tokens."""
    return str(tokenizer.decode([int(token) for token in ids], skip_special_tokens=True))


def generator(seed: int | Sequence[int]) -> np.random.Generator:
    """Return the generator of a sample; raises :class:`SpecError` for a negative seed."""
    parts = (seed,) if isinstance(seed, int) else tuple(seed)
    if any(part < 0 for part in parts):
        raise SpecError("seed", seed, "must not be negative")
    return np.random.default_rng(np.random.SeedSequence(parts))
