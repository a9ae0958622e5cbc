"""Tasks in running text: facts with different keys, a fact with later mentions of its topic, and text continuation."""

from models_integration.tasks.assembly import Anchor, decode, joiner
from models_integration.tasks.chat import bare
from models_integration.tasks.context import STRATA, Ground, check_unprotected
from models_integration.tasks.prose import weave
from models_integration.tasks.samples import (
    ALL_VALUES,
    DENSITIES,
    FRAMING_SENTENCE,
    NEEDLE_TEMPLATES,
    TOPIC_TEMPLATES,
    Sample,
    distractor_anchors,
    draw_value,
    mentions_of,
    spaced,
)
from spec.errors import SpecError
from spec.parameters import PAPER

__all__ = ["ANSWER", "QUESTION", "delayed_in_prose_samples", "keys_in_prose_samples", "prose_continuation_samples"]


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
        SpecError: if the depth is outside [0, 1], if `keys` is below 1 or above the number of keys of the form, or if
            the length is too short.
    """
    if depth is not None and not 0 <= depth <= 1:
        raise SpecError("depth", depth, "must lie in [0, 1]")
    if keys < 1:
        raise SpecError("keys", keys, "must be at least 1")
    window = ground.prose.window(length, index, seed)
    rng = ground.rng(length, index, seed, keys)
    template = NEEDLE_TEMPLATES[int(rng.integers(len(NEEDLE_TEMPLATES)))]
    value = draw_value(rng, ALL_VALUES)
    depth = STRATA[index % len(STRATA)] if depth is None else float(depth)
    anchors = [Anchor(template.state(value), depth * max(0.0, 1 - PAPER.W_recent / length))]
    anchors += distractor_anchors(rng, template, keys - 1, value, ALL_VALUES)
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
    value = str(draw_value(rng, ALL_VALUES))
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
