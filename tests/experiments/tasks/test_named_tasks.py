"""Every task of the registry: its claims are checked on its decoded text, with code that is independent of the task."""

import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.tasks import Sample, registry, score
from experiments.tasks.context import NARRATIVE, Ground, read_prose
from experiments.tasks.registry import CHAINS, QUESTIONS, TABLE, resolve_task
from models_integration.model.frame import bare
from models_integration.pocket import load_pocket_tokenizer
from spec.errors import SpecError
from spec.files import read_text
from tests.experiments.tasks.test_tasks import chatting_tokenizer, ground_of, merged_tokenizer, text_of

pytestmark = pytest.mark.law("as-it-is-described")

SINKS, RECENT = 4, 128
NAMES = ("pocket", "merged")
BUILT_IN = sorted(name for name, entry in TABLE.items() if entry.gold and name != "placed_fact")
"""Tasks that need no more text than the start of the shipped text. `placed_fact` needs more: test_placed_fact.py."""

DRAWS = [(3001, 0, 0), (3001, 1, 0), (3001, 1, 1), (9002, 7, 5)]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the start of the shipped text, short enough for a tokenizer of short pieces."""
    path = tmp_path_factory.mktemp("prose") / "some.txt"
    path.write_text("\n".join(read_text("path", NARRATIVE).splitlines()[:900]), encoding="utf-8")
    return path


@pytest.fixture(scope="module", params=NAMES)
def named(request: pytest.FixtureRequest, text: Path) -> tuple[str, Ground]:
    tokenizer = load_pocket_tokenizer() if request.param == "pocket" else merged_tokenizer()
    return request.param, ground_of(tokenizer, read_prose(tokenizer, text))


def pieces(ground: Ground, sample: Sample) -> list[str]:
    return [text_of(ground, sample.context_ids[slice(*span)]).strip() for span in sample.evidence]


def facts_hold(ground: Ground, sample: Sample) -> None:
    """Check needle tasks of RULER: parse the sentences of the context by their form."""
    asked = text_of(ground, sample.question_ids[sample.history :])
    stated = defaultdict(list)
    form = r"One of the special magic \w+ for (\S+) is: ([^.\s]+)\."
    for line in re.finditer(form, text_of(ground, sample.context_ids)):
        stated[line[1]].append((line[2], line[0]))
    (query,) = re.findall(r"special magic \w+ for (.+?) mentioned in the provided text\?", asked)
    keys = [key.removeprefix("and ") for key in query.split(", ")]
    assert sorted(sample.references) == sorted(value for key in keys for value, _ in stated[key])
    assert sorted(pieces(ground, sample)) == sorted(line for key in keys for _, line in stated[key])
    assert asked.count(query) == 2
    assert ("What are all" in asked) is (len(sample.references) > 1)


def chains_hold(ground: Ground, sample: Sample) -> None:
    """Check variable tracking: execute the assignments."""
    held: dict[str, str] = {}
    for name, value in re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?(\w+)", text_of(ground, sample.context_ids)):
        assert name not in held
        held[name] = held.get(value, value)
    asked = text_of(ground, sample.question_ids[sample.history :])
    (value,) = re.findall(r"assigned the value (\d{5}) in the text", asked)
    assert set(sample.references) == {name for name in held if held[name] == value}
    assert len(sample.references) == 5 == len(sample.evidence)
    lines = [f"VAR {name} = " for name in sample.references]
    assert all(piece.startswith(line) for piece, line in zip(pieces(ground, sample), lines, strict=True))


def common_words_hold(ground: Ground, sample: Sample) -> None:
    listing = text_of(ground, sample.context_ids).rpartition("appear most often.\n")[2]
    counted = Counter(re.findall(r"\d+\. ([a-z]+)", listing))
    assert [int(number) for number in re.findall(r"(\d+)\.", listing)] == list(range(1, counted.total() + 1))
    often, seldom = (30, 3) if sample.length >= 4096 else (6, 1)
    assert sorted(sample.references) == sorted(word for word, count in counted.items() if count == often)
    assert {count for word, count in counted.items() if word not in sample.references} <= {seldom}
    occurrences_hold(ground, sample, re.findall(r"[a-z]+", listing))


def frequent_words_hold(ground: Ground, sample: Sample) -> None:
    listing = text_of(ground, sample.context_ids).rpartition("coded words.")[2].split()
    ranked = [word for word, _ in Counter(listing).most_common(5)]
    assert ranked[0] == "..."
    assert list(sample.references) == ranked[1:4]
    assert Counter(listing)[ranked[3]] > Counter(listing)[ranked[4]]
    occurrences_hold(ground, sample, listing)


def occurrences_hold(ground: Ground, sample: Sample, listing: list[str]) -> None:
    """Check that the evidence has all occurrences except those in the recent window."""
    actual = pieces(ground, sample)
    all_of_them = [word for word in listing if word in sample.references]
    assert all_of_them[: len(actual)] == actual
    window = text_of(ground, sample.context_ids[-RECENT - 8 :]).split()
    assert len(all_of_them) - len(actual) <= sum(word in sample.references for word in window) + 1


def pairs_hold(ground: Ground, sample: Sample) -> None:
    asked = text_of(ground, sample.question_ids[sample.history :])
    (key,) = re.findall(r'Key: "([^"]+)"', asked)
    context = text_of(ground, sample.context_ids)
    assert re.findall(f'"{key}": "([^"]+)"', context) == [sample.expected]
    assert json.loads(context[context.index("{") : context.rindex("}") + 1])[key] == sample.expected
    assert pieces(ground, sample) == [f'"{key}": "{sample.expected}"']


def sentence_holds(ground: Ground, sample: Sample) -> None:
    """Check that the fact and the distractors occur once. In running text, only facts (and "Lab 7") have digits."""
    asked, context = text_of(ground, sample.question_ids).partition(" Answer: ")[2], text_of(ground, sample.context_ids)
    (piece,) = pieces(ground, sample)
    facts = {piece, *(text_of(ground, sample.context_ids[slice(*span)]).strip() for span in sample.distractors)}
    assert piece.startswith(f"{asked} {sample.expected}")
    assert [context.count(one) for one in (sample.expected, *facts)] == [1] * (1 + len(facts))
    if "in_prose" in sample.task:
        assert len(facts) == int(re.sub(r"\D", "", sample.task) or 1)
        text = context.replace("Lab 7.", "")
        assert sum(map(str.isdigit, text)) == sum(map(str.isdigit, "".join(facts)))


def text_goes_on(ground: Ground, sample: Sample) -> None:
    whole = " ".join(read_text("path", NARRATIVE).split())
    parts = sample.context_ids, sample.question_ids, sample.answer_ids
    assert "".join(text_of(ground, part) for part in parts).strip() in whole
    assert len(sample.answer_ids) == 128
    assert text_of(ground, sample.answer_ids).strip() == sample.expected
    assert sample.evidence == ()


CHECKS: Mapping[str, Callable[[Ground, Sample], None]] = {
    "niah": facts_hold, "vt": chains_hold, "variable_tracking": chains_hold, "cwe": common_words_hold,
    "fwe": frequent_words_hold, "key_value": pairs_hold, "in_prose": sentence_holds,
    "fact": sentence_holds,
    "continuation": text_goes_on,
}


def checked(name: str, ground: Ground, length: int, index: int, seed: int) -> tuple[Sample, ...]:
    (check,) = {check for part, check in CHECKS.items() if part in name}
    samples = resolve_task(name)(ground, length, index, seed)
    for sample in samples:
        check_sample(ground, sample, length)
        assert sample.task == name
        assert sample.context_digest == samples[0].context_digest
        check(ground, sample)
    return samples


@pytest.mark.parametrize("name", sorted(TABLE))
def test_a_line_of_the_table_is_what_its_samples_are(named: tuple[str, Ground], name: str) -> None:
    """Check metric, gold answer, and constants. Each constant changes the sample, and other constants are refused."""
    task, entry = resolve_task(name), TABLE[name]
    samples = task(named[1], 3500, 0, 1)
    assert {sample.metric for sample in samples} == {entry.metric}
    assert all(bool(sample.answer_ids) is entry.gold for sample in samples)
    for text, constant, value in (("depth=0.5", "depth", 0.5), ('density="low"', "density", "low")):
        if constant in entry.constants:
            (sample,) = resolve_task(f"{name}({text})")(named[1], 3500, 0, 1)
            assert sample.metadata[constant] == value != samples[0].metadata[constant]
        else:
            with pytest.raises(SpecError, match=f"has no constant {constant}"):
                resolve_task(f"{name}({text})")


@pytest.mark.parametrize("part", ["dev", "confirm"])
def test_a_problem_of_arithmetic_has_the_result_of_its_steps(named: tuple[str, Ground], part: str) -> None:
    """Run the words as a program, and check the results of the worked examples. Problems belong to their part."""
    signs = {"Start with ": "0+", "Add ": "+", "Subtract ": "-", "Multiply by ": "*"}
    names = set[object]()
    for index in range(4):
        (sample,) = resolve_task(f'arithmetic(part="{part}")')(named[1], 400, index, 7)
        text = text_of(named[1], sample.context_ids + sample.question_ids)
        problems = re.findall(r"(Start with [^?]*?)\. What is", text)
        results = []
        for problem in problems:
            value = 0
            for step in problem.split(". "):
                (sign,) = (sign for words, sign in signs.items() if step.startswith(words))
                number = int(step.split()[-1])
                value = value * number if sign == "*" else value + (-number if sign == "-" else number)
            results.append(str(value))
        assert len(problems) > 2
        assert results == [*re.findall(r"boxed\{(-?\d+)\}", text), sample.expected]
        names.add(sample.metadata["id"])
        bucket = int(hashlib.md5(str(sample.metadata["id"]).encode()).hexdigest(), 16) % 5
        assert (bucket in (0, 1)) is (part == "dev")
    assert len(names) == 4


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_task_is_what_its_text_says(name: str, named: tuple[str, Ground]) -> None:
    drawn = [checked(name, named[1], *draw) for draw in DRAWS]
    assert drawn[0] == resolve_task(name)(named[1], *DRAWS[0])
    assert len({samples[0].context_digest for samples in drawn}) == len(DRAWS)


@given(st.sampled_from(BUILT_IN), st.integers(3000, 6000), st.integers(0, 500), st.integers(0, 2**32))
def test_a_task_of_any_length_index_and_seed_is_what_its_text_says(
    named: tuple[str, Ground], name: str, length: int, index: int, seed: int
) -> None:
    # From 4096 tokens on, each common word occurs 30 times. Tokenizers of short pieces need more tokens for this text.
    checked(name, named[1], length + 3000 if "cwe" in name and length >= 4096 else length, index, seed)


def test_common_words_that_do_not_fit_are_refused(named: tuple[str, Ground]) -> None:
    with pytest.raises(SpecError, match=r"length = 4096: the task alone needs [0-9]+ tokens"):
        resolve_task("ruler_v1_cwe")(named[1], 4096, 0, 0)


def check_sample(ground: Ground, sample: Sample, length: int) -> None:
    assert len(sample.context_ids) == length
    spans = sorted((*sample.evidence, *sample.distractors))
    assert all(start < stop for start, stop in spans)
    assert all(one[1] <= other[0] for one, other in pairwise(spans))
    assert all(start >= SINKS and stop <= length - RECENT for start, stop in sample.evidence)
    evidence = " ".join(pieces(ground, sample))
    assert all(one in evidence for one in sample.references or [sample.expected] if sample.evidence)
    assert sample.chat_template == "none"
    assert sample.answer_ids
    assert score(ground.tokenizer, sample.answer_ids, sample) > 1 - 1e-6
    dialect = re.match(r"ruler_v1(_unpinned)?", sample.task)
    assert sample.dialect == (dialect[0].replace("_", "-") if dialect else "kvspec")
    assert (sample.max_new_tokens == 50) is not bool(re.search(r"niah|vt|cwe|continuation", sample.task))


SINGLE = [name for name in BUILT_IN if re.search(r"single|key_[23]|keys_in|needle", name)]


@pytest.mark.parametrize("name", SINGLE)
def test_a_single_fact_takes_turns_over_the_depths(name: str, named: tuple[str, Ground]) -> None:
    contexts = [resolve_task(name)(named[1], 8000, index, 3) for index in range(10)]
    depths = [samples[0].needle[0] / (8000 - RECENT) for samples in contexts]
    assert all(abs(depth - (0.1 + 0.2 * (index % 5))) < 0.18 for index, depth in enumerate(depths))
    assert sorted(depths[:5]) == depths[:5]


def slots(ground: Ground, name: str, index: int) -> list[bool]:
    """Return for each word of the list whether it is an answer."""
    (sample,) = resolve_task(name)(ground, 3000, index, 1)
    context_text = text_of(ground, sample.context_ids)
    listing = re.findall(r"[a-z]+", context_text.rpartition("most often.\n")[2]) if "cwe" in name else (
        context_text.rpartition("coded words.")[2].split()
    )
    return [word in sample.references for word in listing]


@pytest.mark.parametrize("task", ["cwe", "fwe"])
def test_v1_puts_the_answers_into_the_same_slots_of_every_sample_and_unpinned_does_not(
    task: str, named: tuple[str, Ground]
) -> None:
    for dialect, same in (("ruler_v1", True), ("ruler_v1_unpinned", False)):
        by_size = defaultdict(list)
        for index in range(6):
            actual = slots(named[1], f"{dialect}_{task}", index)
            by_size[len(actual)].append(actual)
        pairs = [pair for alike in by_size.values() for pair in pairwise(alike)]
        assert len(pairs) >= 2
        assert all((one == other) is same for one, other in pairs)


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name.endswith("_turns")])
def test_turns_are_the_questions_one_after_another_with_their_gold_answers(name: str, text: Path) -> None:
    tokenizer = chatting_tokenizer()
    framed = ground_of(tokenizer, read_prose(tokenizer, text))
    for ground, between in ((replace(framed, frame=bare(tokenizer)), "\n\n"), (framed, "[/][user]")):
        alone = resolve_task(name.removesuffix("_turns"))(ground, 6001, 2, 9)
        turns = resolve_task(name)(ground, 6001, 2, 9)
        assert len(alone) == len(turns) == (CHAINS if "tracking" in name else QUESTIONS)
        before = ""
        for one, turn in zip(alone, turns, strict=True):
            asked = text_of(ground, one.question_ids)
            assert text_of(ground, turn.question_ids) == before + asked
            assert text_of(ground, turn.question_ids[: turn.history]) == before
            assert (turn.context_ids, turn.evidence, turn.expected) == (one.context_ids, one.evidence, one.expected)
            before += f"{asked} {one.expected}{between}"


def test_a_chat_template_stands_around_every_task_but_continuation(text: Path) -> None:
    tokenizer = chatting_tokenizer()
    ground = ground_of(tokenizer, read_prose(tokenizer, text))
    for name in BUILT_IN:
        sample = resolve_task(name)(ground, 3500, 1, 2)[-1]
        framed = name != "prose_continuation"
        assert len(sample.context_ids) == 3500
        assert text_of(ground, sample.context_ids).startswith("[user]") is framed
        assert ("[/][assistant]" in text_of(ground, sample.question_ids)) is framed
        assert (sample.chat_template != "none") is framed


USER_TASK = '''
from dataclasses import replace

def SHORT(ground, length, index, seed):
    return COLOUR(ground, length - 1, index, seed)

def LONG(ground, length, index, seed):
    return COLOUR(ground, length + 1, index, seed)

def NOTHING(ground, length, index, seed):
    return []

def OUTSIDE(ground, length, index, seed):
    return [replace(COLOUR(ground, length, index, seed)[0], needle=(0, length + 1))]

NUMBER = 3
'''


@pytest.fixture
def user_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the documented example to a file of the current folder, which is not in sys.path."""
    example = dedent((registry.__doc__ or "").partition("\n\n")[2])
    (tmp_path / "kvspec_own_task.py").write_text(example + USER_TASK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "kvspec_own_task", raising=False)


def test_the_users_own_task_is_one_file_of_the_current_folder(user_task: None, named: tuple[str, Ground]) -> None:
    import sys

    folders = list(sys.path)
    task = resolve_task("kvspec_own_task:COLOUR")
    assert sys.path == folders
    (sample,) = task(named[1], 1500, 0, 0)
    assert (sample.task, sample.length) == ("colour", 1500)
    assert pieces(named[1], sample) == [f"The door is {sample.expected}."]
    (short,) = resolve_task("kvspec_own_task:SHORT")(named[1], 1500, 0, 0)
    assert short.length == 1499  # The length is at most the requested length.


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize("name", ["needles", "no_module:X", "kvspec_own_task:ABSENT", "kvspec_own_task:NUMBER", ":X"])
def test_a_name_that_is_no_task_is_refused(name: str, user_task: None) -> None:
    with pytest.raises(SpecError) as caught:
        resolve_task(name)
    assert (caught.value.argument, caught.value.value) == ("task", name)


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize("attribute", ["LONG", "NOTHING", "OUTSIDE"])
def test_a_task_that_gives_anything_else_is_refused(attribute: str, user_task: None, named: tuple[str, Ground]) -> None:
    with pytest.raises(SpecError) as caught:
        resolve_task(f"kvspec_own_task:{attribute}")(named[1], 1500, 0, 0)
    assert caught.value.argument == "task"


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize(("length", "index", "seed", "argument"), [
    (140, 0, 0, "length"), (10**8, 0, 0, "length"), (3000, -1, 0, "index"), (3000, 0, -1, "seed"),
])
def test_bad_input_is_a_named_error(
    length: int, index: int, seed: int, argument: str, named: tuple[str, Ground]
) -> None:
    for name in BUILT_IN:
        if (name, length) != ("prose_continuation", 140):  # This task accepts any length.
            with pytest.raises(SpecError) as caught:
                resolve_task(name)(named[1], length, index, seed)
            assert caught.value.argument == argument
