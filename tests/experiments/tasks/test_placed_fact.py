"""The task `placed_fact`: only place and mentions vary, no eight tokens repeat, and the parts share no text."""

import re
from collections import Counter
from itertools import product

import pytest

from experiments.tasks import Sample
from experiments.tasks.context import Ground, read_prose
from experiments.tasks.needle import CONFIRM, DEV, part_of
from experiments.tasks.placed_fact import COMMON, FACT_DEPTHS, MENTIONS, NGRAM, PLACED_TOPICS
from experiments.tasks.registry import resolve_task
from models_integration.model.frame import frame_of
from spec.errors import SpecError

pytestmark = pytest.mark.law("as-it-is-described")

LENGTH, WINDOWS = 700, 24


class Words:
    """Tokenizer with a token for each word and punctuation mark."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [self.ids.setdefault(word, len(self.ids)) for word in re.findall(r"\w+|[^\w\s]", text)]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        words = list(self.ids)
        return " ".join(words[token] for token in token_ids)


@pytest.fixture(scope="module")
def ground() -> Ground:
    tokenizer = Words()
    return Ground(tokenizer, read_prose(tokenizer), frame_of(tokenizer))


@pytest.fixture(scope="module")
def samples(ground: Ground) -> dict[tuple[int, float, str], Sample]:
    cells = product(range(WINDOWS), FACT_DEPTHS, MENTIONS)
    return {cell: _sample(ground, *cell) for cell in cells}


def _sample(ground: Ground, index: int, depth: float, mentions: str) -> Sample:
    (sample,) = resolve_task(f'placed_fact(depth={depth}, mentions="{mentions}")')(ground, LENGTH, index, 3)
    return sample


def _grams(ids: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [ids[at : at + NGRAM] for at in range(len(ids) - NGRAM + 1)]


def test_no_context_repeats_eight_tokens(samples: dict[tuple[int, float, str], Sample]) -> None:
    for cell, sample in samples.items():
        assert len(set(_grams(sample.context_ids))) == len(_grams(sample.context_ids)), cell


def test_dev_and_confirming_samples_share_no_filler(
    ground: Ground, samples: dict[tuple[int, float, str], Sample],
) -> None:
    """Sentences of the topics and the framing sentence occur in both parts, but filler never does."""
    sentences = [topic.fact.fact for topic in PLACED_TOPICS]
    sentences += [sentence for topic in PLACED_TOPICS for sentence in (*topic.high_density, *topic.low_density)]
    words = {ground.tokenizer.encode(word, add_special_tokens=False)[0] for line in sentences for word in line.split()}
    parts = {part: set[tuple[int, ...]]() for part in (DEV, CONFIRM)}
    for sample in samples.values():
        parts[sample.part].update(_grams(sample.context_ids))
    shared = parts[DEV] & parts[CONFIRM]
    prose = set(_grams(ground.prose.tokens))
    assert min(map(len, parts.values())) > LENGTH
    assert not [gram for gram in shared if gram in prose]
    assert all(words.intersection(gram) for gram in shared)


def test_samples_of_a_window_differ_only_in_place_and_mentions(
    samples: dict[tuple[int, float, str], Sample],
) -> None:
    for index in range(WINDOWS):
        cells = {cell[1:]: sample for cell, sample in samples.items() if cell[0] == index}
        assert len({(one.question_ids, one.answer_ids, one.part, one.group) for one in cells.values()}) == 1
        for mentions in MENTIONS:
            alike = [cells[depth, mentions] for depth in FACT_DEPTHS]
            assert len({tuple(sorted(one.context_ids)) for one in alike}) == 1
            starts = [one.needle[0] for one in alike]
            assert starts == sorted(set(starts))
        assert part_of(cells[0.0, "none"].group) == cells[0.0, "none"].part


def test_a_topic_is_named_as_often_as_its_kind_says(
    ground: Ground, samples: dict[tuple[int, float, str], Sample],
) -> None:
    for (index, _, mentions), sample in samples.items():
        topic = PLACED_TOPICS[index % len(PLACED_TOPICS)]
        assert sample.metadata["template"] == topic.fact.name
        text = "".join(ground.tokenizer.decode(list(sample.context_ids), skip_special_tokens=True)).replace(" ", "")
        named = {
            kind: sum(line.replace(" ", "") in text for line in lines)
            for kind, lines in (("high", topic.high_density), ("low", topic.low_density))
        }
        assert named == {"high": 4 * (mentions == "high"), "low": 2 * (mentions == "low")}


def test_there_are_at_least_ten_templates_without_digits() -> None:
    assert len({topic.fact.name for topic in PLACED_TOPICS}) == len(PLACED_TOPICS) >= 10
    for topic in PLACED_TOPICS:
        text = " ".join([topic.fact.fact, topic.fact.question, *topic.high_density, *topic.low_density])
        assert not re.search(r"\d", text)


def test_each_word_of_a_place_is_common_in_the_text(ground: Ground) -> None:
    """Check that no word of the value is rare, and that only the place of the fact varies."""
    for index in range(WINDOWS):
        each = [
            resolve_task(f'placed_fact(depth={depth}, mentions="none", value="words")')(ground, 2 * LENGTH, index, 3)[0]
            for depth in FACT_DEPTHS
        ]
        for sample in each:
            (start, stop), = sample.evidence
            rest = Counter(sample.context_ids[:start] + sample.context_ids[stop:])
            assert min(rest[token] for token in ground.follow(sample.expected)) >= COMMON
            assert len(set(_grams(sample.context_ids))) == len(_grams(sample.context_ids))
        assert len({(one.answer_ids, one.part, one.group) for one in each}) == 1
        assert len({one.needle for one in each}) == len(FACT_DEPTHS)
        (number,) = resolve_task("placed_fact(mentions=\"none\")")(ground, 2 * LENGTH, index, 3)
        assert each[0].group != number.group


@pytest.mark.parametrize("constants", [
    "depth=1.5", 'mentions="often"', 'value="letters"', 'mentions="high", value="words"',
])
def test_unknown_constants_are_refused(ground: Ground, constants: str) -> None:
    with pytest.raises(SpecError, match=constants.partition("=")[0]):
        resolve_task(f"placed_fact({constants})")(ground, LENGTH, 0, 0)
