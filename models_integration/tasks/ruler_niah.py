"""RULER v1's eight needle tasks: facts in noise, in running text, or among facts of the same form."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from models_integration.tasks.context import Ground, as_many, check_unprotected, different, listed, places
from models_integration.tasks.key_value import uuid
from models_integration.tasks.ruler import as_ruler, order, words
from models_integration.tasks.samples import Sample
from models_integration.tasks.variable_tracking import NOISE

__all__ = ["NIAH", "NiahForm", "niah_samples"]


@dataclass(frozen=True)
class NiahForm:
    """One needle task.

    Attributes:
        haystack: `noise`, `prose` or `needles`.
        keys: facts' subjects.
        values: facts of each subject.
        queries: subjects that are asked for, all at once.
        key: `words` or `uuids`.
        value: `numbers` or `uuids`.
    """

    haystack: str
    keys: int = 1
    values: int = 1
    queries: int = 1
    key: str = "words"
    value: str = "numbers"


NIAH: Mapping[str, NiahForm] = {
    "niah_single_1": NiahForm("noise"),
    "niah_single_2": NiahForm("prose"),
    "niah_single_3": NiahForm("prose", value="uuids"),
    "niah_multikey_1": NiahForm("prose", keys=4),
    "niah_multikey_2": NiahForm("needles"),
    "niah_multikey_3": NiahForm("needles", key="uuids", value="uuids"),
    "niah_multivalue": NiahForm("prose", values=4),
    "niah_multiquery": NiahForm("prose", keys=4, queries=4),
}
MAX_NEW_TOKENS = 128
_FACT = "One of the special magic {kind} for {key} is: {value}."
_INSTRUCTION = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. I will quiz you about"
    " the {kind} afterwards."
)
_QUESTION = "\nWhat are all the special magic {kind} for {query} mentioned in the provided text?"
_OPENING = " The special magic {kind} for {query} mentioned in the provided text are"
_ONE = (("Some", "A"), ("are all", "is"), ("are", "is"))
"""What v1 replaces, in this order, where there is one answer."""


def niah_samples(name: str, dialect: str, ground: Ground, length: int, index: int, seed: int) -> tuple[Sample, ...]:
    """One sample of a needle task; its evidence are the facts that are asked for.

    Raises:
        SpecError: for a negative index or seed, and a length that holds no such context.
    """
    form, rng = NIAH[name], ground.rng(length, index, seed, list(NIAH).index(name))
    keys = different(lambda: _DRAWN[form.key](rng), form.keys)
    asked = [keys[int(at)] for at in rng.permutation(form.keys)[: form.queries]]
    values = different(lambda: _DRAWN[form.value](rng), form.keys * form.values)
    drawn = [(keys[at // form.values], value) for at, value in enumerate(values)]
    facts = [drawn[at] for at in order(rng, dialect, len(drawn))]
    instruction, question, opening = _prompt(form, asked)
    head = ground.encode(f"\n\n{instruction}" + "\n" * (form.haystack == "prose"))
    lines = [_line(ground, form, *fact) for fact in facts]
    first = length * ground.prose.window(length, index, seed)
    units = _haystack(ground, form, rng, ground.room(length, head, *lines), first, keys)
    where = places(rng, units, len(lines), index, length)
    text = listed(ground, length, index, seed, head, units, dict(zip(where, lines, strict=True)))
    stands = dict(zip(facts, text.spans, strict=True))
    gold = [fact for key in asked for fact in drawn if fact[0] == key]
    sample = ground.sample(
        text.ids, question, opening, ", ".join(value for _, value in gold), [stands[fact] for fact in gold], gap="",
        task=name, distractors=tuple(span for fact, span in stands.items() if fact not in gold),
        metadata={"keys": ", ".join(asked)}, references=tuple(value for _, value in gold),
    )
    return (as_ruler(check_unprotected(sample), name, dialect, MAX_NEW_TOKENS),)


def _prompt(form: NiahForm, asked: Sequence[str]) -> tuple[str, str, str]:
    """Instruction, question and the answer's opening; in the singular for one answer."""
    one = form.queries * form.values == 1
    query = ", ".join(asked[:-1]) + ", and " + asked[-1] if len(asked) > 1 else asked[0]
    kind = form.value.removesuffix("s") if one else form.value
    texts = list[str]()
    for text in (_INSTRUCTION, _QUESTION, _OPENING):
        for old, new in _ONE if one else ():
            text = text.replace(old, new)
        texts.append(text.format(kind=kind, query=query))
    return texts[0], texts[1], texts[2]


def _two_words(rng: np.random.Generator) -> str:
    return "-".join(words()[int(at)] for at in rng.integers(len(words()), size=2))


_DRAWN: Mapping[str, Callable[[np.random.Generator], str]] = {
    "words": _two_words,
    "numbers": lambda rng: str(int(rng.integers(10**6, 10**7))),
    "uuids": uuid,
}


def _line(ground: Ground, form: NiahForm, key: str, value: str) -> tuple[int, ...]:
    text = _FACT.format(kind=form.value, key=key, value=value)
    return ground.follow(text) if form.haystack == "prose" else ground.encode(f"\n{text}")


def _haystack(
    ground: Ground, form: NiahForm, rng: np.random.Generator, room: int, first: int, taken: Sequence[str]
) -> list[Sequence[int]]:
    """Lines of at most `room` tokens; those of the running text, from token `first` on, fill it."""
    if form.haystack == "prose":
        ends = [first, *(stop for stop in ground.prose.stops if first < stop < first + room), first + max(0, room)]
        return [ground.prose.tokens[start:stop] for start, stop in pairwise(ends)]
    noise = ground.encode(f"\n{NOISE}")

    def needle() -> tuple[int, ...]:
        (key,) = different(lambda: _DRAWN[form.key](rng), 1, taken)
        return _line(ground, form, key, _DRAWN[form.value](rng))

    return as_many(needle if form.haystack == "needles" else lambda: noise, room)
