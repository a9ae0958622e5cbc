"""SCBench's shapes: pairs and strings that are asked for one by one, and several questions on one context."""

from collections.abc import Sequence
from dataclasses import replace
from math import isqrt
from uuid import UUID

import numpy as np

from models_integration.tasks.context import Ground, as_many, asked, different, joined, letters
from models_integration.tasks.metrics import CONTAINS
from models_integration.tasks.samples import Sample
from spec.validate import check_choices

__all__ = ["FORMS", "in_turns", "key_value_samples", "prefix_suffix_samples", "uuid"]


FORMS = ("uuid", "short")
"""SCBench's own pairs; or six letters with four digits, which small models can answer."""
_INSTRUCTION = "Extract the value corresponding to the specified key in the JSON object below."
_OPENING = "The value associated with the specified key is:"


def key_value_samples(
    ground: Ground, length: int, index: int, seed: int, *, questions: int = 1, form: str = "short"
) -> tuple[Sample, ...]:
    """The questions of context number `index`, in the order in which they are asked.

    The pairs that are asked for come from equal parts of the object, one from each, outside sinks and recent window.

    Args:
        ground: tokenizer, running text and frame; a few tokens of the text before all else make the length exact.
        length: context tokens, the frame's opening included.
        index: which context.
        seed: of all contexts.
        questions: how many, at least 1.
        form: of keys and values.

    Raises:
        SpecError: for an unknown form, no question, or a length that has no pair for each question.
    """
    check_choices("form", (form,), FORMS)
    rng = ground.rng(length, index, seed, FORMS.index(form))
    head, foot, comma = (ground.encode(text) for text in (f"\n\n{_INSTRUCTION}\n\n{{", "}\n\n", ",\n"))
    drawn = dict[str, str]()

    def unit() -> tuple[int, ...]:
        (key,) = different(lambda: _drawn(rng, form, 0), 1, drawn)
        drawn[key] = _drawn(rng, form, 1)
        return (*(comma if len(drawn) > 1 else ()), *ground.encode(f'"{key}": "{drawn[key]}"'))

    units = as_many(unit, ground.room(length, head, foot))
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
    """A key, or a value."""
    if form == "uuid":
        return uuid(rng)
    return str(int(rng.integers(1000, 10_000))) if value else letters(rng, 6)


def uuid(rng: np.random.Generator) -> str:
    """A random identifier of version 4."""
    return str(UUID(bytes=rng.bytes(16), version=4))


AFFIX, MIDDLE = 3, 6
"""Letters of a prefix or suffix, and between them."""
_AFFIXES = "Below is a list of strings. Find the string that has both the given prefix and the given suffix."
_AFFIX_OPENING = "The string with this prefix and suffix is:"


def prefix_suffix_samples(
    ground: Ground, length: int, index: int, seed: int, *, questions: int = 1
) -> tuple[Sample, ...]:
    """The questions of context number `index`, in the order in which they are asked.

    The strings that are asked for come from equal parts of the list, one from each, outside sinks and recent window.

    Args:
        ground, length, index, seed, questions: as `key_value_samples`'.

    Raises:
        SpecError: for no question, or a length that has no string for each question.
    """
    rng = ground.rng(length, index, seed)
    head, foot = ground.encode(f"\n\n{_AFFIXES}\n"), ground.encode("\n\n")
    room = ground.room(length, head, foot)
    # More pairs of affixes than there are tokens, so that there is always another one; few enough to be shared.
    before, after = (different(lambda: letters(rng, AFFIX), isqrt(max(0, room)) + 2) for _ in range(2))
    drawn = dict[str, str]()

    def unit() -> tuple[int, ...]:
        (pair,) = different(lambda: f"{rng.choice(before)} {rng.choice(after)}", 1, drawn)
        drawn[pair] = pair.replace(" ", letters(rng, MIDDLE))
        return ground.encode(f"\n{drawn[pair]}")

    units = as_many(unit, room)
    text = joined(ground, length, index, seed, [head, *units, foot])
    spans, pairs = text.spans[1:-1], list(drawn.items())
    return tuple(
        ground.sample(
            text.ids, 'Prefix: "{}"\nSuffix: "{}"'.format(*pairs[at][0].split()), _AFFIX_OPENING, pairs[at][1],
            [spans[at]], gap="\n", task="prefix_suffix", metadata={"depth": at / len(units)}, metric=CONTAINS,
        )
        for at in asked(rng, spans, questions, length)
    )


def in_turns(ground: Ground, samples: Sequence[Sample]) -> tuple[Sample, ...]:
    """The samples of one context as turns: before each question stand the earlier ones with their gold answers.

    As in SCBench, the model's own answers are not read again. `history` says how many tokens are earlier turns.
    """
    found, between = list[Sample](), ground.encode(ground.frame.between)
    history: tuple[int, ...] = ()
    for turn, sample in enumerate(samples):
        found.append(replace(
            sample, task=f"{sample.task}_turns", question_ids=(*history, *sample.question_ids), history=len(history),
            metadata={**sample.metadata, "turn": turn},
        ))
        history = (*history, *sample.question_ids, *sample.answer_ids, *between)
    return tuple(found)
