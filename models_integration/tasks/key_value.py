"""Pairs of one JSON object, of which several are asked for one by one: the shape of SCBench's `kv`.

Each question is a sample of its own over the same context (SCBench's mode `scdq`: the context is read and compacted
once, each question is answered from there). Instruction and question are SCBench's, which has them of InfiniteBench;
ours are the object's line breaks and that no space ends the question, whose second line opens the answer.
"""

from uuid import UUID

import numpy as np

from models_integration.tasks.context import Ground, as_many, asked, different, joined, letters
from models_integration.tasks.metrics import CONTAINS
from models_integration.tasks.samples import Sample
from spec.validate import check_choices

__all__ = ["FORMS", "key_value_samples", "uuid"]

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
