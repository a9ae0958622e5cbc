"""Prompts of RULER v1, letter for letter: each is parsed by the official template and checked against its rules.

The templates are those of NVIDIA/RULER `scripts/data/synthetic/constants.py` (Apache-2.0). The rules are a second
implementation of the rules in the generators of the same folder.

Tasks in running text: exact lengths, evidence at the stated place, windows that do not repeat, chat templates.
"""

import random
import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from experiments.tasks import Sample
from experiments.tasks.context import NARRATIVE, Ground, Prose, read_prose
from experiments.tasks.in_prose import keys_in_prose_samples
from experiments.tasks.key_values import key_value_samples
from experiments.tasks.registry import resolve_task
from models_integration.model.frame import chat
from spec.errors import SpecError
from spec.files import read_text
from tests.experiments.tasks.test_tasks import TOKENIZERS, chatting_tokenizer, ground_of, merged_tokenizer, prompt

pytestmark = pytest.mark.law("as-it-is-described")


NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
FACT = r"One of the special magic \w+s for (\S+) is: (\S+)\."
OFFICIAL = {
    "niah": (
        "Some special magic {type_needle_v} are hidden within the following text. Make sure to memorize it. I will quiz"
        " you about the {type_needle_v} afterwards.\n{context}\nWhat are all the special magic {type_needle_v} for"
        " {query} mentioned in the provided text?",
        " The special magic {type_needle_v} for {query} mentioned in the provided text are",
    ),
    "vt": (
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\nQuestion:"
        " Find all variables that are assigned the value {query} in the text above.",
        " Answer: According to the chain(s) of variable assignment in the text above, {num_v} variables are assigned"
        " the value {query}, they are: ",
    ),
    "cwe": (
        "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that"
        " appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list?",
        " Answer: The top 10 words that appear most often in the list are:",
    ),
    "fwe": (
        "Read the following coded text and track the frequency of each coded word. Find the three most frequently"
        " appeared coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'."
        " What are the three most frequently appeared words in the above coded text?",
        " Answer: According to the coded text above, the three most frequently appeared words are:",
    ),
}
TASKS = {
    "niah_single_1": ("noise", "number"), "niah_single_2": ("prose", "number"), "niah_single_3": ("prose", "uuid"),
    "niah_multikey_1": ("prose", "number"), "niah_multikey_2": ("needles", "number"),
    "niah_multikey_3": ("needles", "uuid"), "niah_multivalue": ("prose", "numbers"),
    "niah_multiquery": ("prose", "numbers"), "vt": ("", ""), "cwe": ("", ""), "fwe": ("", ""),
}


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    path = tmp_path_factory.mktemp("prose") / "some.txt"
    path.write_text("\n".join(read_text("path", NARRATIVE).splitlines()[:900]), encoding="utf-8")
    tokenizer = merged_tokenizer()
    return ground_of(tokenizer, read_prose(tokenizer, path))


def apart(template: str, text: str) -> Mapping[str, str]:
    """Return the fields of a template at the end of a text."""
    seen = set[str]()

    def field(match: re.Match[str]) -> str:
        name = match[1]
        actual = f"(?P={name})" if name in seen else f"(?P<{name}>.+?)"
        seen.add(name)
        return actual

    pattern = re.sub(r"\\\{(\w+)\\\}", field, re.escape(template))
    matched = re.search(f"(?s){pattern}$", text)
    assert matched, text
    return matched.groupdict()


def one_answer(template: str) -> str:
    return template.replace("Some", "A").replace("are all", "is").replace("are", "is")


def niah_holds(ground: Ground, name: str, sample: Sample) -> None:
    haystack, kind = TASKS[name]
    template = "".join(OFFICIAL["niah"])
    actual = apart(template if kind.endswith("s") else one_answer(template), prompt(ground, sample))
    assert actual["type_needle_v"] == kind
    keys = actual["query"].split(", ")
    assert actual["query"] == (keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])}, {keys[-1]}")
    assert all(key.startswith("and ") is (len(keys) > 1 and at == len(keys) - 1) for at, key in enumerate(keys))
    lines = actual["context"].split("\n")
    if haystack == "prose":
        assert len(re.findall(rf" {FACT} ", actual["context"])) == 4 if "multi" in name else 1
    elif haystack == "noise":
        assert len([line for line in lines if line != NOISE]) == 1
        assert lines[-1] == NOISE
        assert all(line == NOISE or re.fullmatch(FACT, line) for line in lines)
    else:
        assert all(re.fullmatch(FACT, line) for line in lines)
    kinds = {"number": r"\d{7}", "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"}
    assert all(re.fullmatch(kinds[kind.removesuffix("s")], value) for value in sample.references)


def vt_holds(ground: Ground, name: str, sample: Sample) -> None:
    template = "".join(OFFICIAL["vt"])
    opening = template[: template.index("{")]
    _, shown, asked = prompt(ground, sample).split(opening)
    example = re.fullmatch(r"(?s)(.+they are: ) ([A-Z]{3}(?: [A-Z]{3}){4})\n\n", shown)
    assert example
    for text, names in ((example[1], example[2].split()), (asked, list(sample.references))):
        actual = apart(template, opening + text)
        assert actual["num_v"] == "5"
        lines = actual["context"].split("\n")
        assert lines[-1] == NOISE
        assert all(NOISE in pair for pair in pairwise(lines))
        chain = [line for line in lines if line != NOISE]
        first, *others = names
        assert re.fullmatch(rf"VAR {first} = \d{{5}}", chain[0])
        assert chain[1:] == [f"VAR {new} = VAR {old} " for new, old in zip(others, names, strict=False)]


def cwe_holds(ground: Ground, name: str, sample: Sample) -> None:
    template, (often, seldom) = "".join(OFFICIAL["cwe"]), (30, 3) if sample.length >= 4096 else (6, 1)
    shown, twice = (40, (10, 3)) if sample.length >= 4096 else (20, (3, 1))
    opening, pinned = template[: template.index("{")], "unpinned" not in sample.dialect
    _, small, asked = prompt(ground, sample).split(opening)
    example = re.fullmatch(r"(?s)(.+ are:) (.+)\n", small)
    assert example
    best = re.findall(r"\d+\. (\w+)", example[2])
    assert example[2] == " ".join(f"{at}. {word}" for at, word in enumerate(best, 1))
    listing = apart(template, opening + example[1])["context"]
    assert len(set(re.findall(r"[a-z]+", listing))) == shown
    check_list(listing, best, *twice, pinned)
    check_list(apart(template, opening + asked)["context"], list(sample.references), often, seldom, pinned)


def check_list(listing: str, common: list[str], often: int, seldom: int, pinned: bool) -> None:
    """Check the official list of common and remaining words with their counts, shuffled by `random.Random(42)`."""
    actual = re.findall(r"\d+\. (\w+)", listing)
    assert listing == " ".join(f"{at}. {word}" for at, word in enumerate(actual, 1))
    slots = list(range(len(actual)))
    random.Random(42).shuffle(slots)
    back = dict(zip(slots, actual, strict=True))
    unshuffled = [back[slot] for slot in range(len(actual))]
    others = unshuffled[10 * often :]
    same = unshuffled[: 10 * often] == common * often and others == others[: len(others) // seldom] * seldom
    assert same is pinned


def fwe_holds(ground: Ground, name: str, sample: Sample) -> None:
    words = apart("".join(OFFICIAL["fwe"]), prompt(ground, sample))["context"].split(" ")
    assert all(word == "..." or re.fullmatch("[a-z]{6}", word) for word in words)
    slots = list(range(len(words)))
    random.Random(42).shuffle(slots)
    ranked = [words[slots.index(slot)] for slot in range(len(words))]
    dots = words.count("...")
    same = ranked[:dots] == ["..."] * dots and list(dict.fromkeys(ranked))[1:4] == list(sample.references)
    assert same is ("unpinned" not in sample.dialect)


HOLDS: Mapping[str, Callable[[Ground, str, Sample], None]] = {
    "niah": niah_holds, "vt": vt_holds, "cwe": cwe_holds, "fwe": fwe_holds,
}


@pytest.mark.parametrize("length", [3000, 6000])
@pytest.mark.parametrize("name", sorted(TASKS))
def test_a_prompt_is_the_official_one(name: str, length: int, ground: Ground) -> None:
    for dialect in ("ruler_v1", "ruler_v1_unpinned"):
        for index in range(2):
            (sample,) = resolve_task(f"{dialect}_{name}")(ground, length, index, 5)
            HOLDS[name.partition("_")[0]](ground, name, sample)


def test_pinned_facts_stand_in_the_official_order_and_answers_in_that_of_the_draw(ground: Ground) -> None:
    """Check four facts, shuffled by `random.Random(42)`: each draw has the same place in all samples."""
    slots = list(range(4))
    random.Random(42).shuffle(slots)
    for index in range(3):
        (sample,) = resolve_task("ruler_v1_niah_multivalue")(ground, 3000, index, 2)
        stated = [value for _, value in re.findall(FACT, prompt(ground, sample))]
        assert stated == [sample.references[slot] for slot in slots]
        (query,) = resolve_task("ruler_v1_niah_multiquery")(ground, 3000, index, 2)
        asked = [key.removeprefix("and ") for key in str(query.metadata["keys"]).split(", ")]
        values = dict(re.findall(FACT, prompt(ground, query)))
        assert [values[key] for key in asked] == list(query.references)


def test_behind_a_chat_template_the_answer_prefix_keeps_its_spaces(ground: Ground) -> None:
    tokenizer = chatting_tokenizer()
    framed = ground_of(tokenizer, ground.prose)
    for name in TASKS:
        (sample,) = resolve_task(f"ruler_v1_{name}")(framed, 3000, 0, 5)
        _, _, prefix = prompt(framed, sample).rpartition("[/][assistant]")
        template = OFFICIAL[name.partition("_")[0]][1]
        apart(one_answer(template) if len(sample.references) == 1 else template, prefix)
        assert prefix.startswith(" ")
        answer = str(tokenizer.decode(list(sample.answer_ids)))
        assert (prefix + answer).count("  ") == 0


RECENT = 128


@pytest.fixture(scope="module", params=sorted(TOKENIZERS))
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return TOKENIZERS[request.param]()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the start of the shipped text, short enough for tokenizers of single letters."""
    path = tmp_path_factory.mktemp("prose") / "some.txt"
    path.write_text("\n".join(read_text("path", NARRATIVE).splitlines()[:400]), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def prose(tokenizer: PreTrainedTokenizerFast, text: Path) -> Prose:
    return read_prose(tokenizer, text)


def one_of(
    tokenizer: PreTrainedTokenizerFast, prose: Prose, length: int, index: int, seed: int, *, keys: int,
) -> Sample:
    (sample,) = keys_in_prose_samples(ground_of(tokenizer, prose), length, index, seed, keys=keys)
    return sample


def decoded(tokenizer: PreTrainedTokenizerFast, ids: tuple[int, ...]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=True)).strip()


def test_the_text_runs_on_around_the_facts_and_no_window_repeats(
    tokenizer: PreTrainedTokenizerFast, prose: Prose, text: Path
) -> None:
    """Check that a context without the facts is one passage of the file. Facts follow whole lines."""
    whole = " ".join(text.read_text(encoding="utf-8").split())
    lines = set(text.read_text(encoding="utf-8").splitlines())
    count, seen = min(prose.windows(1024), 12), list[int]()
    for index in range(count):
        sample = one_of(tokenizer, prose, 1024, index, 1, keys=4)
        spans, ids = sorted([sample.needle, *sample.distractors]), sample.context_ids
        pieces, at = list[int](), 0
        for start, stop in spans:
            pieces, at = pieces + list(ids[at:start]), stop
            before = decoded(tokenizer, tuple(pieces))
            assert any(before.endswith(line) or line.endswith(before) for line in lines)
        actual = decoded(tokenizer, (*pieces, *ids[at:]))
        assert whole.count(actual) == 1
        seen += range(whole.index(actual), whole.index(actual) + len(actual))
    assert len(set(seen)) == len(seen)
    again = one_of(tokenizer, prose, 1024, prose.windows(1024), 1, keys=4)
    first = one_of(tokenizer, prose, 1024, 0, 1, keys=4)
    assert again.metadata["window"] == first.metadata["window"]
    assert again.context_digest != first.context_digest


@pytest.mark.parametrize("questions", [1, 2, 5])
def test_questions_come_from_equal_parts_of_the_object_in_any_order(questions: int, text: Path) -> None:
    tokenizer = merged_tokenizer()
    prose = read_prose(tokenizer, text)
    orders = set()
    for index in range(20):
        samples = key_value_samples(ground_of(tokenizer, prose), 4096, index, 2, questions=questions)
        starts = [sample.needle[0] for sample in samples]
        orders.add(tuple(np.argsort(starts).tolist()))
        parts = [int(questions * (start - 60) / (4096 - RECENT - 60)) for start in sorted(starts)]
        assert all(abs(part - at) <= 1 for at, part in enumerate(parts))
    assert len(orders) > (questions > 1)


def test_a_chat_template_that_is_not_there_or_prints_no_text_is_refused() -> None:
    tokenizer = merged_tokenizer()
    with pytest.raises(SpecError, match="has no chat template"):
        chat(tokenizer)
    tokenizer.chat_template = "{{ messages | length }}"
    with pytest.raises(SpecError, match="prints messages unchanged"):
        chat(tokenizer)


def test_the_shipped_text_is_long_and_has_no_digit() -> None:
    lines = read_text("path", NARRATIVE).splitlines()
    assert not any(letter.isdigit() for line in lines for letter in line)
    assert lines[0] == "In the beginning God created the heaven and the earth."
    assert len(set(lines)) > 5800
    assert NARRATIVE.stat().st_size < 250_000


BAD: dict[str, Callable[[PreTrainedTokenizerFast, Prose], object]] = {
    "keys": lambda t, p: one_of(t, p, 1024, 0, 0, keys=0),
    "distractors": lambda t, p: one_of(t, p, 1024, 0, 0, keys=99),
    "length zero": lambda t, p: p.windows(0),
    "length of window": lambda t, p: one_of(t, p, 160, 4, 0, keys=1),
    "length of pairs": lambda t, p: key_value_samples(ground_of(t, p), 300, 0, 0, questions=40),
    "length of nothing": lambda t, p: key_value_samples(ground_of(t, p), 30, 0, 0, questions=1),
    "form": lambda t, p: key_value_samples(ground_of(t, p), 1024, 0, 0, questions=1, form="json"),
    "questions": lambda t, p: key_value_samples(ground_of(t, p), 1024, 0, 0, questions=0),
    "path": lambda t, p: read_prose(t, Path("/nowhere.txt")),
}


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize("case", sorted(BAD))
def test_bad_input_is_a_named_error(case: str, text: Path) -> None:
    tokenizer = merged_tokenizer()
    with pytest.raises(SpecError) as caught:
        BAD[case](tokenizer, read_prose(tokenizer, text))
    assert caught.value.argument == case.split()[0]


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize("data", [b"", b" \n\n", b"\xff\xfe\xff"])
def test_a_text_without_text_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(data)
    (tmp_path / "a.xz").write_bytes(data)
    for name in ("a.txt", "a.xz"):
        with pytest.raises(SpecError, match=r"must not be empty|is not UTF-8|is not a whole \.xz file"):
            read_prose(merged_tokenizer(), tmp_path / name)
