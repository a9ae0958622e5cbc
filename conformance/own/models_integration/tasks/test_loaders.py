"""Loaders of published files, on small files of the published form; evidence against the text that it was made of."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from conformance.own.models_integration.tasks.test_tasks import byte_tokenizer, merged_tokenizer
from models_integration.pocket import load_pocket_tokenizer
from models_integration.tasks import Sample, score
from models_integration.tasks.chat import bare, chat
from models_integration.tasks.context import Ground
from models_integration.tasks.loaders import LONGBENCH, SCBENCH, load_longbench, load_ruler, load_scbench
from models_integration.tasks.prose import Prose
from spec.errors import SpecError

pytestmark = pytest.mark.law("as-it-is-described")

TOKENIZERS = {"pocket": load_pocket_tokenizer, "merged": merged_tokenizer, "bytes": byte_tokenizer}
TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}[/]{% endfor %}[assistant]"
NIAH: dict[str, Any] = {
    "index": 0, "length": 60, "outputs": ["1234567", "7654321"], "answer_prefix": " The special magic numbers are",
    "input": "Memorize.\nOne is: 1234567. Grass. One is: 7654321.\nWhat are all the numbers mentioned in the text?",
}
QA = {"input": "Documents. France.\nQuestion: Where?", "outputs": ["France", "in France"], "answer_prefix": " Answer:"}
KV = {
    "id": 0, "context": '{"a": "v-one", "b": "v-two"}',
    "multi_turns": [{"input": 'Key: "a"', "answer": "v-one"}, {"input": 'Key: "b"', "answer": "v-two"}],
}
NUMBERS = {"context": "[1, 2, 3]", "multi_turns": [{"input": "The largest?", "answer": 3}]}
LONG = {"input": "Who?", "context": "A story.", "answers": ["Tom", "Tom Sawyer"], "all_classes": None, "_id": "x"}
PROMPTS = dict.fromkeys(LONGBENCH, "Read.\n\n{context}\n\nQ: {input}\nA:")


@pytest.fixture(params=sorted(TOKENIZERS))
def ground(request: pytest.FixtureRequest) -> Ground:
    tokenizer = TOKENIZERS[request.param]()
    return Ground(tokenizer, Prose("none", (), ()), bare(tokenizer))


def put(path: Path, rows: list[object]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return path


def longbench_folder(folder: Path, dataset: str, row: object = LONG) -> Path:
    put(folder / "data" / f"{dataset}.jsonl", [row])
    put(folder / "config" / "dataset2prompt.json", [PROMPTS])
    put(folder / "config" / "dataset2maxlen.json", [dict.fromkeys(LONGBENCH, 64)])
    return folder


def said(ground: Ground, ids: tuple[int, ...]) -> str:
    return str(ground.tokenizer.decode(list(ids), skip_special_tokens=True))


def pieces(ground: Ground, sample: Sample) -> list[str]:
    return [said(ground, sample.context_ids[slice(*span)]) for span in sample.evidence]


def only(contexts: Iterator[tuple[Sample, ...]]) -> Sample:
    ((sample,),) = contexts
    return sample


def test_a_row_of_ruler_is_split_before_its_question(ground: Ground, tmp_path: Path) -> None:
    put(tmp_path / "niah_multivalue" / "validation.jsonl", [NIAH])
    sample = only(load_ruler(ground, tmp_path, "niah_multivalue"))
    whole = said(ground, sample.context_ids) + said(ground, sample.question_ids)
    assert whole.strip() == f"{NIAH['input']}{NIAH['answer_prefix']}"
    assert said(ground, sample.question_ids).strip().startswith("What are all")
    assert (sample.references, sample.dialect, sample.max_new_tokens) == (tuple(NIAH["outputs"]), "ruler-v1", 128)
    assert [value in piece for value, piece in zip(NIAH["outputs"], pieces(ground, sample), strict=True)] == [True] * 2
    half = ground.tokenizer.encode("It is 7654321", add_special_tokens=False)
    assert score(ground.tokenizer, half, sample) == 0.5


def test_the_questions_of_ruler_qa_have_no_evidence_and_one_reference_is_enough(
    ground: Ground, tmp_path: Path
) -> None:
    put(tmp_path / "qa_1" / "validation.jsonl", [QA])
    sample = only(load_ruler(ground, tmp_path, "qa_1", dialect="kvpress"))
    assert (sample.evidence, sample.dialect, sample.max_new_tokens) == ((), "kvpress", 32)
    assert score(ground.tokenizer, ground.tokenizer.encode("France", add_special_tokens=False), sample) == 1


def test_ruler_without_an_answer_prefix_and_with_a_template(tmp_path: Path) -> None:
    tokenizer = merged_tokenizer()
    tokenizer.chat_template = TEMPLATE
    ground = Ground(tokenizer, Prose("none", (), ()), chat(tokenizer))
    put(tmp_path / "niah_single_1" / "validation.jsonl", [{**NIAH, "answer_prefix": ""}, NIAH])
    (plain,), (prefixed,) = load_ruler(ground, tmp_path, "niah_single_1")
    assert said(ground, plain.context_ids).startswith("[user]Memorize.")
    assert said(ground, plain.question_ids).endswith("in the text?[/][assistant]")
    assert said(ground, prefixed.question_ids).endswith("[/][assistant] The special magic numbers are")
    assert pieces(ground, plain) == pieces(ground, prefixed)
    assert "1234567" in pieces(ground, plain)[0]


@pytest.mark.parametrize("turns", [False, True])
def test_the_questions_of_scbench_share_a_context_and_turns_go_on_from_gold_answers(
    turns: bool, ground: Ground, tmp_path: Path
) -> None:
    put(tmp_path / "scbench_kv.jsonl", [KV, KV])
    contexts = list(load_scbench(ground, tmp_path, "kv", instruction="Extract.", turns=turns))
    assert len(contexts) == 2
    first, second = contexts[0]
    assert first.context_digest == second.context_digest
    assert said(ground, first.context_ids).strip() == f"Extract.\n\n{KV['context']}"
    assert ["v-one" in pieces(ground, first)[0], "v-two" in pieces(ground, second)[0]] == [True, True]
    asked = said(ground, second.question_ids)
    assert ('Key: "a"' in asked) is ("v-one" in asked) is turns
    assert asked.rstrip().endswith('Key: "b"')
    assert 'Key: "b"' in said(ground, second.question_ids[second.history :])
    assert 'Key: "a"' not in said(ground, second.question_ids[second.history :])
    assert (second.history > 0) is turns
    assert (first.dialect, first.metric, first.max_new_tokens) == ("scbench", "contains", 150)


def test_numbers_of_scbench_are_text_and_no_evidence(ground: Ground, tmp_path: Path) -> None:
    put(tmp_path / "scbench_mf.jsonl", [NUMBERS])
    sample = only(load_scbench(ground, tmp_path, "mf", instruction=""))
    assert (sample.expected, sample.evidence) == ("3", ())
    assert score(ground.tokenizer, ground.tokenizer.encode("3 is it", add_special_tokens=False), sample) == 1


@pytest.mark.parametrize("dataset", sorted(LONGBENCH))
def test_a_row_of_longbench_stands_in_its_prompt(dataset: str, tmp_path: Path) -> None:
    tokenizer = merged_tokenizer()
    tokenizer.chat_template = TEMPLATE
    ground = Ground(tokenizer, Prose("none", (), ()), chat(tokenizer))
    classes = ["Tom", "Jim"] if dataset == "trec" else None
    folder = longbench_folder(tmp_path, dataset, {**LONG, "all_classes": classes})
    sample = only(load_longbench(ground, folder, dataset))
    framed = dataset not in ("trec", "triviaqa", "samsum", "lcc", "repobench-p")
    assert said(ground, sample.context_ids).strip() == "[user]" * framed + "Read.\n\nA story."
    assert said(ground, sample.question_ids).strip() == "Q: Who?\nA:" + "[/][assistant]" * framed
    assert (sample.chat_template != "none") is framed
    assert (sample.evidence, sample.max_new_tokens, sample.dialect) == ((), 64, "longbench-v1")
    right = {"passage_retrieval_en": 0.0, "passage_count": 0.0}.get(dataset, 1.0)  # their answers are numbers
    given = score(tokenizer, tokenizer.encode("Tom", add_special_tokens=False), sample)
    assert given == pytest.approx(right, abs=2e-8)


def test_texts_of_longbench_that_hold_braces_stay_as_they_are(ground: Ground, tmp_path: Path) -> None:
    row = {**LONG, "input": "{context}?", "context": "int f() { return {input}; }"}
    sample = only(load_longbench(ground, longbench_folder(tmp_path, "lcc", row), "lcc"))
    assert said(ground, sample.context_ids).endswith("{ return {input}; }")
    assert "Q: {context}?" in said(ground, sample.question_ids)


BAD: dict[str, Callable[[Ground, Path], object]] = {
    "task of ruler": lambda g, p: load_ruler(g, p, "squad"),
    "path of no file": lambda g, p: load_ruler(g, p, "vt"),
    "path of no question": lambda g, p: load_ruler(
        g, put(p / "vt" / "validation.jsonl", [NIAH]).parents[1], "vt"
    ),
    "path of no rows": lambda g, p: load_ruler(g, put(p / "vt" / "validation.jsonl", []).parents[1], "vt"),
    "path of other fields": lambda g, p: load_ruler(g, put(p / "vt" / "validation.jsonl", [KV]).parents[1], "vt"),
    "path of a list": lambda g, p: load_ruler(g, put(p / "vt" / "validation.jsonl", [[1]]).parents[1], "vt"),
    "task of scbench": lambda g, p: load_scbench(g, p, "repoqa", instruction=""),
    "path of no turns": lambda g, p: load_scbench(
        g, put(p / "scbench_kv.jsonl", [{**KV, "multi_turns": []}]).parent, "kv", instruction=""
    ),
    "path of other turns": lambda g, p: load_scbench(
        g, put(p / "scbench_kv.jsonl", [{**KV, "multi_turns": [{"input": "a"}]}]).parent, "kv", instruction=""
    ),
    "dataset": lambda g, p: load_longbench(g, p, "dureader"),
    "path of no settings": lambda g, p: load_longbench(g, p, "lcc"),
    "path of other settings": lambda g, p: load_longbench(
        g, put(longbench_folder(p, "lcc") / "config" / "dataset2prompt.json", [{}]).parents[1], "lcc"
    ),
    "prompt": lambda g, p: load_longbench(
        g, put(longbench_folder(p, "lcc") / "config" / "dataset2prompt.json", [{"lcc": "no place"}]).parents[1], "lcc"
    ),
}


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize("case", sorted(BAD))
def test_files_that_are_not_as_described_are_refused_by_name(case: str, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    with pytest.raises(SpecError) as caught:
        BAD[case](Ground(tokenizer, Prose("none", (), ()), bare(tokenizer)), tmp_path)
    assert caught.value.argument == case.split()[0]


@pytest.mark.law("refused-before-anything-changes")
def test_a_broken_line_is_refused_by_its_number(tmp_path: Path) -> None:
    path = put(tmp_path / "qa_1" / "validation.jsonl", [QA])
    path.write_text(path.read_text() + "{broken\n")
    tokenizer = byte_tokenizer()
    with pytest.raises(SpecError, match="line 2"):
        load_ruler(Ground(tokenizer, Prose("none", (), ()), bare(tokenizer)), tmp_path, "qa_1")


def test_every_task_of_scbench_is_judged_by_a_known_metric() -> None:
    from models_integration.tasks.metrics import METRICS

    assert {metric for metric, _ in SCBENCH.values()} | set(LONGBENCH.values()) <= set(METRICS)
