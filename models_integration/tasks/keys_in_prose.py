"""One fact, or several that are told apart by their key, in running text; one of them is asked for."""

from collections.abc import Sequence

from models_integration.tasks.assembly import Anchor, FactTemplate, TaskTokenizer, encode, joiner
from models_integration.tasks.chat import Frame, bare
from models_integration.tasks.prose import Prose, weave
from models_integration.tasks.samples import Sample, distractor_anchors, draw_value, generator
from models_integration.tasks.sentences import ALL_VALUES, NEEDLE_TEMPLATES, QUESTION_FRAME
from spec.errors import SpecError
from spec.parameters import PAPER

__all__ = ["STRATA", "check_unprotected", "keys_in_prose_sample"]

STRATA = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Depths of the fact that is asked for, as shares of what precedes the recent window; the index takes turns."""


def keys_in_prose_sample(
    tokenizer: TaskTokenizer, prose: Prose, length: int, keys: int, index: int, seed: int, *,
    frame: Frame | None = None, values: Sequence[int] = ALL_VALUES,
) -> Sample:
    """Sample number `index`: with one key a needle, with more of them the other facts are in its way.

    The answer's opening is given, up to the value. The fact that is asked for never lies in the sinks or in the recent
    window, which every policy keeps; the others stand anywhere.

    Args:
        tokenizer: any `transformers` tokenizer.
        prose: the running text, read with the same tokenizer.
        length: context tokens, the frame's opening included and the question excluded.
        keys: facts of one form, at least 1.
        index: which sample; depths and windows of the text take turns over it.
        seed: of all samples.
        frame: of a chat template; none by default.
        values: what the values are drawn from.

    Raises:
        SpecError: for fewer than one key or more than the form has, and a length that holds no such context.
    """
    if keys < 1:
        raise SpecError("keys", keys, "must be at least 1")
    around = bare(tokenizer) if frame is None else frame
    window = prose.window(length, index, seed)
    rng = generator((seed, keys, length, index))
    template = NEEDLE_TEMPLATES[int(rng.integers(len(NEEDLE_TEMPLATES)))]
    value, depth = draw_value(rng, values), STRATA[index % len(STRATA)]
    before_window = max(0.0, 1 - PAPER.W_recent / length)
    anchors = [Anchor(template.state(value), depth * before_window)]
    anchors += distractor_anchors(rng, template, keys - 1, value, values)
    text = weave(tokenizer, prose, window, around.opening, anchors, length)
    check_unprotected(text.spans[0], length)
    space = joiner(tokenizer)
    return Sample(
        task=f"keys_in_prose_{keys}", context_ids=text.ids,
        question_ids=encode(tokenizer, space + _question(template, around)),
        expected=str(value), needle=text.spans[0], distractors=text.spans[1:],
        metadata={"template": template.name, "depth": depth, "value": value, "keys": keys, "window": window},
        answer_ids=encode(tokenizer, f"{space}{value}"), chat_template=around.name,
    )


def _question(template: FactTemplate, around: Frame) -> str:
    """The question, and the answer up to the value."""
    asked = QUESTION_FRAME.format(question=template.ask()).removesuffix(" Answer:")
    opening = template.state("").removesuffix(".").strip()
    return f"{asked}{around.closing}{opening}" if around.closing else f"{asked} Answer: {opening}"


def check_unprotected(span: tuple[int, int], length: int) -> None:
    """Evidence lies where policies decide.

    Raises:
        SpecError: for a context whose sinks or recent window reach into it.
    """
    if span[0] < PAPER.N_sink or span[1] > length - PAPER.W_recent:
        bound = f"is too short: evidence at {span} would be protected ({PAPER.N_sink} sinks, {PAPER.W_recent} recent)"
        raise SpecError("length", length, bound)
