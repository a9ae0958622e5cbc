"""Task `placed_fact`: one text, in which the place of the fact and the later mentions of its topic vary independently.

The filler is from the running text that comes with kvspec. Lines that repeat eight tokens of an earlier line are left
out. So no eight tokens occur twice in a context, and contexts of different windows share no eight tokens.
"""

import hashlib
import tomllib
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

__all__ = ["FACT_DEPTHS", "MENTIONS", "NGRAM", "PLACED_TOPICS", "placed_fact_samples", "without_repeats"]

FACT_DEPTHS = (0.0, 0.15, 0.3, 0.5, 0.7)
"""Places of the fact, as fractions of the context before the recent window."""
MENTIONS = (*DENSITIES, "none")
NGRAM = 8
"""Number of tokens in a row that no context repeats."""
_TOPICS = tomllib.loads((Path(__file__).parent / "assets" / "topics.toml").read_text(encoding="utf-8"))["topics"]
PLACED_TOPICS: tuple[TopicTemplate, ...] = tuple(
    TopicTemplate(
        FactTemplate(topic["name"], topic["fact"], topic["question"], "", ()), tuple(topic["high"]),
        tuple(topic["low"]),
    ) for topic in _TOPICS
)


def placed_fact_samples(
    ground: Ground, length: int, index: int, seed: int, *, depth: float | None = None, mentions: str = "",
) -> tuple[Sample, ...]:
    """Return one sample: a framing sentence, and running text with a fact and up to four mentions of the fact's topic.

    Window, topic and value depend only on length, index and seed. So samples of one index differ only in the place of
    the fact and in the mentions. All samples of a window belong to the same part of a study. The start of the answer
    is given, up to the value. Indices above the number of windows use a window again.

    Args:
        ground: tokenizer, running text and frame.
        length: number of context tokens, including the frame's opening, without the question.
        index: index of the sample, which selects window and topic.
        seed: seed of all samples.
        depth: place of the fact, as a fraction of the context before the recent window. None: one of FACT_DEPTHS.
        mentions: "high" (four sentences that name the topic), "low" (two hints) or "none". "": the index selects.

    Raises:
        SpecError: if `depth` or `mentions` is invalid, if index or seed is negative, or if the text is too short.
    """
    if depth is not None and not 0 <= depth <= 1:
        raise SpecError("depth", depth, "must lie in [0, 1]")
    depth = FACT_DEPTHS[index % len(FACT_DEPTHS)] if depth is None else float(depth)
    mentions = mentions or MENTIONS[index // len(FACT_DEPTHS) % len(MENTIONS)]
    check_choices("mentions", (mentions,), MENTIONS)
    rng, text = ground.rng(length, index, seed), without_repeats(ground.prose)
    window, topic, value = text.window(length, index, seed), PLACED_TOPICS[index % len(PLACED_TOPICS)], draw_value(rng)
    context, fact = _context(ground, text, window, length, topic, topic.fact.state(value), depth, mentions)
    filler = np.array(text.tokens[window * length : (window + 1) * length], dtype="<i8")
    return (check_unprotected(ground.sample(
        context, f"{joiner(ground.tokenizer)}Question: {topic.fact.ask()}",
        topic.fact.state(value).partition(f" {value}")[0], str(value), (fact,), gap=" Answer: ", task="placed_fact",
        metric=CONTAINS, metadata={
            "template": topic.fact.name, "depth": depth, "mentions": mentions, "value": value,
            "group": hashlib.sha256(filler.tobytes()).hexdigest(),
        },
    )),)


def _context(
    ground: Ground, text: Prose, window: int, length: int, topic: TopicTemplate, fact: str, depth: float, mentions: str,
) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Return the context and the span of the fact. At depth 0 the fact follows the framing sentence."""
    named = spaced(mentions_of(topic, mentions) if mentions in DENSITIES else ())
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

    A sentence of a task may end like a line. NGRAM tokens that begin with such an end do then not occur twice either.
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
