"""Tasks in running text: exact lengths, evidence where it is said to be, windows that do not repeat, chat templates."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from conformance.own.models_integration.tasks.test_tasks import TOKENIZERS, merged_tokenizer
from models_integration.tasks import Sample
from models_integration.tasks.chat import bare, chat
from models_integration.tasks.context import Ground
from models_integration.tasks.in_prose import keys_in_prose_samples
from models_integration.tasks.prose import NARRATIVE, Prose, read_prose
from models_integration.tasks.scbench import key_value_samples
from spec.errors import SpecError

pytestmark = pytest.mark.law("as-it-is-described")

RECENT = 128


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
) -> Sample:
    (sample,) = keys_in_prose_samples(bare_ground(tokenizer, prose), length, index, seed, keys=keys)
    return sample


def decoded(tokenizer: PreTrainedTokenizerFast, ids: tuple[int, ...]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=True)).strip()


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


def test_a_chat_template_that_is_not_there_or_prints_no_text_is_refused() -> None:
    tokenizer = merged_tokenizer()
    with pytest.raises(SpecError, match="has no chat template"):
        chat(tokenizer)
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
