"""Text sources of contexts: running text, and lists. Contexts have an exact length. Evidence can be evicted.

The running text of kvspec is from the King James Version of the Bible (Genesis, Joshua to 2 Kings), as in Debian's
bible-kjv-text 4.38. Each line is a verse without its number. The copyright has expired, and the text has no digits.
Windows of the text have no token in common.
"""

import string
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np

from experiments.tasks.assembly import Anchor, Assembled, joiner
from experiments.tasks.needle import Sample, generator
from models_integration.model.frame import Frame, TaskTokenizer, encode
from spec.errors import SpecError
from spec.files import read_text
from spec.parameters import PAPER

__all__ = [
    "NARRATIVE", "STRATA", "Ground", "Maker", "Prose", "Span", "as_many", "asked", "check_unprotected", "different",
    "joined", "letters", "listed", "places", "read_prose", "unprotected", "weave",
]

NARRATIVE = Path(__file__).parent / "assets" / "kjv_narrative.txt.xz"


@dataclass(frozen=True)
class Prose:
    """A text as tokens.

    Attributes:
        name: name of the file.
        tokens: tokens of all lines. Each line is tokenized as if it followed a different sentence.
        stops: positions at which lines end, ascending.
    """

    name: str
    tokens: tuple[int, ...]
    stops: tuple[int, ...]

    def windows(self, length: int) -> int:
        """Return the number of contexts with `length` tokens that have no token of the text in common.

        Raises:
            SpecError: if the length is below 1, or if the text is shorter than the length.
        """
        if not 1 <= length <= len(self.tokens):
            raise SpecError("length", length, f"must lie in [1, {len(self.tokens)}], the tokens of {self.name}")
        return len(self.tokens) // length

    def window(self, length: int, index: int, seed: int) -> int:
        """Return the index of the window for sample number `index`. The seed sets the order of the windows.

        Raises:
            SpecError: as in `windows`, or if the index or the seed is negative.
        """
        if index < 0:
            raise SpecError("index", index, "must not be negative")
        count = self.windows(length)
        return int(generator((seed, length)).permutation(count)[index % count])


def read_prose(tokenizer: TaskTokenizer, path: Path = NARRATIVE) -> Prose:
    """Read a text file, plain or .xz, and tokenize it. A million characters take about a second.

    Raises:
        SpecError: if the file cannot be read or is empty.
    """
    space = joiner(tokenizer)
    lines = [encode(tokenizer, space + line.strip()) for line in read_text("path", path).splitlines() if line.strip()]
    if not any(lines):
        raise SpecError("path", str(path), "must not be empty")
    return Prose(path.name, tuple(chain.from_iterable(lines)), tuple(accumulate(map(len, lines))))


def weave(
    tokenizer: TaskTokenizer, prose: Prose, window: int, opening: Sequence[int], anchors: Sequence[Anchor], length: int
) -> Assembled:
    """Join opening tokens and a window of the text. Insert each anchor after the line that ends nearest to its place.

    The text continues between anchors. Lines may be cut only at the start and the end of the window.

    Raises:
        SpecError: if opening tokens and anchors alone are longer than `length` tokens.
    """
    space, first = joiner(tokenizer), window * length
    encoded = [encode(tokenizer, space + anchor.text) for anchor in anchors]
    left = length - len(opening) - sum(map(len, encoded))
    if left < 0:
        raise SpecError("length", length, f"the sentences of the task alone need {length - left} tokens")
    stops = [stop - first for stop in prose.stops if first < stop <= first + left] or [0]
    ids, spans, read = list(opening), [(0, 0)] * len(anchors), 0
    for index in sorted(range(len(anchors)), key=lambda i: anchors[i].fraction):
        place = max(read, _nearest(stops, anchors[index].fraction * left))
        ids.extend(prose.tokens[first + read : first + place])
        read, spans[index] = place, (len(ids), len(ids) + len(encoded[index]))
        ids.extend(encoded[index])
    ids.extend(prose.tokens[first + read : first + left])
    return Assembled(tuple(ids), tuple(spans))


def _nearest(stops: Sequence[int], place: float) -> int:
    """Return the stop nearest to a place, at a tie the smaller stop."""
    at = bisect_left(stops, place)
    return min(stops[max(0, at - 1) : at + 1], key=lambda stop: abs(stop - place))


STRATA = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Depths of the fact in question, as fractions of the context before the recent window. The index selects the depth."""

Span = tuple[int, int]


@dataclass(frozen=True)
class Ground:
    """Material from which contexts are made.

    Attributes:
        tokenizer: any `transformers` tokenizer.
        prose: the running text, as tokens of this tokenizer.
        frame: tokens and text of the chat template before the context and after the question.
    """

    tokenizer: TaskTokenizer
    prose: Prose
    frame: Frame

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of `text`, without special tokens."""
        return encode(self.tokenizer, text)

    def follow(self, text: str) -> tuple[int, ...]:
        """Return the token ids of `text` after a different text, with a space before `text`."""
        return self.encode(joiner(self.tokenizer) + text)

    def rng(self, length: int, index: int, seed: int, *more: int) -> np.random.Generator:
        """Return the random generator of a context.

        Raises:
            SpecError: if the index or the seed is negative, or if the text is too short for the length.
        """
        self.prose.window(length, index, seed)
        return generator((seed, *more, length, index))

    def tokens_left(self, length: int, *pieces: Sequence[int]) -> int:
        """Return the number of context tokens that are left after the frame's opening and some pieces."""
        return length - len(self.frame.opening) - sum(map(len, pieces))

    def spans(self, text: str, result: Collection[Span]) -> tuple[Span, ...]:
        """Return the token spans of character spans of `text`, which follows the frame's opening; ascending.

        A tokenizer without offsets (one in pure Python) gives no spans.
        """
        tokenizer, first = cast("Any", self.tokenizer), len(self.frame.opening)
        if not result or not getattr(tokenizer, "is_fast", False):
            return ()
        offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        starts, stops = zip(*offsets, strict=True)
        return tuple(sorted(
            (first + bisect_right(stops, start), first + bisect_left(starts, stop)) for start, stop in result
        ))

    def sample(
        self, context: tuple[int, ...], question: str, opening: str, answer: str, evidence: Sequence[Span], *,
        gap: str = " ", **fields: Any,
    ) -> Sample:
        """Return a sample made of texts: context, question, text of the frame (or `gap`), and the start of the answer.

        If the text before the answer ends with white space, the answer begins without a space.
        """
        asked = question + (self.frame.closing or gap) + opening
        return Sample(
            context_ids=context, question_ids=self.encode(asked), expected=answer,
            needle=evidence[0] if evidence else (0, 0), further=tuple(evidence[1:]),
            answer_ids=self.encode(answer) if asked[-1:].isspace() else self.follow(answer),
            chat_template=self.frame.name, **fields,
        )


Maker: TypeAlias = Callable[[Ground, int, int, int], Sequence[Sample]]
"""Function of (ground, length, index, seed) that returns the questions on one context, in order."""


def joined(ground: Ground, length: int, index: int, seed: int, pieces: Sequence[Sequence[int]]) -> Assembled:
    """Join the frame's opening, running text up to the exact length, and the pieces. Return ids and spans of pieces.

    Raises:
        SpecError: if the pieces alone are longer than `length` tokens.
    """
    rest = ground.tokens_left(length, *pieces)
    if rest < 0:
        raise SpecError("length", length, f"the task alone needs {length - rest} tokens")
    first = length * ground.prose.window(length, index, seed)
    ids, spans = [*ground.frame.opening, *ground.prose.tokens[first : first + rest]], list[Span]()
    for piece in pieces:
        spans.append((len(ids), len(ids) + len(piece)))
        ids.extend(piece)
    return Assembled(tuple(ids), tuple(spans))


def listed(
    ground: Ground, length: int, index: int, seed: int, head: Sequence[int], units: Sequence[Sequence[int]],
    facts: Mapping[int, Sequence[int]],
) -> Assembled:
    """Join a head and a list as in `joined`, with facts before some units of the list. Return only spans of facts."""
    pieces, marks = [head], list[int]()
    for at, unit in enumerate(units):
        if at in facts:
            marks.append(len(pieces))
            pieces.append(facts[at])
        pieces.append(unit)
    text = joined(ground, length, index, seed, pieces)
    return Assembled(text.ids, tuple(text.spans[mark] for mark in marks))


def as_many(unit: Callable[[], Sequence[int]], left: int) -> list[Sequence[int]]:
    """Return as many units as fit into `room` tokens. Each unit is made by a call of `unit`."""
    result = list[Sequence[int]]()
    while True:
        piece = unit()
        left -= len(piece)
        if left < 0:
            return result
        result.append(piece)


def different(draw: Callable[[], str], count: int, taken: Container[str] = ()) -> list[str]:
    """Return `count` different results of `draw`, none of them in `taken`."""
    result = dict[str, None]()
    while len(result) < count:
        if (drawn := draw()) not in taken:
            result[drawn] = None
    return list(result)


def letters(rng: np.random.Generator, size: int, alphabet: str = string.ascii_lowercase) -> str:
    """Return `size` random letters."""
    return "".join(alphabet[int(at)] for at in rng.integers(len(alphabet), size=size))


def places(rng: np.random.Generator, units: Sequence[Sequence[int]], count: int, index: int, length: int) -> list[int]:
    """Return the indices of the units before which `count` pieces of evidence are inserted, ascending and different.

    All pieces are outside the recent window. One piece has the depth that the index selects.

    Raises:
        SpecError: if the length has fewer possible places.
    """
    behind = list(accumulate(len(unit) for unit in reversed(units)))[::-1]
    free = [at for at, tokens in enumerate(behind) if tokens >= PAPER.W_recent]
    if len(free) < count:
        raise SpecError(
            "length", length,
            f"has {len(free)} places outside sinks and window, but {count} facts need {count}",
        )
    stratum = (index % len(STRATA) + rng.random()) / len(STRATA)
    first = free.pop(int(stratum * len(free)))
    return sorted([first, *(free[int(at)] for at in rng.permutation(len(free))[: count - 1])])


def asked(rng: np.random.Generator, spans: Sequence[Span], questions: int, length: int) -> list[int]:
    """Return the units for the questions: one unit from each of `questions` equal parts, in random order.

    Raises:
        SpecError: if there is no question, or if fewer units are outside sinks and window.
    """
    if questions < 1:
        raise SpecError("questions", questions, "must be at least 1")
    free = [at for at, span in enumerate(spans) if unprotected(span, length)]
    if len(free) < questions:
        raise SpecError(
            "length", length,
            f"has {len(free)} units outside sinks and window, but {questions} questions need {questions}",
        )
    chosen = [int(rng.choice(part)) for part in np.array_split(np.array(free), questions)]
    return [chosen[int(at)] for at in rng.permutation(questions)]


def unprotected(span: Span, length: int) -> bool:
    """Return True if the span is outside the sinks and the recent window of PAPER, so that policies can evict it."""
    return span[0] >= PAPER.N_sink and span[1] <= length - PAPER.W_recent


def check_unprotected(sample: Sample) -> Sample:
    """Check that policies can evict all evidence, and return the sample.

    Raises:
        SpecError: if sinks or recent window overlap the evidence.
    """
    for span in sample.evidence:
        if not unprotected(span, sample.length):
            where = f"evidence at {span} would be protected ({PAPER.N_sink} sinks, {PAPER.W_recent} recent)"
            raise SpecError("length", sample.length, f"is too short: {where}")
    return sample
