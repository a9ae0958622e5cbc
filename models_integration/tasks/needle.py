"""Needle-in-a-haystack as in Section 4.2: one critical fact at a controlled depth of a long filler passage."""

from __future__ import annotations

from collections.abc import Sequence

from models_integration.tasks.assembly import Anchor, assemble, joiner
from models_integration.tasks.filler import DEFAULT_FILLER, Filler
from models_integration.tasks.multikey import distractor_anchors, draw_value
from models_integration.tasks.sample import Sample, TaskTokenizer, encode, generator
from models_integration.tasks.templates import ALL_VALUES, NEEDLE_TEMPLATES, QUESTION_FRAME
from spec.errors import SpecError

TASK = "needle"
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
PAPER_LENGTHS = (4096, 8192, 16384, 32768)
PAPER_REPETITIONS = 3


def needle_sample(
    tokenizer: TaskTokenizer,
    length: int,
    depth: float,
    seed: int | Sequence[int],
    *,
    filler: Filler = DEFAULT_FILLER,
    distractors: int = 0,
    values: Sequence[int] = ALL_VALUES,
) -> Sample:
    """Make one sample; the same arguments always give the same one.

    Args:
        tokenizer: Any ``transformers`` tokenizer.
        length: Context tokens, the opening token included and the question excluded.
        depth: Share of the filler before the needle, in [0, 1]; kept to the nearest end of a sentence.
        seed: Anything that ``numpy.random.SeedSequence`` takes.
        filler: Sentences that the context is filled with.
        distractors: Facts of the same form about other subjects, with other values, at random depths.
        values: What the value is drawn from, uniformly.

    Raises:
        SpecError: ``depth`` outside [0, 1], ``length`` too short for the sentences, too many distractors.
    """
    if not 0 <= depth <= 1:
        raise SpecError("depth", depth, "must lie in [0, 1]")
    rng = generator(seed)
    template = NEEDLE_TEMPLATES[int(rng.integers(len(NEEDLE_TEMPLATES)))]
    value = draw_value(rng, values)
    anchors = [Anchor(template.state(value), depth)]
    anchors += distractor_anchors(rng, template, distractors, value, values)
    text = assemble(tokenizer, anchors, filler, length, rng)
    question = joiner(tokenizer) + QUESTION_FRAME.format(question=template.ask())
    return Sample(
        task=TASK,
        context_ids=text.ids,
        question_ids=encode(tokenizer, question),
        expected=str(value),
        needle=text.spans[0],
        distractors=text.spans[1:],
        metadata={"template": template.name, "depth": depth, "value": value, "distractors": distractors},
    )
