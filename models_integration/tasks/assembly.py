"""The forms of sentences, and how they are put into filler so that the whole has exactly the wanted number of tokens.

Sentences are tokenized one by one and their ids are joined, which makes every count exact for every tokenizer.
Filler is made of whole sentences: the last few are chosen so that their lengths add up. Only where no choice of
sentences adds up (a handful of tokens) is one cut short.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, TypeAlias

import numpy as np

from spec.errors import SpecError

__all__ = [
    "Anchor", "Assembled", "FactTemplate", "Filler", "FillerStream", "TaskTokenizer", "TopicTemplate", "assemble",
    "decode", "encode", "joiner", "opening_ids",
]

_PROBE = "The end."
_PLANNED = 1024
"""Rests up to this many tokens are planned exactly; above it any sentence of ordinary length can come next."""


class TaskTokenizer(Protocol):
    """The two methods that the tasks use; every `transformers` tokenizer has them."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str | list[str]: ...


Filler: TypeAlias = Sequence[str]
"""Sentences of generic prose that carry no fact a question asks for; tasks repeat them up to the wanted length."""


@dataclass(frozen=True)
class FactTemplate:
    """One form of a critical fact.

    Attributes:
        name: a short stable identifier, reported in results.
        fact: the sentence, with the fields `{key}` and `{value}`.
        question: what is asked about it, with the field `{key}`.
        key: the subject of the fact that is asked for.
        other_keys: subjects for distractor facts, which carry other values.
    """

    name: str
    fact: str
    question: str
    key: str
    other_keys: tuple[str, ...]

    def state(self, value: int | str, key: str | None = None) -> str:
        """The fact as a sentence about `key`, by default the template's own."""
        return self.fact.format(key=self.key if key is None else key, value=value)

    def ask(self, key: str | None = None) -> str:
        """The question about `key`, by default the template's own."""
        return self.question.format(key=self.key if key is None else key)


@dataclass(frozen=True)
class TopicTemplate:
    """A fact about a topic and the two pools of mentions that keep the topic alive (Appendix B.1)."""

    fact: FactTemplate
    high_density: tuple[str, ...]
    low_density: tuple[str, ...]


@dataclass(frozen=True)
class Anchor:
    """A sentence that must stand at a given place.

    Attributes:
        text: the sentence.
        fraction: share of all filler that comes before it, in [0, 1]; ties keep the given order.
    """

    text: str
    fraction: float


@dataclass(frozen=True)
class Assembled:
    """Token ids and, for each anchor in the given order, its span `[start, stop)`."""

    ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]


def encode(tokenizer: TaskTokenizer, text: str) -> tuple[int, ...]:
    """Token ids of `text` alone, without special tokens."""
    return tuple(int(token) for token in tokenizer.encode(text, add_special_tokens=False))


def decode(tokenizer: TaskTokenizer, ids: Sequence[int]) -> str:
    """Text of `ids` without special tokens."""
    return str(tokenizer.decode([int(token) for token in ids], skip_special_tokens=True))


def joiner(tokenizer: TaskTokenizer) -> str:
    """What must precede a sentence so that ids joined one after the other decode with single spaces."""
    twice = encode(tokenizer, _PROBE) * 2
    return "" if decode(tokenizer, twice).strip() == f"{_PROBE} {_PROBE}" else " "


def opening_ids(tokenizer: TaskTokenizer) -> tuple[int, ...]:
    """The special tokens that the tokenizer itself puts before a text (often one, often none)."""
    plain = encode(tokenizer, _PROBE)
    full = tuple(int(token) for token in tokenizer.encode(_PROBE, add_special_tokens=True))
    starts = (start for start in range(len(full)) if full[start : start + len(plain)] == plain)
    return full[: next(starts, 0)]


@lru_cache(maxsize=256)
def _reachable(sizes: frozenset[int]) -> tuple[bool, ...]:
    """For every total up to `_PLANNED`, whether sentences of these sizes can add up to it."""
    reached = [True] + [False] * _PLANNED
    for total in range(1, _PLANNED + 1):
        reached[total] = any(size <= total and reached[total - size] for size in sizes)
    return tuple(reached)


class FillerStream:
    """Filler sentences in a circle, handed out in exact numbers of tokens."""

    def __init__(self, sentences: Sequence[tuple[int, ...]], first: int) -> None:
        self._sentences = [ids for ids in sentences if ids]
        if not self._sentences:
            raise SpecError("filler", len(sentences), "needs at least one sentence that encodes to tokens")
        self._next = first % len(self._sentences)
        self._reachable = _reachable(frozenset(len(ids) for ids in self._sentences))

    def fits(self, total: int) -> bool:
        """Whether whole sentences can add up to `total` tokens."""
        return total > _PLANNED or self._reachable[total]

    def nearest_fit(self, total: int, largest: int) -> int:
        """The number of tokens nearest to `total` that whole sentences reach, the smaller on ties.

        The rest up to `largest` must be reachable as well; where nothing is, `total` itself is returned.
        """
        for distance in range(largest + 1):
            for candidate in (total - distance, total + distance):
                if 0 <= candidate <= largest and self.fits(candidate) and self.fits(largest - candidate):
                    return candidate
        return total

    def _advance(self) -> tuple[int, ...]:
        sentence = self._sentences[self._next]
        self._next = (self._next + 1) % len(self._sentences)
        return sentence

    def _next_whole(self, rest: int) -> tuple[int, ...]:
        """The next sentence after which the rest still adds up; a cut one if there is none."""
        for _ in self._sentences:
            sentence = self._advance()
            if len(sentence) <= rest and self.fits(rest - len(sentence)):
                return sentence
        fitting = [ids for ids in self._sentences if len(ids) <= rest]
        return max(fitting, key=len) if fitting else self._advance()[:rest]

    def take(self, total: int) -> tuple[int, ...]:
        """Exactly `total` tokens of filler."""
        taken: list[int] = []
        while len(taken) < total:
            taken.extend(self._next_whole(total - len(taken)))
        return tuple(taken)


def _anchor_ids(tokenizer: TaskTokenizer, anchors: Sequence[Anchor], order: Sequence[int]) -> list[tuple[int, ...]]:
    """Encode the anchors; the one that opens the text stands without a space before it."""
    space = joiner(tokenizer)
    opens = order[0] if order and anchors[order[0]].fraction == 0 else -1
    return [encode(tokenizer, ("" if i == opens else space) + anchor.text) for i, anchor in enumerate(anchors)]


def assemble(
    tokenizer: TaskTokenizer, anchors: Sequence[Anchor], filler: Filler, length: int, rng: np.random.Generator,
    opening: Sequence[int] | None = None,
) -> Assembled:
    """Join opening tokens, by default the tokenizer's own, the anchors and filler into exactly `length` tokens.

    The filler starts at a random sentence.

    Raises:
        SpecError: when the anchors alone are longer.
    """
    order = sorted(range(len(anchors)), key=lambda i: anchors[i].fraction)
    encoded = _anchor_ids(tokenizer, anchors, order)
    ids = list(opening_ids(tokenizer) if opening is None else opening)
    room = length - len(ids) - sum(len(piece) for piece in encoded)
    if room < 0:
        raise SpecError("length", length, f"the sentences of the task alone need {length - room} tokens")
    space = joiner(tokenizer)
    stream = FillerStream([encode(tokenizer, space + text) for text in filler], int(rng.integers(2**31)))
    spans = [(0, 0)] * len(anchors)
    used = 0
    for index in order:
        wanted = max(0, round(anchors[index].fraction * room) - used)
        amount = stream.nearest_fit(wanted, room - used)
        ids.extend(stream.take(amount))
        used += amount
        spans[index] = (len(ids), len(ids) + len(encoded[index]))
        ids.extend(encoded[index])
    ids.extend(stream.take(room - used))
    return Assembled(tuple(ids), tuple(spans))
