"""Tasks in running text: facts told apart by their key, a fact that its topic follows, and how the text goes on."""

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
    """Sample number `index`: with one key a needle, with more of them the other facts are in its way.

    The answer's opening is given, up to the value. The fact that is asked for never lies in the sinks or in the recent
    window, which every policy keeps; the others stand anywhere.

    Args:
        ground: tokenizer, running text and frame.
        length: context tokens, the frame's opening included and the question excluded.
        index: which sample; depths and windows of the text take turns over it.
        seed: of all samples.
        keys: facts of one form, at least 1.
        depth: of the fact that is asked for, as a share of what precedes the recent window; None: STRATA take turns.

    Raises:
        SpecError: for a depth outside [0, 1], fewer than one key or more than the form has, and a length that holds no
            such context.
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
    """One sample: the fact behind the text's first line and the framing sentence, mentions in equal distances.

    Topics, mentions and densities are Appendix B.1's; without one given, densities take turns over the index. The
    answer's opening is given, up to the value.

    Raises:
        SpecError: for an unknown density, a negative index or seed, and a length that holds no such context.
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
"""Tokens behind the context that are read after it is compacted, and tokens of the text that then follow."""


def prose_continuation_samples(ground: Ground, length: int, index: int, seed: int) -> tuple[Sample, ...]:
    """One sample: `length` tokens of running text, some more to read, and the text that follows as gold answer.

    Its likelihood is what is measured; the metric of a generated continuation is ROUGE-L. No chat template stands
    around it. Contexts of different indices have no token of the text in common until all of it is used.

    Raises:
        SpecError: for a negative index or seed, and a text that is too short.
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
