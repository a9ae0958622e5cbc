"""Tasks in running text: exact lengths, evidence where it is said to be, windows that do not repeat, chat templates."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from conformance.own.models_integration.tasks.test_tasks import TOKENIZERS, merged_tokenizer
from models_integration.tasks import Sample
from models_integration.tasks.chat import Frame, bare, chat
from models_integration.tasks.context import STRATA, Ground
from models_integration.tasks.in_prose import keys_in_prose_samples
from models_integration.tasks.prose import NARRATIVE, Prose, read_prose
from models_integration.tasks.scbench import FORMS, key_value_samples
from spec.errors import SpecError

pytestmark = pytest.mark.law("as-it-is-described")

SINKS, RECENT = 4, 128
LENGTHS = (1024, 1025, 2048)
TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}[/]{% endfor %}[assistant]"


@pytest.fixture(scope="module", params=sorted(TOKENIZERS))
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return TOKENIZERS[request.param]()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The start of the shipped text: as much as the tokenizers of single letters read quickly."""
    path = tmp_path_factory.mktemp("prose") / "some.txt"
    path.write_text("\n".join(lines_of(NARRATIVE)[:400]), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def prose(tokenizer: PreTrainedTokenizerFast, text: Path) -> Prose:
    return read_prose(tokenizer, text)


def lines_of(path: Path) -> list[str]:
    import lzma

    return lzma.decompress(path.read_bytes()).decode("utf-8").splitlines()


def bare_ground(tokenizer: PreTrainedTokenizerFast, prose: Prose) -> Ground:
    return Ground(tokenizer, prose, bare(tokenizer))


def one_of(
    tokenizer: PreTrainedTokenizerFast, prose: Prose, length: int, index: int, seed: int, *, keys: int,
    frame: Frame | None = None,
) -> Sample:
    ground = Ground(tokenizer, prose, frame or bare(tokenizer))
    (sample,) = keys_in_prose_samples(ground, length, index, seed, keys=keys)
    return sample


def decoded(tokenizer: PreTrainedTokenizerFast, ids: tuple[int, ...]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=True)).strip()


@pytest.mark.parametrize("keys", [1, 2, 4])
@pytest.mark.parametrize("length", LENGTHS)
def test_the_evidence_is_the_fact_and_nothing_else_answers(
    keys: int, length: int, tokenizer: PreTrainedTokenizerFast, prose: Prose
) -> None:
    for index in range(10):
        sample = one_of(tokenizer, prose, length, index, 3, keys=keys)
        assert len(sample.context_ids) == length
        ((start, stop),) = sample.evidence
        assert SINKS <= start < stop <= length - RECENT
        fact = decoded(tokenizer, sample.context_ids[start:stop])
        question, answer = decoded(tokenizer, sample.question_ids), decoded(tokenizer, sample.answer_ids)
        assert answer == sample.expected
        assert fact == f"{question.partition(' Answer: ')[2]} {answer}."
        context = decoded(tokenizer, sample.context_ids)
        others = [decoded(tokenizer, sample.context_ids[slice(*span)]) for span in sample.distractors]
        assert len({fact, *others}) == keys
        assert all(context.count(one) == 1 for one in (fact, *others))
        assert sum(letter.isdigit() for letter in context) == sum(
            letter.isdigit() for one in (fact, *others) for letter in one
        )


def test_depths_are_kept_and_take_turns(tokenizer: PreTrainedTokenizerFast, prose: Prose) -> None:
    longest = max(np.diff(prose.stops))
    for index, depth in enumerate(STRATA * 2):
        sample = one_of(tokenizer, prose, 2048, index, 0, keys=1)
        assert abs(sample.needle[0] - depth * (2048 - RECENT)) <= longest / 2 + 50


def test_the_text_runs_on_around_the_facts_and_no_window_repeats(
    tokenizer: PreTrainedTokenizerFast, prose: Prose, text: Path
) -> None:
    """Against the file: without the facts a context is one stretch of it, and facts stand behind whole lines."""
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
        found = decoded(tokenizer, (*pieces, *ids[at:]))
        assert whole.count(found) == 1
        seen += range(whole.index(found), whole.index(found) + len(found))
    assert len(set(seen)) == len(seen)
    again = one_of(tokenizer, prose, 1024, prose.windows(1024), 1, keys=4)
    first = one_of(tokenizer, prose, 1024, 0, 1, keys=4)
    assert again.metadata["window"] == first.metadata["window"]
    assert again.context_digest != first.context_digest


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", [2048, 2049])
def test_pairs_are_one_object_and_the_evidence_holds_the_answer(
    form: str, length: int, tokenizer: PreTrainedTokenizerFast, prose: Prose
) -> None:
    for index in range(5):
        samples = key_value_samples(bare_ground(tokenizer, prose), length, index, 5, questions=3, form=form)
        assert len({sample.context_digest for sample in samples}) == 1
        context = decoded(tokenizer, samples[0].context_ids)
        stored = json.loads(context[context.index("{") : context.rindex("}") + 1])
        thirds = set()
        for sample in samples:
            assert len(sample.context_ids) == length
            ((start, stop),) = sample.evidence
            assert SINKS <= start < stop <= length - RECENT
            key = decoded(tokenizer, sample.question_ids).split('"')[1]
            assert stored[key] == sample.expected == decoded(tokenizer, sample.answer_ids)
            pair = decoded(tokenizer, sample.context_ids[start:stop])
            assert json.loads("{" + pair + "}") == {key: sample.expected}
            thirds.add(sample.metadata["depth"])
        assert len(thirds) == 3


@pytest.mark.parametrize("questions", [1, 2, 5])
def test_questions_come_from_equal_parts_of_the_object_in_any_order(questions: int, text: Path) -> None:
    tokenizer = merged_tokenizer()
    prose = read_prose(tokenizer, text)
    orders = set()
    for index in range(20):
        samples = key_value_samples(bare_ground(tokenizer, prose), 4096, index, 2, questions=questions)
        starts = [sample.needle[0] for sample in samples]
        orders.add(tuple(np.argsort(starts).tolist()))
        parts = [int(questions * (start - 60) / (4096 - RECENT - 60)) for start in sorted(starts)]
        assert all(abs(part - at) <= 1 for at, part in enumerate(parts))
    assert len(orders) > (questions > 1)


def test_a_chat_template_stands_around_context_and_question(text: Path) -> None:
    tokenizer = merged_tokenizer()
    prose = read_prose(tokenizer, text)
    with pytest.raises(SpecError, match="has no chat template"):
        chat(tokenizer)
    tokenizer.chat_template = TEMPLATE
    frame = chat(tokenizer)
    plain = one_of(tokenizer, prose, 1024, 0, 0, keys=1)
    framed = one_of(tokenizer, prose, 1024, 0, 0, keys=1, frame=frame)
    assert plain.chat_template == bare(tokenizer).name == "none"
    assert framed.chat_template == frame.name != "none"
    assert len(framed.context_ids) == 1024
    said = decoded(tokenizer, framed.context_ids + framed.question_ids + framed.answer_ids)
    assert said.startswith("[user]")
    assert said.endswith(f"?[/][assistant]{decoded(tokenizer, plain.question_ids).partition('Answer: ')[2]} "
                         f"{framed.expected}")
    assert chat(tokenizer).name == frame.name
    (pair,) = key_value_samples(Ground(tokenizer, prose, frame), 1500, 0, 0, questions=1)
    said = decoded(tokenizer, pair.question_ids)
    assert said.endswith('"[/][assistant]The value associated with the specified key is:')
    tokenizer.chat_template = "{{ messages | length }}"
    with pytest.raises(SpecError, match="does not print"):
        chat(tokenizer)


def test_the_shipped_text_is_long_and_has_no_digit() -> None:
    lines = lines_of(NARRATIVE)
    assert not any(letter.isdigit() for line in lines for letter in line)
    assert lines[0] == "In the beginning God created the heaven and the earth."
    assert len(set(lines)) > 5800
    assert NARRATIVE.stat().st_size < 250_000


BAD: dict[str, Callable[[PreTrainedTokenizerFast, Prose], object]] = {
    "keys": lambda t, p: one_of(t, p, 1024, 0, 0, keys=0),
    "distractors": lambda t, p: one_of(t, p, 1024, 0, 0, keys=99),
    "index": lambda t, p: one_of(t, p, 1024, -1, 0, keys=1),
    "seed": lambda t, p: one_of(t, p, 1024, 0, -1, keys=1),
    "length": lambda t, p: one_of(t, p, 10**9, 0, 0, keys=1),
    "length zero": lambda t, p: p.windows(0),
    "length of window": lambda t, p: one_of(t, p, 160, 4, 0, keys=1),
    "length of pairs": lambda t, p: key_value_samples(bare_ground(t, p), 300, 0, 0, questions=40),
    "length of nothing": lambda t, p: key_value_samples(bare_ground(t, p), 30, 0, 0, questions=1),
    "form": lambda t, p: key_value_samples(bare_ground(t, p), 1024, 0, 0, questions=1, form="json"),
    "questions": lambda t, p: key_value_samples(bare_ground(t, p), 1024, 0, 0, questions=0),
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
        with pytest.raises(SpecError, match=r"must (hold some|be a readable) text"):
            read_prose(merged_tokenizer(), tmp_path / name)
