"""Tokens of contexts: sentence templates, and filler of exactly the requested length.

Sentences are tokenized one by one and the ids are joined, so counts are exact for every tokenizer. Filler consists of
whole sentences. The last sentences are chosen so that the lengths add up. A sentence is cut only if no choice adds up
(a few tokens).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np

from models_integration.model.frame import PROBE, TaskTokenizer, decode, encode, opening_ids
from spec.errors import SpecError

__all__ = [
    "Anchor", "Assembled", "FactTemplate", "Filler", "FillerStream", "TopicTemplate", "assemble", "joiner",
]

_PLANNED = 1024
"""Remaining lengths up to this number of tokens are planned exactly. For longer rests, any sentence can come next."""


Filler: TypeAlias = Sequence[str]
"""Sentences of generic prose without facts for a question. Tasks repeat these sentences up to the requested length."""


@dataclass(frozen=True)
class FactTemplate:
    """Template of a fact and of the question about the fact.

    Attributes:
        name: short stable identifier, reported in results.
        fact: sentence with the fields `{key}` and `{value}`.
        question: question with the field `{key}`.
        key: subject of the fact to which the question refers.
        other_keys: subjects of distractor facts, which have different values.
    """

    name: str
    fact: str
    question: str
    key: str
    other_keys: tuple[str, ...]

    def state(self, value: int | str, key: str | None = None) -> str:
        """Return the fact as a sentence about `key`. Default: the key of the template."""
        return self.fact.format(key=self.key if key is None else key, value=value)

    def ask(self, key: str | None = None) -> str:
        """Return the question about `key`. Default: the key of the template."""
        return self.question.format(key=self.key if key is None else key)


@dataclass(frozen=True)
class TopicTemplate:
    """Fact about a topic, and two pools of sentences that mention the topic later (Appendix B.1)."""

    fact: FactTemplate
    high_density: tuple[str, ...]
    low_density: tuple[str, ...]


@dataclass(frozen=True)
class Anchor:
    """Sentence at a given place of the context.

    Attributes:
        text: text of the sentence.
        fraction: fraction of the filler before the sentence, in [0, 1]. Equal fractions keep the given order.
    """

    text: str
    fraction: float


@dataclass(frozen=True)
class Assembled:
    """Token ids of a context, and the span `[start, stop)` of each anchor in the given order."""

    ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]


def joiner(tokenizer: TaskTokenizer) -> str:
    """Return the text before each sentence with which joined ids decode to text with single spaces."""
    twice = encode(tokenizer, PROBE) * 2
    return "" if decode(tokenizer, twice).strip() == f"{PROBE} {PROBE}" else " "


@lru_cache(maxsize=256)
def _reachable(sizes: frozenset[int]) -> tuple[bool, ...]:
    """Return for every total up to `_PLANNED` whether sentences of these sizes can have this total length."""
    reached = [True] + [False] * _PLANNED
    for total in range(1, _PLANNED + 1):
        reached[total] = any(size <= total and reached[total - size] for size in sizes)
    return tuple(reached)


class FillerStream:
    """Endless cycle of filler sentences, from which exact numbers of tokens can be taken."""

    def __init__(self, sentences: Sequence[tuple[int, ...]], first: int) -> None:
        self._sentences = [ids for ids in sentences if ids]
        if not self._sentences:
            raise SpecError("filler", len(sentences), "needs at least one sentence that encodes to tokens")
        self._next = first % len(self._sentences)
        self._reachable = _reachable(frozenset(len(ids) for ids in self._sentences))

    def fits(self, total: int) -> bool:
        """Return True if whole sentences can have `total` tokens together."""
        return total > _PLANNED or self._reachable[total]

    def nearest_fit(self, total: int, largest: int) -> int:
        """Return the number of tokens nearest to `total` that whole sentences can have, at a tie the smaller number.

        Whole sentences must also be able to fill the rest up to `largest`. If no number satisfies this, return `total`.
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
        """Return the next sentence after which whole sentences can fill the rest, or a cut sentence if none exists."""
        for _ in self._sentences:
            sentence = self._advance()
            if len(sentence) <= rest and self.fits(rest - len(sentence)):
                return sentence
        fitting = [ids for ids in self._sentences if len(ids) <= rest]
        return max(fitting, key=len) if fitting else self._advance()[:rest]

    def take(self, total: int) -> tuple[int, ...]:
        """Return exactly `total` tokens of filler."""
        taken: list[int] = []
        while len(taken) < total:
            taken.extend(self._next_whole(total - len(taken)))
        return tuple(taken)


def _anchor_ids(tokenizer: TaskTokenizer, anchors: Sequence[Anchor], order: Sequence[int]) -> list[tuple[int, ...]]:
    """Encode the anchors. An anchor at the start of the text has no space before it."""
    space = joiner(tokenizer)
    opens = order[0] if order and anchors[order[0]].fraction == 0 else -1
    return [encode(tokenizer, ("" if i == opens else space) + anchor.text) for i, anchor in enumerate(anchors)]


def assemble(
    tokenizer: TaskTokenizer, anchors: Sequence[Anchor], filler: Filler, length: int, rng: np.random.Generator,
    opening: Sequence[int] | None = None,
) -> Assembled:
    """Join opening tokens (default: those of the tokenizer), anchors and filler to exactly `length` tokens.

    The filler starts at a random sentence.

    Raises:
        SpecError: if the anchors alone are longer than `length` tokens.
    """
    order = sorted(range(len(anchors)), key=lambda i: anchors[i].fraction)
    encoded = _anchor_ids(tokenizer, anchors, order)
    ids = list(opening_ids(tokenizer) if opening is None else opening)
    left = length - len(ids) - sum(len(piece) for piece in encoded)
    if left < 0:
        raise SpecError("length", length, f"the sentences of the task alone need {length - left} tokens")
    space = joiner(tokenizer)
    stream = FillerStream([encode(tokenizer, space + text) for text in filler], int(rng.integers(2**31)))
    spans = [(0, 0)] * len(anchors)
    used = 0
    for index in order:
        wanted = max(0, round(anchors[index].fraction * left) - used)
        amount = stream.nearest_fit(wanted, left - used)
        ids.extend(stream.take(amount))
        used += amount
        spans[index] = (len(ids), len(ids) + len(encoded[index]))
        ids.extend(encoded[index])
    ids.extend(stream.take(left - used))
    return Assembled(tuple(ids), tuple(spans))
