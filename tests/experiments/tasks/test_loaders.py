"""Tasks from published files, with small files of the published format, and evidence compared with its source text."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experiments.tasks import Sample, score
from experiments.tasks.context import Ground
from experiments.tasks.loaders import LONGBENCH
from experiments.tasks.registry import resolve_task
from models_integration.pocket import load_pocket_tokenizer
from spec.errors import SpecError
from tests.experiments.tasks.test_tasks import (
    byte_tokenizer,
    chatting_tokenizer,
    ground_of,
    merged_tokenizer,
    prompt,
    text_of,
)

pytestmark = pytest.mark.law("as-it-is-described")

TOKENIZERS = {"pocket": load_pocket_tokenizer, "merged": merged_tokenizer, "bytes": byte_tokenizer}
NIAH: dict[str, Any] = {
    "index": 0, "length": 60, "outputs": ["1234567", "7654321"], "answer_prefix": " The special magic numbers are",
    "input": "Memorize.\nOne is: 1234567. Grass 12345678. One is: 7654321.\nWhat are all the numbers in the text?",
}
QA = {"input": "Documents. France.\nQuestion: Where?", "outputs": ["France", "in France"], "answer_prefix": " Answer:"}
VT: dict[str, Any] = {
    "input": "VAR AAAAA = 1\nQuestion: Which?", "outputs": ["AAAAA", "BBBBB"], "answer_prefix": " they are: ",
}
CWE = {"input": "1. fox 2. hen\nQuestion: What?", "outputs": ["fox", "hen"], "answer_prefix": " The list are:"}
KV = {"context": '{"a": "v-one"}'}
LONG = {"input": "Who?", "context": "A story.", "answers": ["Tom", "Tom Sawyer"], "all_classes": None, "_id": "x"}
PAIRS = [{"Q": "Who?", "A": "Tom", "type": "x"}, {"Q": "When, {input}?", "A": 1900}]
LOOGLE: dict[str, Any] = {"input": "A story of {Q}.", "title": "x", "qa_pairs": repr(PAIRS)}
BUGS: dict[str, Any] = {
    "id": 1, "context": "def f(): pass", "input": "Which?", "answer": ["run"], "options": ["a.b", "run", "go", "to"],
}
PROBLEM: dict[str, Any] = {"problem": "What is 1 + 1?", "answer": "2", "unique_id": "test/a/1.json", "level": 1}
PROMPTS = dict.fromkeys(LONGBENCH, "Read.\n\n{context}\n\nQ: {input}\nA:")
ENOUGH = 1000


@pytest.fixture(params=sorted(TOKENIZERS))
def ground(request: pytest.FixtureRequest) -> Ground:
    return ground_of(TOKENIZERS[request.param]())


def put(path: Path, *rows: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return path


THREE, TWO_OF_THREE = ("France", "in France", "the French kingdom"), "It lies in France."


def ruler(folder: Path, task: str, *rows: object) -> str:
    return f"ruler-file:{put(folder / task / 'validation.jsonl', *rows)}"


def longbench(folder: Path, dataset: str, row: object = LONG, prompts: object = PROMPTS) -> str:
    put(folder / "config" / "dataset2prompt.json", prompts)
    put(folder / "config" / "dataset2maxlen.json", dict.fromkeys(LONGBENCH, 64))
    return f"longbench-file:{put(folder / 'data' / f'{dataset}.jsonl', row)}"


def loogle(folder: Path, dataset: str, row: object = LOOGLE, prompt: str = "Read.\n{input}\nQ: {Q}\nA: ") -> str:
    put(folder / "config" / "task2prompt.json", {"longdep_qa": prompt})
    put(folder / "config" / "task2maxlen.json", {"longdep_qa": 500})
    return f"loogle-file:{put(folder / 'LooGLE-testdata' / f'{dataset}.jsonl', row)}"


def infinite(folder: Path, dataset: str, *rows: object) -> str:
    return f"infinitebench-file:{put(folder / f'{dataset}.jsonl', *rows)}"


def problems(folder: Path, *rows: object, kind: str = "math-file") -> str:
    return f"{kind}:{put(folder / 'math500.jsonl', *rows)}"


def samples_of(ground: Ground, name: str, index: int = 0, length: int = ENOUGH) -> tuple[Sample, ...]:
    return resolve_task(name)(ground, length, index, 0)


def pieces(ground: Ground, sample: Sample) -> list[str]:
    return [text_of(ground, sample.context_ids[slice(*span)]).strip(' "') for span in sample.evidence]


def test_ruler_s_dialects_judge_the_same_prediction_otherwise(ground: Ground, tmp_path: Path) -> None:
    """An answer with two of three references is right for NVIDIA and kvpress. It scores 2/3 in lm-eval's function."""
    path = put(tmp_path / "qa_1" / "validation.jsonl", {"input": "Text.\nQuestion: Where?", "outputs": list(THREE)})
    ids = ground.tokenizer.encode(TWO_OF_THREE, add_special_tokens=False)
    for kind, wanted in (("ruler-file", 1.0), ("ruler-lm-eval-file", 2 / 3)):
        (sample,) = samples_of(ground, f"{kind}:{path}")
        assert score(ground.tokenizer, ids, sample) == wanted
        assert sample.dialect == kind.replace("-file", "").replace("ruler", "ruler-v1" if wanted == 1 else "ruler")


def test_a_row_of_ruler_is_split_before_its_question(ground: Ground, tmp_path: Path) -> None:
    name = ruler(tmp_path, "niah_multivalue", NIAH)
    (sample,) = samples_of(ground, name)
    assert prompt(ground, sample).strip() == f"{NIAH['input']}{NIAH['answer_prefix']}"
    assert text_of(ground, sample.question_ids).strip().startswith("What are all")
    assert (sample.references, sample.dialect, sample.max_new_tokens) == (tuple(NIAH["outputs"]), "ruler-v1", 128)
    assert len(sample.evidence) == 2  # The digits 1234567 in 12345678 do not count.
    assert [value in piece for value, piece in zip(NIAH["outputs"], pieces(ground, sample), strict=True)] == [True] * 2
    half = ground.tokenizer.encode("It is 7654321", add_special_tokens=False)
    assert score(ground.tokenizer, half, sample) == 0.5
    digest = hashlib.sha256(Path(name.partition(":")[2]).read_bytes()).hexdigest()
    assert sample.metadata == {"file": digest, "row": 0, "cut": 0}


def test_the_questions_of_ruler_qa_have_no_evidence_and_one_reference_is_enough(
    ground: Ground, tmp_path: Path
) -> None:
    (sample,) = samples_of(ground, ruler(tmp_path, "qa_1", QA))
    assert (sample.evidence, sample.expected, sample.max_new_tokens) == ((), "France", 32)
    assert score(ground.tokenizer, ground.tokenizer.encode("France", add_special_tokens=False), sample) == 1


@pytest.mark.parametrize(("task", "row", "answer"), [
    ("vt", VT, "AAAAA BBBBB"), ("cwe", CWE, " 1. fox 2. hen"), ("fwe", CWE, " fox hen"),
    ("niah_1", NIAH, " 1234567, 7654321"),
])
def test_a_gold_answer_of_ruler_reads_on_from_its_prefix(task: str, row: Any, answer: str, tmp_path: Path) -> None:
    ground = ground_of(merged_tokenizer())
    (sample,) = samples_of(ground, ruler(tmp_path, task, row))
    assert text_of(ground, sample.question_ids).endswith(row["answer_prefix"])
    assert text_of(ground, sample.answer_ids) == answer


def test_ruler_without_an_answer_prefix_and_with_a_template(tmp_path: Path) -> None:
    ground = ground_of(chatting_tokenizer())
    name = ruler(tmp_path, "niah_single_1", {**NIAH, "answer_prefix": ""}, NIAH)
    (bare_row,), (prefixed,) = samples_of(ground, name), samples_of(ground, name, 1)
    assert text_of(ground, bare_row.context_ids).startswith("[user]Memorize.")
    assert text_of(ground, bare_row.question_ids).endswith("in the text?[/][assistant]")
    assert text_of(ground, prefixed.question_ids).endswith("[/][assistant] The special magic numbers are")
    assert pieces(ground, bare_row) == pieces(ground, prefixed)
    assert "1234567" in pieces(ground, bare_row)[0]


@pytest.mark.parametrize("dataset", sorted(LONGBENCH))
def test_a_row_of_longbench_stands_in_its_prompt(dataset: str, tmp_path: Path) -> None:
    ground = ground_of(chatting_tokenizer())
    classes = ["Tom", "Jim"] if dataset == "trec" else None
    (sample,) = samples_of(ground, longbench(tmp_path, dataset, {**LONG, "all_classes": classes}))
    chatted = dataset not in ("trec", "triviaqa", "samsum", "lcc", "repobench-p")
    assert text_of(ground, sample.context_ids).strip() == "[user]" * chatted + "Read.\n\nA story."
    assert text_of(ground, sample.question_ids).strip() == "Q: Who?\nA:" + "[/][assistant]" * chatted
    assert (sample.chat_template != "none") is chatted
    assert (sample.evidence, sample.max_new_tokens, sample.dialect) == ((), 64, "longbench-v1")
    # The answers of these two are numbers.
    right = {"passage_retrieval_en": 0.0, "passage_count": 0.0}.get(dataset, 1.0)
    given = score(ground.tokenizer, ground.tokenizer.encode("Tom", add_special_tokens=False), sample)
    assert given == pytest.approx(right, abs=2e-8)


def test_texts_of_longbench_that_hold_braces_stay_as_they_are(ground: Ground, tmp_path: Path) -> None:
    row = {**LONG, "input": "{context}?", "context": "int f() { return {input}; }"}
    (sample,) = samples_of(ground, longbench(tmp_path, "lcc_e", row))
    assert text_of(ground, sample.context_ids).endswith("{ return {input}; }")
    assert "Q: {context}?" in text_of(ground, sample.question_ids)


@pytest.mark.parametrize("pairs", [PAIRS, repr(PAIRS)])
def test_the_questions_of_loogle_share_a_text(ground: Ground, pairs: object, tmp_path: Path) -> None:
    first, second = samples_of(ground, loogle(tmp_path, "longdep_qa", {**LOOGLE, "qa_pairs": pairs}))
    assert text_of(ground, first.context_ids) == text_of(ground, second.context_ids) == "Read.\nA story of {Q}."
    assert [text_of(ground, one.question_ids) for one in (first, second)] == [
        "\nQ: Who?\nA: ", "\nQ: When, {input}?\nA: "
    ]
    assert (second.references, second.metric, second.max_new_tokens) == (("1900",), "rouge_l", 500)


def test_rows_of_infinitebench_ask_for_an_answer_or_a_letter(ground: Ground, tmp_path: Path) -> None:
    (code,) = samples_of(ground, infinite(tmp_path, "code_debug", BUGS))
    assert text_of(ground, code.question_ids).endswith("A. a.b\nB. run\nC. go\nD. to\n\nThe correct option is:")
    assert (code.references, code.metric, code.max_new_tokens) == (("B",), "option letter", 5)
    name = infinite(tmp_path, "longbook_qa_eng", {**BUGS, "answer": ["Tom", "Sid"], "options": []})
    (book,) = samples_of(ground, name)
    assert text_of(ground, book.question_ids) == "\n\nQuestion: Which?\nAnswer:"
    assert (book.references, book.metric, book.max_new_tokens) == (("Tom", "Sid"), "qa_f1", 40)


def test_a_problem_of_math_is_its_context_and_each_part_has_its_own(tmp_path: Path) -> None:
    """The part is MD5 of `unique_id` modulo 5. 0 and 1 are dev, computed with `md5sum` and Python's integers."""
    ground = ground_of(chatting_tokenizer())
    rows = [{**PROBLEM, "unique_id": f"test/algebra/{n}.json"} for n in range(20)]
    (sample,) = samples_of(ground, problems(tmp_path, *rows))
    assert text_of(ground, sample.context_ids) == "[user]What is 1 + 1?"
    assert text_of(ground, sample.question_ids).endswith("into \\boxed{}.[/][assistant]")
    assert score(ground.tokenizer, ground.tokenizer.encode(r"\boxed{4/2}", add_special_tokens=False), sample) == 1
    digests = [int(hashlib.md5(row["unique_id"].encode()).hexdigest(), 16) % 5 < 2 for row in rows]
    for kind, part in (("math-dev-file", True), ("math-confirm-file", False)):
        name = problems(tmp_path, *rows, kind=kind)
        actual = [samples_of(ground, name, at)[0].metadata["id"] for at in range(digests.count(part))]
        assert actual == [row["unique_id"] for row, dev in zip(rows, digests, strict=True) if dev is part]


LETTERS = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"


@pytest.mark.parametrize("limit", [62, 63, 80, 99])
def test_what_is_longer_is_cut_in_the_middle(limit: int, tmp_path: Path) -> None:
    """Check bytes: the first and the last half of all text are kept. The text ends with the question."""
    ground, question = ground_of(byte_tokenizer()), "\n\nQ: Who?\nA:"
    text = f"Read.\n\n{LETTERS}{question}"
    ids = [*ground.frame.opening, *ground.tokenizer.encode(text, add_special_tokens=False)]
    kept = ids if len(ids) <= limit else ids[: limit // 2] + ids[-(limit // 2) :]
    (sample,) = samples_of(ground, longbench(tmp_path, "hotpotqa", {**LONG, "context": LETTERS}), length=limit)
    assert list(sample.context_ids) == kept[: len(kept) - len(question)]
    assert sample.metadata["cut"] == len(ids) - len(kept)
    assert sample.evidence == ()


BAD: dict[str, Callable[[Path], str]] = {
    "task of ruler": lambda p: ruler(p, "squad", NIAH),
    "tasks of no file": lambda p: f"ruler-file:{p}/vt/validation.jsonl",
    "path of no question": lambda p: ruler(p, "vt", NIAH),
    "path of no rows": lambda p: ruler(p, "vt"),
    "path of other fields": lambda p: ruler(p, "vt", KV),
    "path of another type": lambda p: ruler(p, "vt", {**VT, "input": 3}),
    "path of a list": lambda p: ruler(p, "vt", [1]),
    "index": lambda p: ruler(p, "vt", VT),
    "length of a ruler": lambda p: ruler(p, "vt", VT, {**VT, "input": "long " * ENOUGH + VT["input"]}),
    "length of a question": lambda p: longbench(p, "lcc", {**LONG, "input": "long " * ENOUGH}),
    "answer": lambda p: ruler(p, "vt", VT, {**VT, "outputs": []}),
    "dataset": lambda p: longbench(p, "dureader"),
    "tasks of no settings": lambda p: f"longbench-file:{p}/data/lcc.jsonl",
    "path of other settings": lambda p: longbench(p, "lcc", prompts={}),
    "prompt": lambda p: longbench(p, "lcc", prompts={"lcc": "no place"}),
    "dataset of loogle": lambda p: loogle(p, "shortdep_cloze"),
    "prompt of loogle": lambda p: loogle(p, "longdep_qa", prompt="{Q} {input}"),
    "path of no list": lambda p: loogle(p, "longdep_qa", {**LOOGLE, "qa_pairs": "none"}),
    "path of no code": lambda p: loogle(p, "longdep_qa", {**LOOGLE, "qa_pairs": "exit()"}),
    "path of no pairs": lambda p: loogle(p, "longdep_qa", {**LOOGLE, "qa_pairs": []}),
    "path of other pairs": lambda p: loogle(p, "longdep_qa", {**LOOGLE, "qa_pairs": [{"Q": "Who?"}]}),
    "dataset of infinitebench": lambda p: infinite(p, "passkey", BUGS),
    "path of three options": lambda p: infinite(p, "code_debug", {**BUGS, "options": ["run", "go", "to"]}),
    "path of no right option": lambda p: infinite(p, "code_debug", {**BUGS, "answer": "fly"}),
    "index of math": lambda p: problems(p, PROBLEM),
    "length of math": lambda p: problems(p, PROBLEM, {**PROBLEM, "problem": "long " * ENOUGH}),
}


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize("case", sorted(BAD))
def test_files_that_are_not_as_described_are_refused_by_name(case: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        samples_of(ground_of(byte_tokenizer()), BAD[case](tmp_path), "question" not in case)
    assert caught.value.argument == case.split()[0]


@pytest.mark.law("refused-before-anything-changes")
def test_a_broken_line_is_refused_by_its_number(tmp_path: Path) -> None:
    name = ruler(tmp_path, "qa_1", QA)
    path = Path(name.partition(":")[2])
    path.write_text(path.read_text() + "{broken\n")
    with pytest.raises(SpecError, match="line 2"):
        resolve_task(name)
