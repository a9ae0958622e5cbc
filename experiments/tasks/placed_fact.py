"""Task `placed_fact`: one text, in which the place of the fact and the later mentions of its topic vary independently.

The filler is from the running text that comes with kvspec. Lines that repeat eight tokens of an earlier line are left
out. Therefore no run of eight tokens occurs twice in a context, or in contexts of different windows.
"""

import hashlib
import tomllib
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from experiments.tasks.assembly import Anchor, FactTemplate, TopicTemplate, joiner
from experiments.tasks.context import Ground, Prose, check_unprotected, weave
from experiments.tasks.metrics import CONTAINS
from experiments.tasks.needle import DENSITIES, FRAMING_SENTENCE, Sample, draw_value, mentions_of, spaced
from spec.errors import SpecError
from spec.parameters import PAPER
from spec.validate import check_choices

__all__ = [
    "COMMON", "COMMON_FACTS", "FACT_DEPTHS", "MENTIONS", "NGRAM", "NUMBER", "PLACED_FACT", "PLACED_TOPICS", "VALUES",
    "WORDS", "placed_fact_samples", "without_repeats",
]

PLACED_FACT = "placed_fact"
"""Name of the task."""
FACT_DEPTHS = (0.0, 0.15, 0.3, 0.5, 0.7)
"""Places of the fact, as fractions of the context before the recent window."""
NONE = "none"
MENTIONS = (*DENSITIES, NONE)
VALUES = NUMBER, WORDS = ("number", "words")
NGRAM = 8
"""Number of tokens in a row that no context repeats."""
COMMON = 2
"""Number of times that each token of a value in words occurs in the text without the fact, at least."""
_ASSETS = tomllib.loads((Path(__file__).parent / "assets" / "topics.toml").read_text(encoding="utf-8"))
PLACED_TOPICS: tuple[TopicTemplate, ...] = tuple(
    TopicTemplate(
        FactTemplate(topic["name"], topic["fact"], topic["question"], "", ()), tuple(topic["high"]),
        tuple(topic["low"]),
    ) for topic in _ASSETS["topics"]
)
COMMON_FACTS = tuple(
    FactTemplate(one["name"], one["fact"], one["question"], "", ()) for one in _ASSETS["common"]["facts"]
)
"""Facts whose value is a place in words that are common in the text."""
PLACES: tuple[str, ...] = tuple(_ASSETS["common"]["places"])


def placed_fact_samples(
    ground: Ground, length: int, index: int, seed: int, *, depth: float | None = None, mentions: str = "",
    value: str = NUMBER,
) -> tuple[Sample, ...]:
    """Return one sample: a framing sentence, and running text with a fact and up to four mentions of the fact's topic.

    Window, topic and value depend only on length, index, seed and the kind of value. So samples of one index differ
    only in the place of the fact and in the mentions. All samples of a window belong to the same part of a study. The
    start of the answer is given, up to the value. Indices above the number of windows use a window again.

    Args:
        ground: tokenizer, running text and frame.
        length: number of context tokens, including the frame's opening, without the question.
        index: index of the sample, which selects window and topic.
        seed: seed of all samples.
        depth: place of the fact, as a fraction of the context before the recent window. None: one of FACT_DEPTHS.
        mentions: "high" (four sentences that name the topic), "low" (two hints) or "none". "": the index selects.
        value: "number" (four digits), or "words" (a place, in words that are common in the text). Facts in words have
            no mentions, and the order of their windows begins in the middle. With half as many contexts as windows,
            both kinds share no text.

    Raises:
        SpecError: if `depth`, `mentions` or `value` is invalid, if index or seed is negative, or if the text is too
            short.
    """
    if depth is not None and not 0 <= depth <= 1:
        raise SpecError("depth", depth, "must lie in [0, 1]")
    depth = FACT_DEPTHS[index % len(FACT_DEPTHS)] if depth is None else float(depth)
    check_choices("value", (value,), VALUES)
    if value == WORDS:
        check_choices("mentions", (mentions or NONE,), (NONE,))
        return (_words_sample(ground, length, index, seed, depth),)
    mentions = mentions or MENTIONS[index // len(FACT_DEPTHS) % len(MENTIONS)]
    check_choices("mentions", (mentions,), MENTIONS)
    rng, text = ground.rng(length, index, seed), without_repeats(ground.prose)
    window, topic, number = text.window(length, index, seed), PLACED_TOPICS[index % len(PLACED_TOPICS)], draw_value(rng)
    named = spaced(mentions_of(topic, mentions) if mentions in DENSITIES else ())
    context, fact = _context(ground, text, window, length, topic.fact.state(number), named, depth)
    return (_sample(ground, context, fact, topic.fact, number, {
        "template": topic.fact.name, "depth": depth, "mentions": mentions, "value": number,
        "group": _group(text, window, length),
    }),)


def _words_sample(ground: Ground, length: int, index: int, seed: int, depth: float) -> Sample:
    """Return a sample with a fact whose value is in words. Each token of the value is common in the window."""
    rng, text = ground.rng(length, index, seed), without_repeats(ground.prose)
    window = text.window(length, index + text.windows(length) // 2, seed)
    start = window * length
    counts = Counter(text.tokens[start : start + length - PAPER.W_recent])  # the sentences take the place of the rest
    common = [place for place in PLACES if min(counts[token] for token in ground.follow(place)) >= COMMON]
    if not common:
        raise SpecError("length", length, "is too short for a place whose words are common in the text")
    template, place = COMMON_FACTS[index % len(COMMON_FACTS)], str(rng.choice(common))
    context, fact = _context(ground, text, window, length, template.state(place), (), depth)
    return _sample(ground, context, fact, template, place, {
        "template": template.name, "depth": depth, "mentions": NONE, "value": place,
        "group": _group(text, window, length),
    })


def _sample(
    ground: Ground, context: tuple[int, ...], fact: tuple[int, int], template: FactTemplate, value: int | str,
    metadata: dict[str, str | float],
) -> Sample:
    question, begun = f"{joiner(ground.tokenizer)}Question: {template.ask()}", template.state(value)
    return check_unprotected(ground.sample(
        context, question, begun.partition(f" {value}")[0], str(value), (fact,), gap=" Answer: ", task=PLACED_FACT,
        metric=CONTAINS, metadata=metadata,
    ))


def _group(text: Prose, window: int, length: int) -> str:
    filler = np.array(text.tokens[window * length : (window + 1) * length], dtype="<i8")
    return hashlib.sha256(filler.tobytes()).hexdigest()


def _context(
    ground: Ground, text: Prose, window: int, length: int, fact: str, named: Sequence[Anchor], depth: float,
) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Return the context and the span of the fact. At depth 0 the fact follows the framing sentence."""
    opening = [*ground.frame.opening, *ground.encode(FRAMING_SENTENCE)]
    if depth == 0:
        span = len(opening), len(opening) + len(ground.follow(fact))
        opening += ground.follow(fact)
        return weave(ground.tokenizer, text, window, opening, named, length).ids, span
    anchors = [Anchor(fact, depth * max(0.0, 1 - PAPER.W_recent / length)), *named]
    woven = weave(ground.tokenizer, text, window, opening, anchors, length)
    return woven.ids, woven.spans[0]


@lru_cache(maxsize=4)
def without_repeats(prose: Prose) -> Prose:
    """Return the lines of a text without those that repeat NGRAM - 1 tokens in a row of the result.

    A sentence of a task may end like a line. Therefore no NGRAM tokens that begin at such a line end occur twice.
    """
    size, seen, tokens, stops, start = NGRAM - 1, set[tuple[int, ...]](), list[int](), list[int](), 0
    for stop in prose.stops:
        line, start = prose.tokens[start:stop], stop
        joined = (*tokens[max(0, len(tokens) - size + 1) :], *line)  # the tokens may begin in the line before
        grams = [joined[at : at + size] for at in range(len(joined) - size + 1)]
        if len(set(grams)) == len(grams) and seen.isdisjoint(grams):
            seen.update(grams)
            tokens.extend(line)
            stops.append(len(tokens))
    return Prose(prose.name, tuple(tokens), tuple(stops))
