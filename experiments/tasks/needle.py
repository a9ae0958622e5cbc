"""Samples of the two retrieval tasks with exact lengths, placement of the question, and score of the answer.

- `needle`, needle-in-a-haystack as in Section 4.2: one fact at a given depth of a long filler passage.
- `delayed_association` (Appendix B): a fact at the beginning, then filler with mentions of the fact's topic.
"""

import hashlib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from experiments.tasks.assembly import Anchor, FactTemplate, Filler, TopicTemplate, assemble, joiner
from experiments.tasks.metrics import FIRST_NUMBER, ROUGE_L, judge
from models_integration.model.frame import NO_TEMPLATE, Frame, TaskTokenizer, bare, decode, encode
from spec.errors import SpecError
from spec.validate import check_choices

__all__ = [
    "CONFIRM", "DEFAULT_FILLER", "DEFAULT_PLACEMENT", "DELAYED_ASSOCIATION", "DENSITIES", "DEPTHS",
    "DEV", "FRAMING_SENTENCE", "MAX_NEW_TOKENS", "NEEDLE", "NEEDLE_TEMPLATES", "PLACEMENTS", "QUESTION_FRAME", "TASKS",
    "TOPIC_TEMPLATES", "Placement", "Sample", "delayed_association_sample", "distractor_anchors", "draw_sample",
    "draw_value", "generator", "mentions_of", "needle_sample", "part_of", "place", "score", "spaced",
]

_VALUES = range(1000, 10_000)
QUESTION_FRAME = "Question: {question} Answer:"
FRAMING_SENTENCE = "The following report summarizes recent activity."

_TEXTS = tomllib.loads((Path(__file__).parent / "assets" / "sentences.toml").read_text(encoding="utf-8"))
_FACTS = {
    name: FactTemplate(name, fact["fact"], fact["question"], fact["key"], tuple(fact["other_keys"]))
    for name, fact in _TEXTS["facts"].items()
}

NEEDLE_TEMPLATES: tuple[FactTemplate, ...] = tuple(_FACTS[name] for name in _TEXTS["needles"])
TOPIC_TEMPLATES: tuple[TopicTemplate, ...] = tuple(
    TopicTemplate(_FACTS[topic["fact"]], tuple(topic["high_density"]), tuple(topic["low_density"]))
    for topic in _TEXTS["topics"]
)
DEFAULT_FILLER: Filler = tuple(line for line in _TEXTS["filler"].splitlines() if line)


NEEDLE, DELAYED_ASSOCIATION = "needle", "delayed_association"
TASKS = (NEEDLE, DELAYED_ASSOCIATION)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
DENSITIES = ("high", "low")
KVSPEC = "kvspec"
DEV, CONFIRM = "dev", "confirm"
"""Parts of a study: dev samples for free experiments, and confirming samples for the decision about claims."""
_DEV_PERCENT = 20
"""Percentage of contexts that are dev samples."""
MAX_NEW_TOKENS = 50
"""Number of tokens generated for an answer in the paper's configuration."""


@dataclass(frozen=True)
class Sample:
    """Context, and a question about the context.

    Samples with the same context have the same token ids and digest. These samples form one cluster.

    Attributes:
        task: name of the task.
        context_ids: token ids of the context, including the opening token. The length is exactly the requested length.
        question_ids: token ids of the question with the prompt `Answer:`.
        expected: gold answer as text.
        needle: token span `[start, stop)` of the (first piece of) evidence in the context, or `(0, 0)` without
            evidence.
        distractors: spans of facts of the same form with different values.
        metadata: description of the sample for results: template, depth or density, value, number of distractors.
        answer_ids: tokens of the gold answer after the question. Empty if the task measures no likelihood.
        chat_template: `none`, or digest of the chat template whose markers are in context and question.
        metric: metric for `score`, a name of `metrics.METRICS`.
        further: spans of all pieces of evidence after the first.
        references: gold answers for the metric, if not only `expected`.
        choices: labels of a classification.
        history: number of tokens of the question that belong to earlier turns, including gold answers.
        max_new_tokens: number of tokens to generate for the answer.
        dialect: origin of prompt and metric.
    """

    task: str
    context_ids: tuple[int, ...]
    question_ids: tuple[int, ...]
    expected: str
    needle: tuple[int, int]
    distractors: tuple[tuple[int, int], ...] = ()
    metadata: Mapping[str, str | int | float] = field(default_factory=dict)
    answer_ids: tuple[int, ...] = ()
    chat_template: str = NO_TEMPLATE
    metric: str = FIRST_NUMBER
    further: tuple[tuple[int, int], ...] = ()
    references: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    history: int = 0
    max_new_tokens: int = MAX_NEW_TOKENS
    dialect: str = KVSPEC

    @property
    def evidence(self) -> tuple[tuple[int, int], ...]:
        """Token spans `[start, stop)` of all evidence in the context. Empty if there is no specific evidence."""
        return tuple(span for span in (self.needle, *self.further) if span[0] < span[1])

    @property
    def context_digest(self) -> str:
        """SHA-256 of the context's token ids, hexadecimal, which identifies the cluster of the sample."""
        return hashlib.sha256(np.array(self.context_ids, dtype="<i8").tobytes()).hexdigest()

    @property
    def group(self) -> str:
        """Digest of the text that this context shares with different contexts, or the context's own digest."""
        return str(self.metadata.get("group", self.context_digest))

    @property
    def part(self) -> str:
        """Part of a study: DEV or CONFIRM. Contexts that share text belong to the same part."""
        return part_of(self.group)

    @property
    def scored(self) -> bool:
        """False for the continuation of a text, which has no right answer: only the likelihood is measured."""
        continues = self.metric == ROUGE_L and bool(self.answer_ids)
        return bool(self.evidence or self.references) or not continues

    @property
    def length(self) -> int:
        """Number of context tokens."""
        return len(self.context_ids)


def part_of(digest: str) -> str:
    """Return the part to which a context belongs. Only the digest decides, so results cannot influence the part."""
    return (DEV, CONFIRM)[int(digest[:8], 16) % 100 >= _DEV_PERCENT]


def generator(seed: int | Sequence[int]) -> np.random.Generator:
    """Return the random generator of a sample.

    Raises:
        SpecError: if the seed is negative.
    """
    parts = (seed,) if isinstance(seed, int) else tuple(seed)
    if any(part < 0 for part in parts):
        raise SpecError("seed", seed, "must not be negative")
    return np.random.default_rng(np.random.SeedSequence(parts))


def draw_value(rng: np.random.Generator, used: Sequence[int] = ()) -> int:
    """Return a value drawn uniformly from the numbers of four digits without `used`."""
    while True:
        value = _VALUES[int(rng.integers(len(_VALUES)))]
        if value not in used:
            return value


def distractor_anchors(rng: np.random.Generator, template: FactTemplate, count: int, value: int) -> list[Anchor]:
    """Return facts of the same form at random places, with different subjects and values.

    Without distractors, a model can answer with any number in the context. With distractors, the subject must match.

    Raises:
        SpecError: if `count` is negative or larger than the number of distractor subjects.
    """
    most = len(template.other_keys)
    if not 0 <= count <= most:
        raise SpecError("distractors", count, f"must lie in [0, {most}] for the template {template.name!r}")
    used = [value]
    anchors = []
    for index in rng.permutation(most)[:count]:
        used.append(draw_value(rng, used))
        sentence = template.state(used[-1], template.other_keys[int(index)])
        anchors.append(Anchor(sentence, float(rng.random())))
    return anchors


def needle_sample(
    tokenizer: TaskTokenizer, length: int, depth: float, seed: int | Sequence[int], *, distractors: int = 0,
    frame: Frame | None = None,
) -> Sample:
    """Return one sample. Equal arguments give equal samples.

    Args:
        tokenizer: any `transformers` tokenizer.
        length: number of context tokens, including the opening token, without the question.
        depth: fraction of the filler before the fact, in [0, 1]. The fact is inserted at the nearest sentence end.
        seed: seed for `numpy.random.SeedSequence`.
        distractors: number of facts with different subjects and values, at random depths.
        frame: text of a chat template around context and question. Default: no template.

    Raises:
        SpecError: if the depth is outside [0, 1], if the length is too short, or if there are too many distractors.
    """
    if not 0 <= depth <= 1:
        raise SpecError("depth", depth, "must lie in [0, 1]")
    rng = generator(seed)
    template = NEEDLE_TEMPLATES[int(rng.integers(len(NEEDLE_TEMPLATES)))]
    value = draw_value(rng)
    return _assembled(
        NEEDLE, template, value, [Anchor(template.state(value), depth)], {"depth": depth}, rng, length, tokenizer,
        distractors, frame,
    )


def mentions_of(topic: TopicTemplate, density: str) -> tuple[str, ...]:
    """Return the mentions of a topic: four at high density, two at low density.

    Raises:
        SpecError: if the density is unknown.
    """
    pools = {"high": topic.high_density, "low": topic.low_density}
    check_choices("density", (density,), DENSITIES)
    return pools[density]


def spaced(mentions: Sequence[str]) -> list[Anchor]:
    """Return the mentions at places that divide the filler into equal parts."""
    return [Anchor(mention, (i + 1) / (len(mentions) + 1)) for i, mention in enumerate(mentions)]


def delayed_association_sample(
    tokenizer: TaskTokenizer, length: int, density: str, seed: int | Sequence[int], *, distractors: int = 0,
    frame: Frame | None = None,
) -> Sample:
    """Return one sample. Equal arguments give equal samples.

    Args:
        tokenizer, seed, distractors, frame: as in `needle_sample`.
        length: number of context tokens, including the opening token, without the question. The fact follows one
            framing sentence, so the distance between fact and question is almost `length`.
        density: `high` (four mentions of the topic) or `low` (two sentences that mention the topic indirectly).

    Raises:
        SpecError: if the density is unknown, if the length is too short, or if there are too many distractors.
    """
    rng = generator(seed)
    topic = TOPIC_TEMPLATES[int(rng.integers(len(TOPIC_TEMPLATES)))]
    mentions = mentions_of(topic, density)
    value = draw_value(rng)
    anchors = [Anchor(FRAMING_SENTENCE, 0.0), Anchor(topic.fact.state(value), 0.0), *spaced(mentions)]
    return _assembled(
        DELAYED_ASSOCIATION, topic.fact, value, anchors, {"density": density}, rng, length, tokenizer, distractors,
        frame,
    )


def _assembled(
    task: str, fact: FactTemplate, value: int, anchors: Sequence[Anchor], about: Mapping[str, str | float],
    rng: np.random.Generator, length: int, tokenizer: TaskTokenizer, distractors: int, frame: Frame | None,
) -> Sample:
    """Return the sample with these sentences, one of which is the fact, and with distractors, which are drawn here."""
    sentences = [anchor.text for anchor in anchors]
    anchors = [*anchors, *distractor_anchors(rng, fact, distractors, value)]
    frame = frame or bare(tokenizer)
    text = assemble(tokenizer, anchors, DEFAULT_FILLER, length, rng, frame.opening)
    question = joiner(tokenizer) + QUESTION_FRAME.format(question=fact.ask()) + frame.closing
    return Sample(
        task=task, context_ids=text.ids, question_ids=encode(tokenizer, question), chat_template=frame.name,
        expected=str(value), needle=text.spans[sentences.index(fact.state(value))],
        distractors=text.spans[len(sentences) :],
        metadata={"template": fact.name, **about, "value": value, "distractors": distractors},
    )


def draw_sample(
    task: str, tokenizer: TaskTokenizer, length: int, index: int, seed: int, *, distractors: int = 0,
    frame: Frame | None = None,
) -> Sample:
    """Return sample number `index` of a task at one length. The index selects the depth or the density.

    The sample does not depend on the number of samples.

    Raises:
        SpecError: if the task is unknown, if the index is negative, or if the task raises the error.
    """
    if index < 0:
        raise SpecError("index", index, "must not be negative")
    check_choices("task", (task,), TASKS)
    key = (seed, TASKS.index(task), length, index)
    if task == NEEDLE:
        depth = DEPTHS[index % len(DEPTHS)]
        return needle_sample(tokenizer, length, depth, key, distractors=distractors, frame=frame)
    density = DENSITIES[index % len(DENSITIES)]
    return delayed_association_sample(tokenizer, length, density, key, distractors=distractors, frame=frame)


@dataclass(frozen=True)
class Placement:
    """Placement of the question before or after the compaction, as data for `kvspec compare`.

    The prompt without the dropped slots, plus the fed tokens, always equals the context plus the question.

    - `after`: the context is compacted, then the question is read. The budget does not include the question.
    - `in_prompt`: the question is part of the prompt, in the protected window. The question's tokens attend to all
      keys. Only the last token is read again with the compacted cache.
    - `paper`: the question is part of the prompt, and the first answer token is computed from the full cache.

    Attributes:
        name: name of the placement: `after`, `in_prompt` or `paper`.
        prompt_ids: token ids of the prompt that is compacted.
        dropped_slots: number of slots removed from the end of the compacted cache before more tokens are read.
        fed_ids: token ids read with the compacted cache before the answer. If empty, the first answer token is computed
            from the prompt's forward pass.
    """

    name: str
    prompt_ids: tuple[int, ...]
    dropped_slots: int
    fed_ids: tuple[int, ...]


PLACEMENTS = ("after", "in_prompt", "paper")
DEFAULT_PLACEMENT = "after"


def place(sample: Sample, name: str = DEFAULT_PLACEMENT) -> Placement:
    """Return the sample's placement with this name.

    Raises:
        SpecError: if the name is unknown.
    """
    check_choices("placement", (name,), PLACEMENTS)
    if name == "after":
        return Placement(name, sample.context_ids, 0, sample.question_ids)
    whole = sample.context_ids + sample.question_ids
    return Placement(name, whole, 1, sample.question_ids[-1:]) if name == "in_prompt" else Placement(name, whole, 0, ())


def score(tokenizer: TaskTokenizer, answer_ids: Sequence[int], sample: Sample) -> float:
    """Return the score of the generated ids as an answer, from 0 to 1, by the sample's metric.

    Raises:
        SpecError: if the metric is unknown.
    """
    references = sample.references or (sample.expected,)
    return judge(sample.metric, decode(tokenizer, answer_ids), references, sample.choices)
