"""Delayed association (Appendix B): a fact at the beginning, then filler that keeps mentioning its topic."""

from __future__ import annotations

from collections.abc import Sequence

from models_integration.tasks.assembly import Anchor, assemble, joiner
from models_integration.tasks.filler import DEFAULT_FILLER, Filler
from models_integration.tasks.multikey import distractor_anchors, draw_value
from models_integration.tasks.sample import Sample, TaskTokenizer, encode, generator
from models_integration.tasks.templates import (
    ALL_VALUES,
    FRAMING_SENTENCE,
    QUESTION_FRAME,
    TOPIC_TEMPLATES,
    TopicTemplate,
)
from spec.errors import SpecError

TASK = "delayed_association"
DENSITIES = ("high", "low")
PAPER_LENGTHS = (4096, 8192, 16384)
PAPER_REPETITIONS = 10
PAPER_SEED = 42


def mentions_of(topic: TopicTemplate, density: str) -> tuple[str, ...]:
    """Return the pool of mentions: four at high density, two at low.

    Raises:
        SpecError: An unknown density.
    """
    pools = {"high": topic.high_density, "low": topic.low_density}
    if density not in pools:
        raise SpecError("density", density, f"must be one of {', '.join(DENSITIES)}")
    return pools[density]


def _spaced(mentions: Sequence[str]) -> list[Anchor]:
    """Place the mentions so that they cut the filler into equal parts."""
    return [Anchor(mention, (i + 1) / (len(mentions) + 1)) for i, mention in enumerate(mentions)]


def delayed_association_sample(
    tokenizer: TaskTokenizer,
    length: int,
    density: str,
    seed: int | Sequence[int],
    *,
    filler: Filler = DEFAULT_FILLER,
    distractors: int = 0,
    values: Sequence[int] = ALL_VALUES,
) -> Sample:
    """Make one sample; the same arguments always give the same one.

    Args:
        tokenizer: Any ``transformers`` tokenizer.
        length: Context tokens, the opening token included and the question excluded. The fact stands after
            one framing sentence, so this is the distance between fact and question but for that sentence.
        density: ``high`` (four mentions of the topic) or ``low`` (two sentences that only touch it).
        seed: Anything that ``numpy.random.SeedSequence`` takes.
        filler: Sentences that the context is filled with.
        distractors: Facts of the same form about other subjects, with other values, at random places.
        values: What the value is drawn from, uniformly.

    Raises:
        SpecError: Unknown ``density``, ``length`` too short for the sentences, too many distractors.
    """
    rng = generator(seed)
    topic = TOPIC_TEMPLATES[int(rng.integers(len(TOPIC_TEMPLATES)))]
    mentions = mentions_of(topic, density)
    value = draw_value(rng, values)
    anchors = [Anchor(FRAMING_SENTENCE, 0.0), Anchor(topic.fact.state(value), 0.0), *_spaced(mentions)]
    first_distractor = len(anchors)
    anchors += distractor_anchors(rng, topic.fact, distractors, value, values)
    text = assemble(tokenizer, anchors, filler, length, rng)
    question = joiner(tokenizer) + QUESTION_FRAME.format(question=topic.fact.ask())
    return Sample(
        task=TASK,
        context_ids=text.ids,
        question_ids=encode(tokenizer, question),
        expected=str(value),
        needle=text.spans[1],
        distractors=text.spans[first_distractor:],
        metadata={
            "template": topic.fact.name,
            "density": density,
            "value": value,
            "distractors": distractors,
        },
    )
