"""Retrieval tasks: exact lengths and spans, equal samples for equal seeds, and metrics compared with values by hand."""

import string
from collections.abc import Callable
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from experiments.tasks import (
    DENSITIES,
    DEPTHS,
    PLACEMENTS,
    TASKS,
    Sample,
    delayed_association_sample,
    draw_sample,
    needle_sample,
    place,
)
from experiments.tasks.assembly import assemble
from experiments.tasks.context import Ground, Prose
from experiments.tasks.metrics import METRICS, judge
from experiments.tasks.needle import DEFAULT_FILLER, NEEDLE_TEMPLATES, TOPIC_TEMPLATES, mentions_of
from models_integration.model.frame import frame_of, opening_ids
from spec.errors import SpecError

pytestmark = pytest.mark.law("as-it-is-described")


def _texts() -> list[str]:
    facts = [template.state(1234567890, key) for template in NEEDLE_TEMPLATES for key in template.other_keys]
    facts += [template.state(1234567890) for template in NEEDLE_TEMPLATES]
    topics = [text for topic in TOPIC_TEMPLATES for text in topic.high_density + topic.low_density]
    return [*facts, *topics, *DEFAULT_FILLER, *(topic.fact.state(1, "X") for topic in TOPIC_TEMPLATES)]


def _fast(tokenizer: Tokenizer, **special: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)  # type: ignore[no-untyped-call]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each byte and no token before the text."""
    alphabet = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _fast(tokenizer)


def merged_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with merges across the texts and an opening token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=alphabet, special_tokens=["<s>"], show_progress=False
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return _fast(tokenizer, bos_token="<s>")


def metaspace_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of single letters that adds a space before every text, as SentencePiece models do."""
    letters = ["▁", *sorted(set(string.printable) | {"’"})]
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), *((letter, -5.0) for letter in letters)], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return _fast(tokenizer, unk_token="<unk>")


TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "bytes": byte_tokenizer,
    "merged": merged_tokenizer,
    "metaspace": metaspace_tokenizer,
}


@pytest.fixture(scope="module", params=sorted(TOKENIZERS))
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return TOKENIZERS[request.param]()


TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}[/]{% endfor %}[assistant]"


def chatting_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = merged_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def ground_of(tokenizer: Any, prose: Prose | None = None) -> Ground:
    """Return a ground with the frame of the tokenizer's chat template, if there is one."""
    return Ground(tokenizer, prose or Prose("none", (), ()), frame_of(tokenizer))


def text_of(ground: Ground, ids: tuple[int, ...]) -> str:
    return str(ground.tokenizer.decode(list(ids), skip_special_tokens=True))


def prompt(ground: Ground, sample: Sample) -> str:
    return text_of(ground, sample.context_ids) + text_of(ground, sample.question_ids)


def _decoded(tokenizer: PreTrainedTokenizerFast, sample: Sample, span: tuple[int, int]) -> str:
    return str(tokenizer.decode(list(sample.context_ids[slice(*span)]))).strip()


def _template_of(sample: Sample) -> str:
    return str(sample.metadata["template"])


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [1024, 1025, 1031, 2048, 4096])
def test_the_needle_span_decodes_to_the_fact_and_the_fact_stands_once(
    tokenizer: PreTrainedTokenizerFast, task: str, length: int
) -> None:
    """Check contexts of exact lengths, with and without distractors."""
    templates = {t.name: t for t in (*NEEDLE_TEMPLATES, *(topic.fact for topic in TOPIC_TEMPLATES))}
    for index, distractors in product(range(5), (0, 3)):
        sample = draw_sample(task, tokenizer, length, index, seed=5, distractors=distractors)
        assert sample.length == len(sample.context_ids) == length
        template = templates[_template_of(sample)]
        fact = template.state(sample.expected)
        assert _decoded(tokenizer, sample, sample.needle) == fact
        text = str(tokenizer.decode(list(sample.context_ids), skip_special_tokens=True))
        assert text.count(fact) == 1
        assert text.count(sample.expected) == 1
        assert "  " not in text
        others = [_decoded(tokenizer, sample, span) for span in sample.distractors]
        assert len(set(others)) == distractors
        assert all(other != fact for other in others)
        question = str(tokenizer.decode(list(sample.question_ids))).strip()
        assert question == f"Question: {template.ask()} Answer:"


def test_the_same_seed_gives_the_same_sample_and_another_seed_another(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    for task in TASKS:
        first = draw_sample(task, tokenizer, 1200, 2, seed=42)
        assert first == draw_sample(task, tokenizer, 1200, 2, seed=42)
        assert first != draw_sample(task, tokenizer, 1200, 2, seed=43)
        assert first != draw_sample(task, tokenizer, 1200, 3, seed=42)


def test_the_depth_is_kept_to_within_a_sentence(tokenizer: PreTrainedTokenizerFast) -> None:
    longest = max(len(tokenizer.encode(" " + text, add_special_tokens=False)) for text in DEFAULT_FILLER)
    for depth in DEPTHS:
        sample = needle_sample(tokenizer, 4096, depth, seed=1)
        opening = len(opening_ids(tokenizer))
        start, stop = sample.needle
        space = sample.length - opening - (stop - start)
        assert abs((start - opening) - depth * space) <= longest
        assert depth > 0 or start == opening
        assert depth < 1 or stop == 4096


def test_long_contexts_are_made_of_whole_sentences(tokenizer: PreTrainedTokenizerFast) -> None:
    known = set(DEFAULT_FILLER)
    for index in range(5):
        sample = draw_sample("needle", tokenizer, 2048, index, seed=9)
        start, stop = sample.needle
        rest = sample.context_ids[:start] + sample.context_ids[stop:]
        text = str(tokenizer.decode(list(rest), skip_special_tokens=True)).strip()
        assert {sentence.strip() + "." for sentence in text.split(".") if sentence.strip()} <= known


@pytest.mark.parametrize("density", DENSITIES)
def test_mentions_are_spaced_uniformly_and_follow_the_fact(density: str) -> None:
    tokenizer = merged_tokenizer()
    topics = {topic.fact.name: topic for topic in TOPIC_TEMPLATES}
    for seed in range(12):
        sample = delayed_association_sample(tokenizer, 4096, density, seed)
        mentions = mentions_of(topics[_template_of(sample)], density)
        text = str(tokenizer.decode(list(sample.context_ids)))
        fact = str(tokenizer.decode(list(sample.context_ids[slice(*sample.needle)]))).strip()
        places = [text.index(fact), *(text.index(mention) for mention in mentions), len(text)]
        assert text.index(fact) < 120
        gaps = np.diff(places)
        assert len(gaps) == len(mentions) + 1
        assert gaps.max() - gaps.min() < 0.15 * len(text)


def test_values_are_uniform_over_the_four_digit_numbers() -> None:
    tokenizer = merged_tokenizer()
    values = [int(needle_sample(tokenizer, 60, 0.0, seed).expected) for seed in range(900)]
    assert min(values) >= 1000
    assert max(values) <= 9999
    counts = np.bincount(np.array(values) // 1000, minlength=10)[1:]
    # Chi-square with 8 degrees of freedom: 26.1 is its 0.999 quantile.
    assert ((counts - 100) ** 2 / 100).sum() < 26.1


@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize("task", TASKS)
def test_placements_partition_the_tokens(name: str, task: str) -> None:
    sample = draw_sample(task, merged_tokenizer(), 300, 1, seed=0)
    placed = place(sample, name)
    kept = placed.prompt_ids[: len(placed.prompt_ids) - placed.dropped_slots]
    assert kept + placed.fed_ids == sample.context_ids + sample.question_ids
    assert placed.name == name
    hidden = placed == place(sample)  # True if the question is hidden from the compaction.
    assert placed.prompt_ids == sample.context_ids + (() if hidden else sample.question_ids)
    assert hidden is (name == "after")


BAD: dict[str, Callable[[PreTrainedTokenizerFast], object]] = {
    "depth": lambda t: needle_sample(t, 300, 1.5, 0),
    "depth below": lambda t: needle_sample(t, 300, -0.1, 0),
    "depth nan": lambda t: needle_sample(t, 300, float("nan"), 0),
    "length": lambda t: needle_sample(t, 5, 0.5, 0),
    "length of association": lambda t: delayed_association_sample(t, 40, "high", 0),
    "length zero": lambda t: needle_sample(t, 0, 0.5, 0),
    "density": lambda t: delayed_association_sample(t, 300, "medium", 0),
    "distractors": lambda t: needle_sample(t, 300, 0.5, 0, distractors=99),
    "distractors below": lambda t: needle_sample(t, 300, 0.5, 0, distractors=-1),
    "filler": lambda t: assemble(t, [], (), 300, np.random.default_rng(0)),
    "seed": lambda t: needle_sample(t, 300, 0.5, -1),
    "task": lambda t: draw_sample("haystack", t, 300, 0, 0),
    "index": lambda t: draw_sample("needle", t, 300, -1, 0),
    "placement": lambda t: place(needle_sample(t, 300, 0.5, 0), "before"),
}


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize("case", sorted(BAD))
def test_bad_input_is_a_named_error(case: str) -> None:
    with pytest.raises(SpecError) as caught:
        BAD[case](merged_tokenizer())
    assert caught.value.argument == case.split()[0]


FRANCE = ("France", "in France", "the French kingdom")

CASES: list[tuple[str, str, tuple[str, ...], tuple[str, ...], float]] = [
    # RULER: the fraction of one sample's references that occur in the answer, in lower or upper case.
    ("string_match_all", "It was in FRANCE.", FRANCE, (), 2 / 3),
    # One reference is enough. lm-eval gives 0.667, NVIDIA 1.0.
    ("string_match_part", "It was in FRANCE.", FRANCE, (), 1),
    ("string_match_part", "Italy", FRANCE, (), 0),
    ("string_match_all", "1234567\x00 and 7654321", ("1234567", "7654321"), (), 1),
    ("string_match_all", "new\x0bline", ("new\nline",), (), 1),  # Control characters become line ends.
    ("string_match_all", "newline", ("new\nline",), (), 0),
    # SCBench
    ("contains", 'the value is "4711".', ("4711",), (), 1),
    ("contains", "Abc", ("abc",), (), 0),
    ("names found", "AAAAA CCCCC", ("AAAAA", "BBBBB", "CCCCC"), (), 0.67),
    ("names found", "aaaaa", ("AAAAA",), (), 1),  # SCBench compares in lower case.
    # A substring test would accept a longer number, and any list of guesses that contains the value.
    *(("first number", answer, ("7492",), (), 1) for answer in (
        "7492", " 7492.", "It is 7492 degrees.", "7492\n\nQuestion: 1", "The code is **7492**, not 3058.", "_7492_",
    )),
    *(("first number", answer, ("7492",), (), 0) for answer in (
        "", "It is 749 2.", "It is 17492.", "74921", "7492.5", "17,492", "-7492", "A7492", "3058, 1111, 7492",
        "It is not 3058 but 7492.", "7,492",
    )),
    ("boxed number", r"7 + 5 = 12. \boxed{ 1,012 } and \boxed{3}", ("1012",), (), 1),  # The first box counts.
    ("boxed number", "The result is 1012.", ("1012",), (), 0),
    ("boxed, by math-verify", r"It is \boxed{\frac{1}{2}}.", ("0.5",), (), 1),
    ("boxed, by math-verify", r"\boxed{3\sqrt{13}}", (r"\sqrt{117}",), (), 1),
    ("boxed, by math-verify", r"\boxed{12} or \boxed{13}", ("13",), (), 0),
    ("boxed, by math-verify", "It is 13.", ("13",), (), 0),
    # Options of InfiniteBench.
    ("option letter", "The option B: parse, not C.", ("B",), (), 1),
    ("option letter", "Both C and B", ("B",), (), 0),
    ("option letter", "Because", ("B",), (), 0),
    # LongBench qa_f1: {cat, sat, on, mat} and {cat, on, mat}: precision 3/4, recall 1, F1 = 6/7.
    ("qa_f1", "The cat sat on a mat!", ("cat on the mat",), (), 6 / 7),
    # Repeated tokens count as often as both texts have them: 2 common tokens of 3 and 2, F1 = 4/5.
    ("qa_f1", "dog dog dog", ("dog dog",), (), 4 / 5),
    ("qa_f1", "paris", ("london", "in paris"), (), 2 / 3),
    ("qa_f1", "", ("london",), (), 0),
    ("qa_f1 of a line", "\nparis\nlondon", ("paris",), (), 1),
    # LoCoMo: {he, paint, poni} and {he, paint, two, poni} after stems and without "and" and articles: F1 = 6/7.
    ("locomo_f1", "He painted, and the ponies", ("he paints two pony",), (), 6 / 7),
    ("locomo_f1", "and", ("the and",), (), 0),
    # Of the parts "ponies" and "blue cats", the best answers have F1 1 and 2/3.
    ("locomo_f1 of parts", "a pony, cat", ("ponies, blue cats",), (), 5 / 6),
    # Questions of users: words as in SQuAD, in lower case without articles and punctuation. "exact" reads the first
    # line.
    *(("exact words of a line", written, ("the Old Mill", "mill"), (), right) for written, right in (
        ("An old mill.\nBut", 1), ("MILL", 1), ("old mills", 0), ("It is the old mill", 0), ("", 0),
    )),
    ("exact words of a line", "!", ("!",), (), 1),
    ("exact words of a line", "", ("!",), (), 0),
    *(("contains the words", written, ("old mill",), (), right) for written, right in (
        ("It is\nthe Old Mill!", 1), ("the old, mill", 1), ("the old stone mill", 0), ("old millstone", 0), ("", 0),
    )),
    ("contains the words", "a ? b", ("?",), (), 1),
    ("regular expression", "It is 17,492 m.", (r"\d+,\d{3}\b",), (), 1),
    ("regular expression", "It is 174 m.", (r"\d+,\d{3}\b", "^175"), (), 0),
    # Words a b c d and a x b d of one sentence have the subsequence a b d: precision and recall are 3/4.
    ("rouge_l", "a b c d", ("a x b d",), (), 3 / 4),
    # As sets, the reference is {a, b} and the answer {a}: precision 1, recall 1/2.
    ("rouge_l", "a a a", ("a b",), (), 2 / 3),
    # The answer has two sentences. The union of both subsequences is {a, b, d, e} of the reference's five words: recall
    # 4/5, precision 4/6.
    ("rouge_l", "a b x. d e y", ("a b c d e",), (), 8 / 11),
    ("rouge_l", "", ("a b",), (), 0),
    ("rouge_l", ".", ("a b",), (), 0),
    ("rouge_l of a line", "a b\nc d", ("a b",), (), 1),
    # The answer names two labels, one of which is true.
    ("classification", "Location or Person", ("Person",), ("Location", "Person", "Date"), 1 / 2),
    # A label that is a part of the true one does not count.
    ("classification", "Human being", ("Human being",), ("Human", "Human being"), 1),
    ("classification", "Person\nLocation", ("Person",), ("Location", "Person"), 1),  # Only the first line counts.
    ("classification", "Person", ("Date",), ("Date", "Person"), 0),
    # One of two numbers is the paragraph's number.
    ("retrieval", "Paragraph 12, perhaps 13", ("Paragraph 12",), (), 1 / 2),
    ("retrieval", "none", ("Paragraph 12",), (), 0),
    ("count", "3 or 4 or 3", ("3",), (), 2 / 3),
    ("count", "three", ("3",), (), 0),
    # difflib: "abcd" and "bcde" share a block of 3 of 8 letters: 2 * 3 / 8 = 0.75.
    ("code_similarity", "\n```\n# note\nabcd\nzzz", ("bcde",), (), 3 / 4),
    # For the documented example of difflib, the ratio is 0.75. Here it is 2 * 2 / 6 = 0.666..., in whole percents 0.67.
    ("code_similarity", "abx", ("aby",), (), 0.67),
    ("code_similarity", "# only a note", ("x = 1",), (), 0),
]


@pytest.mark.law("figures-are-counted-right")
@pytest.mark.parametrize(("metric", "answer", "references", "choices", "wanted"), CASES)
def test_a_metric_is_what_hand_and_definition_give(
    metric: str, answer: str, references: tuple[str, ...], choices: tuple[str, ...], wanted: float
) -> None:
    # rouge adds 1e-8 in a denominator.
    assert judge(metric, answer, references, choices) == pytest.approx(wanted, abs=2e-8)


@pytest.mark.law("figures-are-counted-right")
def test_every_metric_has_a_case_and_a_perfect_answer_scores_one() -> None:
    assert {case[0] for case in CASES} == set(METRICS)
    for metric in METRICS:
        truth = {"retrieval": "Paragraph 7", "option letter": "D"}.get(metric, "7")
        answer = r"\boxed{7}" if metric.startswith("boxed") else truth
        assert judge(metric, answer, (truth,), (truth, "other")) == pytest.approx(1, abs=2e-8)
        assert judge(metric, "nothing at all", (truth,), (truth, "other")) == 0


@pytest.mark.law("figures-are-counted-right")
def test_rouge_l_of_one_sentence_is_the_longest_common_subsequence_by_trying_all() -> None:
    """Compare with all subsequences, for sentences of distinct words. Then the words are a set."""
    from itertools import combinations, permutations

    reference = "abcde"
    for answer in permutations("abcxy", 4):
        longest = max(
            size for size in range(5) if set(combinations(answer, size)) & set(combinations(reference, size))
        )
        wanted = Fraction(2 * longest, len(answer) + len(reference))
        assert judge("rouge_l", " ".join(answer), (" ".join(reference),)) == pytest.approx(float(wanted), abs=2e-8)


@pytest.mark.law("refused-before-anything-changes")
def test_an_unknown_metric_is_refused_by_name() -> None:
    with pytest.raises(SpecError) as caught:
        judge("bleu", "a", ("a",))
    assert caught.value.argument == "metric"
