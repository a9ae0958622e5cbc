"""Task of retrieving key-value pairs, and several questions on one context as turns."""

from collections.abc import Sequence
from dataclasses import replace
from uuid import UUID

import numpy as np

from experiments.tasks.context import Ground, as_many, asked, different, joined, letters
from experiments.tasks.metrics import CONTAINS
from experiments.tasks.needle import Sample
from spec.validate import check_choices

__all__ = ["FORMS", "in_turns", "key_value_samples", "uuid"]


FORMS = ("uuid", "short")
"""Forms of pairs: UUIDs as in SCBench, or keys of six letters with four digits, which small models can retrieve."""
_INSTRUCTION = "Extract the value corresponding to the specified key in the JSON object below."
_OPENING = "The value associated with the specified key is:"


def key_value_samples(
    ground: Ground, length: int, index: int, seed: int, *, questions: int = 1, form: str = "short"
) -> tuple[Sample, ...]:
    """Return the questions on context number `index`, in order.

    Each pair in question is from a different one of equal parts of the object, outside sinks and recent window.

    Args:
        ground: tokenizer, running text and frame. A few tokens of the text at the start make the length exact.
        length: number of context tokens, including the frame's opening.
        index: index of the context.
        seed: seed of all contexts.
        questions: number of questions, at least 1.
        form: form of keys and values.

    Raises:
        SpecError: if the form is unknown, if there is no question, or if the length is too short for the questions.
    """
    check_choices("form", (form,), FORMS)
    rng = ground.rng(length, index, seed, FORMS.index(form))
    head, foot, comma = (ground.encode(text) for text in (f"\n\n{_INSTRUCTION}\n\n{{", "}\n\n", ",\n"))
    drawn = dict[str, str]()

    def unit() -> tuple[int, ...]:
        (key,) = different(lambda: _drawn(rng, form, 0), 1, drawn)
        drawn[key] = _drawn(rng, form, 1)
        return (*(comma if len(drawn) > 1 else ()), *ground.encode(f'"{key}": "{drawn[key]}"'))

    units = as_many(unit, ground.tokens_left(length, head, foot))
    text = joined(ground, length, index, seed, [head, *units, foot])
    spans = [(start + len(comma) * (at > 0), stop) for at, (start, stop) in enumerate(text.spans[1:-1])]
    pairs = list(drawn.items())
    return tuple(
        ground.sample(
            text.ids, f'Key: "{pairs[at][0]}"', _OPENING, pairs[at][1], [spans[at]], gap="\n", task=f"key_value_{form}",
            metadata={"key": pairs[at][0], "depth": at / len(units)}, metric=CONTAINS,
        )
        for at in asked(rng, spans, questions, length)
    )


def _drawn(rng: np.random.Generator, form: str, value: int) -> str:
    """Return a random key or value."""
    if form == "uuid":
        return uuid(rng)
    return str(int(rng.integers(1000, 10_000))) if value else letters(rng, 6)


def uuid(rng: np.random.Generator) -> str:
    """Return a random UUID of version 4."""
    return str(UUID(bytes=rng.bytes(16), version=4))


def in_turns(ground: Ground, samples: Sequence[Sample]) -> tuple[Sample, ...]:
    """Return the samples of one context as turns: earlier questions with gold answers precede each question.

    As in SCBench, the model's own answers are not used. `history` is the number of tokens of earlier turns.
    """
    result, between = list[Sample](), ground.encode(ground.frame.between)
    history: tuple[int, ...] = ()
    for turn, sample in enumerate(samples):
        result.append(replace(
            sample, task=f"{sample.task}_turns", question_ids=(*history, *sample.question_ids), history=len(history),
            metadata={**sample.metadata, "turn": turn},
        ))
        history = (*history, *sample.question_ids, *sample.answer_ids, *between)
    return tuple(result)
