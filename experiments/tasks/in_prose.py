"""Tasks in running text: facts with different keys, a fact with later mentions of its topic, and text continuation.

Also a task with one fact in one of three kinds of text: old prose, records with names and numbers, Python source.
"""

import json
import lzma
import tomllib
from functools import lru_cache
from itertools import accumulate, chain
from pathlib import Path

import numpy as np

from experiments.tasks.assembly import Anchor, FactTemplate, joiner
from experiments.tasks.context import STRATA, Ground, Prose, check_unprotected, unprotected, weave
from experiments.tasks.metrics import CONTAINS
from experiments.tasks.needle import (
    DENSITIES,
    DEV,
    FRAMING_SENTENCE,
    NEEDLE_TEMPLATES,
    TOPIC_TEMPLATES,
    Sample,
    distractor_anchors,
    draw_value,
    generator,
    mentions_of,
    part_of,
    spaced,
)
from models_integration.model.frame import TaskTokenizer, bare, decode, encode
from spec.errors import SpecError
from spec.parameters import PAPER
from spec.validate import check_choices

__all__ = [
    "ANSWER", "DEV_SHARE", "QUESTION", "TEXTS", "delayed_in_prose_samples", "fact_samples", "keys_in_prose_samples",
    "most_contexts", "prose_continuation_samples",
]


def keys_in_prose_samples(
    ground: Ground, length: int, index: int, seed: int, *, keys: int = 1, depth: float | None = None,
) -> tuple[Sample, ...]:
    """Return sample number `index`: one fact in question, and with `keys` above 1 also distractor facts.

    The start of the answer is given, up to the value. The fact in question is never in the sinks or the recent window,
    which every policy keeps. Distractor facts can be anywhere.

    Args:
        ground: tokenizer, running text and frame.
        length: number of context tokens, including the frame's opening, without the question.
        index: index of the sample, which selects the depth and the window of the text.
        seed: seed of all samples.
        keys: number of facts of the same form, at least 1.
        depth: depth of the fact, as a fraction of the context before the recent window. None: one of STRATA.

    Raises:
        SpecError: if the depth is outside [0, 1], or if the length is too short. Also if `keys` is below 1 or above the
            number of keys of the form.
    """
    if depth is not None and not 0 <= depth <= 1:
        raise SpecError("depth", depth, "must lie in [0, 1]")
    if keys < 1:
        raise SpecError("keys", keys, "must be at least 1")
    window = ground.prose.window(length, index, seed)
    rng = ground.rng(length, index, seed, keys)
    template = NEEDLE_TEMPLATES[int(rng.integers(len(NEEDLE_TEMPLATES)))]
    value = draw_value(rng)
    depth = STRATA[index % len(STRATA)] if depth is None else float(depth)
    anchors = [Anchor(template.state(value), depth * max(0.0, 1 - PAPER.W_recent / length))]
    anchors += distractor_anchors(rng, template, keys - 1, value)
    text = weave(ground.tokenizer, ground.prose, window, ground.frame.opening, anchors, length)
    return (check_unprotected(ground.sample(
        text.ids, f"{joiner(ground.tokenizer)}Question: {template.ask()}", template.state("").removesuffix(" ."),
        str(value), text.spans[:1], gap=" Answer: ", task="needle_in_prose" if keys == 1 else f"keys_in_prose_{keys}",
        distractors=text.spans[1:],
        metadata={"template": template.name, "depth": depth, "value": value, "keys": keys, "window": window},
    )),)


def delayed_in_prose_samples(
    ground: Ground, length: int, index: int, seed: int, *, density: str = "",
) -> tuple[Sample, ...]:
    """Return one sample: the fact after the first line and a framing sentence, then mentions at equal distances.

    Topics, mentions and densities are from Appendix B.1. If no density is given, the index selects the density. The
    start of the answer is given, up to the value.

    Raises:
        SpecError: if the density is unknown, if index or seed is negative, or if the length is too short.
    """
    rng, window = ground.rng(length, index, seed), ground.prose.window(length, index, seed)
    topic = TOPIC_TEMPLATES[int(rng.integers(len(TOPIC_TEMPLATES)))]
    density = density or DENSITIES[index % len(DENSITIES)]
    value = str(draw_value(rng))
    fact = topic.fact.state(value)
    anchors = [Anchor(FRAMING_SENTENCE, 0.0), Anchor(fact, 0.0), *spaced(mentions_of(topic, density))]
    text = weave(ground.tokenizer, ground.prose, window, ground.frame.opening, anchors, length)
    return (check_unprotected(ground.sample(
        text.ids, f"{joiner(ground.tokenizer)}Question: {topic.fact.ask()}", fact.partition(f" {value}")[0], value,
        text.spans[1:2], gap=" Answer: ", task="delayed_association_in_prose",
        metadata={"template": topic.fact.name, "density": density, "value": int(value), "window": window},
    )),)


QUESTION, ANSWER = 16, 128
"""Number of tokens read after the compaction of the context, and number of tokens of the gold answer."""


def prose_continuation_samples(ground: Ground, length: int, index: int, seed: int) -> tuple[Sample, ...]:
    """Return one sample: `length` tokens of running text, more text as the question, and the next text as gold answer.

    The likelihood of the gold answer is measured. The metric of a generated answer is ROUGE-L. No chat template is
    used. Contexts of different indices have no common token until the whole text is used.

    Raises:
        SpecError: if index or seed is negative, or if the text is too short.
    """
    frame, tokens = bare(ground.tokenizer), ground.prose.tokens
    whole = length + QUESTION + ANSWER
    first = whole * ground.prose.window(whole, index, seed)
    read = first + length - len(frame.opening)
    answer = tokens[read + QUESTION : read + QUESTION + ANSWER]
    return (Sample(
        task="prose_continuation", context_ids=(*frame.opening, *tokens[first:read]),
        question_ids=tokens[read : read + QUESTION], expected=decode(ground.tokenizer, answer).strip(), needle=(0, 0),
        answer_ids=answer, metric="rouge_l", max_new_tokens=ANSWER,
    ),)


TEXTS = ("prose", "records", "code", "records", "code")
"""Kinds of text. The index of a context selects the kind."""
DEV_SHARE = 5
"""Number of equal parts of each text. The first part is for dev samples, and the rest for confirming samples."""
_FOLDER = Path(__file__).parent / "assets"
_ASSETS = tomllib.loads((_FOLDER / "facts.toml").read_text(encoding="utf-8"))
FACTS = tuple(
    FactTemplate(about, f"The {about} is {{value}}.", f"What is the {about}?", "", tuple(keys))
    for about, keys in ((fact["fact"], fact["keys"]) for fact in _ASSETS["facts"])
)
WORDS: tuple[str, ...] = tuple(_ASSETS["words"].split())
_RECORDS = _ASSETS["records"]
_LIBRARY = _FOLDER / "python_library.json.xz"
"""Source files of Python 3.11.7's standard library, texts by name. Every version of Python draws the same windows."""
_ATTEMPTS = 500
_LETTERS_OF_A_TOKEN = 8
"""Number of characters per token that a source file must have to be long enough for a window."""


def fact_samples(
    ground: Ground, length: int, index: int, seed: int, *, value: str = "number",
) -> tuple[Sample, ...]:
    """Return one sample: a fact at a random depth of a text window that no different sample of this task uses.

    The start of the answer is given, up to the value. The fact is never in the sinks or the recent window, and its
    value occurs only once. Dev and confirming samples use different parts of each text.

    Args:
        ground: tokenizer, running text and frame.
        length: number of context tokens, including the frame's opening, without the question.
        index: index of the sample, which selects the kind of text (see TEXTS).
        seed: seed of all samples.
        value: kind of the fact's value: "number" (four digits) or "word".

    Raises:
        SpecError: if `value` is unknown, if index or seed is negative, or if the length is too short.
    """
    check_choices("value", (value,), ("number", "word"))
    kind, turn = TEXTS[index % len(TEXTS)], index // len(TEXTS) * TEXTS.count(TEXTS[index % len(TEXTS)])
    turn += TEXTS[: index % len(TEXTS)].count(kind)
    text, window, dev = _window(ground, kind, length, turn, seed)
    for attempt in range(_ATTEMPTS):  # the context's digest and the place in the text must give the same part
        sample = _sample(ground, text, window, length, ground.rng(length, index, seed, attempt), kind, value)
        free = all(unprotected(span, length) for span in sample.evidence)
        alone = decode(ground.tokenizer, sample.context_ids).count(sample.expected) == 1
        if free and alone and (part_of(sample.context_digest) == DEV) is dev:
            return (sample,)
    raise SpecError("length", length, "is too short for a fact outside sinks and recent window")


def most_contexts(prose: Prose, length: int) -> int:
    """Return the number of contexts of `length` tokens without a common window."""
    return len(TEXTS) * min(
        windows // TEXTS.count(kind) for kind, windows in
        (("prose", prose.windows(length)), ("code", len(_sources(length))))
    )


def _sample(
    ground: Ground, text: Prose, window: int, length: int, rng: np.random.Generator, kind: str, values: str,
) -> Sample:
    template = FACTS[int(rng.integers(len(FACTS)))]
    key = template.other_keys[int(rng.integers(len(template.other_keys)))]
    value = str(rng.integers(1000, 10000)) if values == "number" else str(rng.choice(WORDS))
    depth = float(rng.random())
    anchor = Anchor(template.state(value, key), depth * max(0.0, 1 - PAPER.W_recent / length))
    woven = weave(ground.tokenizer, text, window, ground.frame.opening, [anchor], length)
    begun = template.state(value, key).partition(f" {value}")[0]
    question = f"{joiner(ground.tokenizer)}Question: {template.ask(key)}"
    return ground.sample(
        woven.ids, question, begun, value, woven.spans, gap=" Answer: ", task="fact", metric=CONTAINS, metadata={
            "template": template.name, "depth": depth, "value": value, "text": kind,
        },
    )


def _window(ground: Ground, kind: str, length: int, turn: int, seed: int) -> tuple[Prose, int, bool]:
    """Return the text and the place of window number `turn` of a kind, and True if the window is for dev samples."""
    if kind == "records":
        return _records(ground.tokenizer, length, (seed, length, turn)), 0, turn % DEV_SHARE == 0
    places = range(ground.prose.windows(length)) if kind == "prose" else range(len(_sources(length)))
    place = int(generator((seed, length)).permutation(len(places))[turn % len(places)])
    dev = place * DEV_SHARE < len(places)
    if kind == "prose":
        return ground.prose, place, dev
    return _code(ground.tokenizer, _sources(length)[place]), 0, dev


def _records(tokenizer: TaskTokenizer, length: int, seed: tuple[int, ...]) -> Prose:
    """Return random sentences of records, enough for one window."""
    rng, lines, left = generator(seed), list[tuple[int, ...]](), length
    while left > 0:
        lines.append(encode(tokenizer, joiner(tokenizer) + _record(rng)))
        left -= len(lines[-1])
    return _text("records", lines)


def _record(rng: np.random.Generator) -> str:
    """Return one sentence: a template with randomly filled slots."""
    numbers = {"day": (1, 29), "year": (1750, 1900), "count": (100, 10000), "few": (2, 100)}
    pieces = str(rng.choice(_RECORDS["forms"])).split("{")
    result = pieces[0]
    for piece in pieces[1:]:
        slot, rest = piece.split("}")
        drawn = rng.integers(*numbers[slot]) if slot in numbers else rng.choice(_RECORDS["slots"][slot])
        result += f"{drawn}{rest}"
    return result


@lru_cache
def _library() -> dict[str, str]:
    texts: dict[str, str] = json.loads(lzma.decompress(_LIBRARY.read_bytes()))
    return texts


@lru_cache
def _sources(length: int) -> list[str]:
    """Return the source files that are long enough for a window, by name."""
    return [text for text in _library().values() if len(text.encode()) >= _LETTERS_OF_A_TOKEN * length]


def _code(tokenizer: TaskTokenizer, source: str) -> Prose:
    """Return the beginning of a source file, including comments and docstrings."""
    return _text("code", [encode(tokenizer, f"{line}\n") for line in source.splitlines()])


def _text(name: str, lines: list[tuple[int, ...]]) -> Prose:
    return Prose(name, tuple(chain.from_iterable(lines)), tuple(accumulate(map(len, lines))))
