"""The tasks of a study by name, and its samples: the questions of one context after the other."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

from models_integration.tasks import Sample, TaskTokenizer
from models_integration.tasks.assembly import decode, opening_ids
from models_integration.tasks.key_value import key_value_samples
from models_integration.tasks.keys_in_prose import keys_in_prose_sample
from models_integration.tasks.prose import Prose

__all__ = ["TASKS", "Task"]

Task: TypeAlias = Callable[[TaskTokenizer, Prose, int, int, int], Sequence[Sample]]
"""Tokenizer, running text, context tokens, which context, seed: the questions on that context."""
_QUESTIONS = 5
_READ, _FOLLOWS = 16, 128
"""Tokens of a text that are read behind its context, and those that then follow as gold answer."""


def _keys(keys: int, tokenizer: TaskTokenizer, prose: Prose, length: int, index: int, seed: int) -> tuple[Sample]:
    return (keys_in_prose_sample(tokenizer, prose, length, keys, index, seed),)


def _pairs(tokenizer: TaskTokenizer, prose: Prose, length: int, index: int, seed: int) -> tuple[Sample, ...]:
    return key_value_samples(tokenizer, prose, length, _QUESTIONS, index, seed)


def _continuation(tokenizer: TaskTokenizer, prose: Prose, length: int, index: int, seed: int) -> tuple[Sample]:
    """How the text goes on: nothing in particular of the context is its evidence."""
    whole, opening = length + _READ + _FOLLOWS, opening_ids(tokenizer)
    first = whole * prose.window(whole, index, seed)
    read = first + length - len(opening)
    answer = prose.tokens[read + _READ : read + _READ + _FOLLOWS]
    return (Sample(
        task="prose_continuation", context_ids=(*opening, *prose.tokens[first:read]),
        question_ids=prose.tokens[read : read + _READ], expected=decode(tokenizer, answer).strip(), needle=(0, 0),
        answer_ids=answer,
    ),)


TASKS: Mapping[str, Task] = {
    "needle_in_prose": partial(_keys, 1), "keys_in_prose_2": partial(_keys, 2), "keys_in_prose_4": partial(_keys, 4),
    "key_value_short": _pairs, "prose_continuation": _continuation,
}
