"""Samples of the two retrieval tasks, seeded and token-exact; when their question is read; what answers it.

- `needle`, needle-in-a-haystack as in Section 4.2: one critical fact at a controlled depth of a long filler passage.
- `delayed_association` (Appendix B): a fact at the beginning, then filler that keeps mentioning its topic.
"""

import hashlib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from models_integration.tasks.assembly import (
    Anchor,
    FactTemplate,
    Filler,
    TaskTokenizer,
    TopicTemplate,
    assemble,
    decode,
    encode,
    joiner,
)
from models_integration.tasks.chat import NO_TEMPLATE, Frame, bare
from models_integration.tasks.metrics import FIRST_NUMBER, judge
from spec.errors import SpecError

__all__ = [
    "ALL_VALUES",
    "CONFIRM",
    "DEFAULT_FILLER",
    "DEFAULT_PLACEMENT",
    "DELAYED_ASSOCIATION",
    "DENSITIES",
    "DEPTHS",
    "DEV",
    "FRAMING_SENTENCE",
    "MAX_NEW_TOKENS",
    "NEEDLE",
    "NEEDLE_TEMPLATES",
    "PLACEMENTS",
    "QUESTION_FRAME",
    "TASKS",
    "TOPIC_TEMPLATES",
    "Placement",
    "Sample",
    "delayed_association_sample",
    "distractor_anchors",
    "draw_sample",
    "draw_value",
    "generator",
    "mentions_of",
    "needle_sample",
    "part_of",
    "place",
    "score",
    "spaced",
]

ALL_VALUES = range(1000, 10_000)
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
OWN = "kvspec"
DEV, CONFIRM = "dev", "confirm"
"""The parts of a study: samples on which anything may be tried, and samples that decide claims."""
_DEV_PERCENT = 20
"""Contexts of 100 that are dev samples."""
MAX_NEW_TOKENS = 50
"""Tokens generated for an answer in the paper's configuration."""


@dataclass(frozen=True)
class Sample:
    """A context and a question about it.

    Samples of one context share its token ids, and so its digest: they are one cluster.

    Attributes:
        task: its name.
        context_ids: token ids of the context, exactly as many as were asked for, opening token included.
        question_ids: token ids of the question with its `Answer:` prompt.
        expected: the gold answer as text.
        needle: the token span `[start, stop)` of the evidence in the context, of the first piece where there are
            several; `(0, 0)` where no piece of it holds the answer.
        distractors: spans of facts of the same form that carry other values.
        metadata: what describes the sample in a result: template, depth or density, value, number of distractors.
        answer_ids: tokens of the gold answer right behind the question; none where the task has no likelihood.
        chat_template: `none`, or the digest of the tokenizer's own, whose markers then stand in context and question.
        metric: how `score` judges an answer, a name of `metrics.METRICS`.
        further: spans of the other pieces of evidence.
        references: what the metric looks for, where that is not `expected` alone.
        choices: the labels of a classification.
        history: how many of the question's tokens are earlier turns, their gold answers with them.
        max_new_tokens: tokens to generate for the answer.
        dialect: whose prompt and metric these are.
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
    dialect: str = OWN

    @property
    def evidence(self) -> tuple[tuple[int, int], ...]:
        """Token spans `[start, stop)` of all that the answer needs of the context; none if nothing in particular."""
        return tuple(span for span in (self.needle, *self.further) if span[0] < span[1])

    @property
    def context_digest(self) -> str:
        """SHA-256 of the context's token ids, hexadecimal: which cluster the sample belongs to."""
        return hashlib.sha256(np.array(self.context_ids, dtype="<i8").tobytes()).hexdigest()

    @property
    def length(self) -> int:
        """Number of context tokens."""
        return len(self.context_ids)


def part_of(context_digest: str) -> str:
    """The part that a context belongs to: its digest decides, so that no result can."""
    return (DEV, CONFIRM)[int(context_digest[:8], 16) % 100 >= _DEV_PERCENT]


def generator(seed: int | Sequence[int]) -> np.random.Generator:
    """The generator of a sample.

    Raises:
        SpecError: for a negative seed.
    """
    parts = (seed,) if isinstance(seed, int) else tuple(seed)
    if any(part < 0 for part in parts):
        raise SpecError("seed", seed, "must not be negative")
    return np.random.default_rng(np.random.SeedSequence(parts))


def draw_value(rng: np.random.Generator, values: Sequence[int], used: Sequence[int] = ()) -> int:
    """A value drawn uniformly from `values` without those in `used`.

    Raises:
        SpecError: when every value is used up.
    """
    if len(set(values) - set(used)) == 0:
        raise SpecError("values", len(values), f"must have more than the {len(used)} values that are already used")
    while True:
        value = int(values[int(rng.integers(len(values)))])
        if value not in used:
            return value


def distractor_anchors(
    rng: np.random.Generator, template: FactTemplate, count: int, value: int, values: Sequence[int]
) -> list[Anchor]:
    """Facts of the same form at random places, with distinct subjects and distinct values.

    Without them a model may answer with any number it has seen; with them it must know whose value is asked for.

    Raises:
        SpecError: when `count` is negative or larger than the number of other subjects.
    """
    most = len(template.other_keys)
    if not 0 <= count <= most:
        raise SpecError("distractors", count, f"must lie in [0, {most}] for the template {template.name!r}")
    used = [value]
    anchors = []
    for index in rng.permutation(most)[:count]:
        used.append(draw_value(rng, values, used))
        sentence = template.state(used[-1], template.other_keys[int(index)])
        anchors.append(Anchor(sentence, float(rng.random())))
    return anchors


def needle_sample(
    tokenizer: TaskTokenizer, length: int, depth: float, seed: int | Sequence[int], *,
    filler: Filler = DEFAULT_FILLER, distractors: int = 0, values: Sequence[int] = ALL_VALUES,
    frame: Frame | None = None,
) -> Sample:
    """One sample; the same arguments always give the same one.

    Args:
        tokenizer: any `transformers` tokenizer.
        length: context tokens, the opening token included and the question excluded.
        depth: share of the filler before the needle, in [0, 1]; moved to the nearest end of a sentence.
        seed: anything that `numpy.random.SeedSequence` takes.
        filler: sentences that the context is filled with.
        distractors: facts of the same form about other subjects, with other values, at random depths.
        values: what the value is drawn from, uniformly.
        frame: what a chat template puts around context and question; by default bare text.

    Raises:
        SpecError: for a depth outside [0, 1], a length too short for the sentences, or too many distractors.
    """
    if not 0 <= depth <= 1:
        raise SpecError("depth", depth, "must lie in [0, 1]")
    rng = generator(seed)
    template = NEEDLE_TEMPLATES[int(rng.integers(len(NEEDLE_TEMPLATES)))]
    value = draw_value(rng, values)
    anchors = [Anchor(template.state(value), depth)]
    anchors += distractor_anchors(rng, template, distractors, value, values)
    frame = frame or bare(tokenizer)
    text = assemble(tokenizer, anchors, filler, length, rng, frame.opening)
    return Sample(
        task=NEEDLE,
        context_ids=text.ids,
        question_ids=_question(tokenizer, template, frame),
        chat_template=frame.name,
        expected=str(value),
        needle=text.spans[0],
        distractors=text.spans[1:],
        metadata={"template": template.name, "depth": depth, "value": value, "distractors": distractors},
    )


def mentions_of(topic: TopicTemplate, density: str) -> tuple[str, ...]:
    """The mentions of a topic: four at high density, two at low.

    Raises:
        SpecError: for an unknown density.
    """
    pools = {"high": topic.high_density, "low": topic.low_density}
    if density not in pools:
        raise SpecError("density", density, f"must be one of {', '.join(DENSITIES)}")
    return pools[density]


def spaced(mentions: Sequence[str]) -> list[Anchor]:
    """The mentions, placed so that they cut the filler into equal parts."""
    return [Anchor(mention, (i + 1) / (len(mentions) + 1)) for i, mention in enumerate(mentions)]


def delayed_association_sample(
    tokenizer: TaskTokenizer, length: int, density: str, seed: int | Sequence[int], *,
    filler: Filler = DEFAULT_FILLER, distractors: int = 0, values: Sequence[int] = ALL_VALUES,
    frame: Frame | None = None,
) -> Sample:
    """One sample; the same arguments always give the same one.

    Args:
        tokenizer, seed, filler, distractors, values, frame: as `needle_sample`'s.
        length: context tokens, the opening token included and the question excluded. The fact stands after
            one framing sentence, so this is the distance between fact and question but for that sentence.
        density: `high` (four mentions of the topic) or `low` (two sentences that only touch it).

    Raises:
        SpecError: for an unknown density, a length too short for the sentences, or too many distractors.
    """
    rng = generator(seed)
    topic = TOPIC_TEMPLATES[int(rng.integers(len(TOPIC_TEMPLATES)))]
    mentions = mentions_of(topic, density)
    value = draw_value(rng, values)
    anchors = [Anchor(FRAMING_SENTENCE, 0.0), Anchor(topic.fact.state(value), 0.0), *spaced(mentions)]
    first_distractor = len(anchors)
    anchors += distractor_anchors(rng, topic.fact, distractors, value, values)
    frame = frame or bare(tokenizer)
    text = assemble(tokenizer, anchors, filler, length, rng, frame.opening)
    return Sample(
        task=DELAYED_ASSOCIATION,
        context_ids=text.ids,
        question_ids=_question(tokenizer, topic.fact, frame),
        chat_template=frame.name,
        expected=str(value),
        needle=text.spans[1],
        distractors=text.spans[first_distractor:],
        metadata={"template": topic.fact.name, "density": density, "value": value, "distractors": distractors},
    )


def _question(tokenizer: TaskTokenizer, fact: FactTemplate, frame: Frame) -> tuple[int, ...]:
    """The question about a fact, and what the chat template has behind it."""
    return encode(tokenizer, joiner(tokenizer) + QUESTION_FRAME.format(question=fact.ask()) + frame.closing)


def draw_sample(
    task: str, tokenizer: TaskTokenizer, length: int, index: int, seed: int, *,
    filler: Filler = DEFAULT_FILLER, distractors: int = 0, values: Sequence[int] = ALL_VALUES,
    frame: Frame | None = None,
) -> Sample:
    """Sample number `index` of many of one task at one length; depths or densities take turns over the index.

    It does not depend on how many samples there are.

    Raises:
        SpecError: for an unknown task, a negative index, and what the task itself refuses.
    """
    if index < 0:
        raise SpecError("index", index, "must not be negative")
    key = (seed, TASKS.index(task) if task in TASKS else -1, length, index)
    if task == NEEDLE:
        depth = DEPTHS[index % len(DEPTHS)]
        return needle_sample(
            tokenizer, length, depth, key, filler=filler, distractors=distractors, values=values, frame=frame
        )
    if task == DELAYED_ASSOCIATION:
        density = DENSITIES[index % len(DENSITIES)]
        return delayed_association_sample(
            tokenizer, length, density, key, filler=filler, distractors=distractors, values=values, frame=frame
        )
    raise SpecError("task", task, f"must be one of {', '.join(TASKS)}")


@dataclass(frozen=True)
class Placement:
    """When the question is read, before the compaction or after it, as data; `kvspec compare` carries it out.

    The prompt without its dropped slots, followed by the fed tokens, is always the context followed by the question.

    - `after`: the context is compacted, then the question is read uncompressed beside the budget.
    - `in_prompt`: the question stands in the prompt, in the protected window, and its earlier tokens have read evicted
      keys; only the last one is read again through the compacted cache.
    - `paper`: the question stands in the prompt, and the first answer token comes from the uncompacted prefill.

    Attributes:
        name: `after`, `in_prompt` or `paper`.
        prompt_ids: tokens of the forward that is compacted.
        dropped_slots: slots removed from the end of the compacted cache before anything is fed.
        fed_ids: tokens then read through the compacted cache; the answer starts after the last of them. Where there are
            none, its first token is read from the prompt's own forward.
    """

    name: str
    prompt_ids: tuple[int, ...]
    dropped_slots: int
    fed_ids: tuple[int, ...]


def _after(sample: Sample) -> Placement:
    return Placement("after", sample.context_ids, 0, sample.question_ids)


def _in_prompt(sample: Sample) -> Placement:
    return Placement("in_prompt", sample.context_ids + sample.question_ids, 1, sample.question_ids[-1:])


def _paper(sample: Sample) -> Placement:
    return Placement("paper", sample.context_ids + sample.question_ids, 0, ())


_MAKERS = {"after": _after, "in_prompt": _in_prompt, "paper": _paper}
PLACEMENTS = tuple(_MAKERS)
DEFAULT_PLACEMENT = "after"


def place(sample: Sample, name: str = DEFAULT_PLACEMENT) -> Placement:
    """The sample in the placement of that name.

    Raises:
        SpecError: for an unknown name.
    """
    if name not in _MAKERS:
        raise SpecError("placement", name, f"must be one of {', '.join(PLACEMENTS)}")
    return _MAKERS[name](sample)


def score(tokenizer: TaskTokenizer, answer_ids: Sequence[int], sample: Sample) -> float:
    """How good the generated ids are as an answer, from 0 to 1, by the sample's metric.

    Raises:
        SpecError: for an unknown metric.
    """
    references = sample.references or (sample.expected,)
    return judge(sample.metric, decode(tokenizer, answer_ids), references, sample.choices)
