"""Tasks of RULER v1 in two dialects: variable tracking, and the eight needle tasks."""

import random
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np

from experiments.tasks.context import NARRATIVE, Ground, as_many, check_unprotected, different, letters, listed, places
from experiments.tasks.key_values import uuid
from experiments.tasks.metrics import STRING_MATCH_ALL
from experiments.tasks.needle import Sample
from spec.errors import SpecError
from spec.files import read_text

__all__ = [
    "DIALECTS", "HOPS", "INSTRUCTION", "NIAH", "NOISE", "PINNED", "UNPINNED", "Chain", "NiahForm", "as_ruler",
    "draw_chains", "niah_samples", "order", "variable_tracking_samples", "words",
]


PINNED, UNPINNED = "ruler-v1", "ruler-v1-unpinned"
DIALECTS = (PINNED, UNPINNED)
_RULER_SEED = 42


def order(rng: np.random.Generator, dialect: str, count: int) -> list[int]:
    """Return a random permutation: separate for each sample, or as in v1, which depends only on `count`."""
    if dialect == UNPINNED:
        return [int(at) for at in rng.permutation(count)]
    fixed = list(range(count))
    random.Random(_RULER_SEED).shuffle(fixed)
    return fixed


@lru_cache(maxsize=1)
def words(path: Path = NARRATIVE) -> tuple[str, ...]:
    """Return the words of four to nine letters that occur only in lower case in the text, in alphabetical order."""
    result = set(re.findall(r"\b[A-Za-z]{4,9}\b", read_text("path", path)))
    return tuple(sorted(word for word in result if word.islower() and word.capitalize() not in result))


def as_ruler(sample: Sample, name: str, dialect: str, max_new_tokens: int) -> Sample:
    """Return the sample with its name in a dialect and with RULER's metric."""
    return replace(
        sample, task=f"{dialect.replace('-', '_')}_{name}", dialect=dialect, metric=STRING_MATCH_ALL,
        max_new_tokens=max_new_tokens,
    )


HOPS = 4
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
INSTRUCTION = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n"


@dataclass(frozen=True)
class Chain:
    """Chain of variable names with the same value. Each name is assigned to the next name."""

    value: str
    names: tuple[str, ...]

    @property
    def lines(self) -> list[str]:
        """Return the assignments, in order."""
        given = zip(self.names[1:], self.names, strict=False)
        return [f"VAR {self.names[0]} = {self.value}", *(f"VAR {name} = VAR {other} " for name, other in given)]

    @property
    def question(self) -> str:
        """Question about the chain."""
        return f"\nQuestion: Find all variables that are assigned the value {self.value} in the text above."

    @property
    def opening(self) -> str:
        """Start of the answer, with the same spaces as in RULER."""
        return (
            " Answer: According to the chain(s) of variable assignment in the text above, "
            f"{len(self.names)} variables are assigned the value {self.value}, they are: "
        )


def draw_chains(rng: np.random.Generator, count: int, size: int) -> list[Chain]:
    """Return chains of `HOPS` hops with different values and with names of `size` capital letters."""
    values = different(lambda: str(int(rng.integers(10_000, 100_000))), count)
    names = different(lambda: letters(rng, size, string.ascii_uppercase), count * (HOPS + 1))
    return [Chain(value, tuple(names[at::count])) for at, value in enumerate(values)]


def variable_tracking_samples(
    ground: Ground, length: int, index: int, seed: int, *, questions: int = 1, example: str = ""
) -> tuple[Sample, ...]:
    """Return the questions on context number `index`, with one chain of five names for each question.

    A name has five capital letters. The assignments are the evidence. They occur in order between lines of noise, all
    outside the sinks and the recent window.

    Args:
        ground, length, index, seed, questions: as in `key_value_samples`. The index selects the depth of one
            assignment.
        example: RULER's worked example before the instruction. If the sample has an example, the start of the answer is
            not stripped.

    Raises:
        SpecError: if there is no question, or if the length is too short.
    """
    if questions < 1:
        raise SpecError("questions", questions, "must be at least 1")
    rng = ground.rng(length, index, seed, questions)
    chains = draw_chains(rng, questions, 5)
    whose = rng.permutation(np.repeat(np.arange(questions), HOPS + 1)).tolist()
    rest = [iter(chain.lines) for chain in chains]
    lines = [ground.encode(f"\n{next(rest[at])}") for at in whose]
    head, noise = ground.encode(f"\n\n{example}{INSTRUCTION}"), ground.encode(f"\n{NOISE}")
    units = as_many(lambda: noise, ground.tokens_left(length, head, *lines))
    where = places(rng, units, len(lines), index, length)
    text = listed(ground, length, index, seed, head, units, dict(zip(where, lines, strict=True)))
    return tuple(
        check_unprotected(ground.sample(
            text.ids, chain.question, chain.opening if example else chain.opening.strip(), " ".join(chain.names),
            [span for span, at in zip(text.spans, whose, strict=True) if at == number], gap="" if example else " ",
            task="variable_tracking", metadata={"value": chain.value}, metric="names found", references=chain.names,
        ))
        for number, chain in enumerate(chains)
    )


@dataclass(frozen=True)
class NiahForm:
    """Form of one needle task.

    Attributes:
        haystack: text around the facts: `noise`, `prose` or `needles`.
        keys: number of subjects of facts.
        values: number of facts of each subject.
        queries: number of subjects in the question.
        key: kind of subjects: `words` or `uuids`.
        value: kind of values: `numbers` or `uuids`.
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
"""Replacements that v1 makes in the prompt, in this order, if there is only one answer."""


def niah_samples(name: str, dialect: str, ground: Ground, length: int, index: int, seed: int) -> tuple[Sample, ...]:
    """Return one sample of a needle task. The evidence is the facts in question.

    Raises:
        SpecError: if index or seed is negative, or if the length is too short.
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
    units = _haystack(ground, form, rng, ground.tokens_left(length, head, *lines), first, keys)
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
    """Return the instruction, the question and the start of the answer, in the singular if there is one answer."""
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
    ground: Ground, form: NiahForm, rng: np.random.Generator, left: int, first: int, taken: Sequence[str]
) -> list[Sequence[int]]:
    """Return lines of at most `left` tokens. Lines of running text begin at token `first` and use all of `left`."""
    if form.haystack == "prose":
        ends = [first, *(stop for stop in ground.prose.stops if first < stop < first + left), first + max(0, left)]
        return [ground.prose.tokens[start:stop] for start, stop in pairwise(ends)]
    noise = ground.encode(f"\n{NOISE}")

    def needle() -> tuple[int, ...]:
        (key,) = different(lambda: _DRAWN[form.key](rng), 1, taken)
        return _line(ground, form, key, _DRAWN[form.value](rng))

    return as_many(needle if form.haystack == "needles" else lambda: noise, left)
