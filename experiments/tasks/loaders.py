"""Files of published benchmarks as tasks: RULER v1, LongBench v1, LooGLE, InfiniteBench.

All rows are checked before a sample is made. Row `index` gives context number `index` and its questions. `length` is
the largest number of tokens of a context. Longer contexts of RULER raise an error. All other contexts are cut in the
middle by tokens, and are not tokenized again. The tools of the benchmarks tokenize again. If a benchmark's references
are quotes, the evidence is all whole-word occurrences of references in the cut context. The evidence needs a tokenizer
with offsets (a pure Python tokenizer has none). The metadata contains the SHA-256 of the file, the row, and the number
of tokens cut.
"""

import ast
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from experiments.tasks.context import Ground, Span
from experiments.tasks.metrics import OPTION, STRING_MATCH_ALL
from experiments.tasks.needle import Sample
from experiments.tasks.rows import OfFile, Row, check_fields, open_rows, read_setting, texts
from experiments.tasks.ruler import PINNED
from models_integration.model.frame import bare
from spec.errors import SpecError
from spec.validate import check_choices

__all__ = [
    "INFINITEBENCH", "LM_EVAL", "LONGBENCH", "LOOGLE", "infinitebench_file", "longbench_file", "loogle_file",
    "ruler_file",
]

LM_EVAL = "ruler-lm-eval"
QA_METRIC = {PINNED: "string_match_part", LM_EVAL: STRING_MATCH_ALL}
"""Metric of RULER's qa tasks, by dialect. NVIDIA and kvpress require one reference. lm-eval averages all."""
RULER = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}
"""First part of the tasks' names, and number of new tokens."""
LONGBENCH = {
    **dict.fromkeys(("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique"), "qa_f1"),
    **dict.fromkeys(("gov_report", "qmsum", "multi_news"), "rouge_l"),
    "trec": "classification", "triviaqa": "qa_f1 of a line", "samsum": "rouge_l of a line",
    "passage_count": "count", "passage_retrieval_en": "retrieval",
    "lcc": "code_similarity", "repobench-p": "code_similarity",
}
"""English and code data sets, with the metric in LongBench."""
LOOGLE = ("shortdep_qa", "longdep_qa")
"""Data sets with questions."""
INFINITEBENCH = {
    "longbook_qa_eng": (
        "Read the book and answer the question. Be very concise in your answer.\n\n{context}",
        "\n\nQuestion: {input}\nAnswer:", "qa_f1", 40,
    ),
    "code_debug": (
        "One of the functions in this Python code has an error that makes the code crash.\n\n{context}",
        "\n\nOptions:\n{options}\n\nThe correct option is:", OPTION, 5,
    ),
}
"""Data sets of the NestedKV paper: prompt, question, metric, number of new tokens."""
_NO_CHAT = ("trec", "triviaqa", "samsum", "lcc", "repobench-p")


def ruler_file(path: Path, *, dialect: str = PINNED) -> OfFile:
    """Task for a file `TASK/validation.jsonl` of `scripts/data/prepare.py --model_template_type base`.

    A row has one question, with the fields `input`, `outputs` and, in newer files, `answer_prefix`. The input is split
    before the last question. A chat template is placed around input and question, then the answer's prefix follows.

    Args:
        path: path of the file, in a folder `niah_…`, `vt`, `cwe`, `fwe` or `qa_…`.
        dialect: a key of `QA_METRIC`.

    Raises:
        SpecError: if the task is unknown, or if the file or a row has a different format. The task raises the error if
            a context is longer than requested.
    """
    task = path.absolute().parent.name
    kind = task.partition("_")[0]
    check_choices("task", (kind,), RULER)
    file, mark = open_rows(path, {"input": str, "outputs": list}), "\nWhat " if kind == "niah" else "\nQuestion: "
    for number, row in enumerate(file.rows):
        if mark not in row["input"]:
            raise SpecError("path", str(path), f"row {number}: input must contain the question, {mark.strip()!r}")

    def samples(ground: Ground, length: int, index: int, seed: int) -> tuple[Sample, ...]:
        sample = _of_ruler(ground, file.row(index), task, mark, dialect)
        if sample.length > length:
            raise SpecError("length", length, f"must be at least {sample.length}, the tokens of row {index} of {path}")
        return file.fitted((sample,), index, length)

    return OfFile(samples, len(file.rows))


def _of_ruler(ground: Ground, row: Row, task: str, mark: str, dialect: str) -> Sample:
    context, _, question = row["input"].rpartition(mark)
    references, kind = texts(row["outputs"]), task.partition("_")[0]
    numbered = " ".join(f"{at}. {word}" for at, word in enumerate(references, 1))
    answers = {"niah": ", ".join(references), "cwe": numbered, "qa": references[0]}
    quoted = kind != "qa"
    return ground.sample(
        (*ground.frame.opening, *ground.encode(context)), mark + question, row.get("answer_prefix", ""),
        answers.get(kind, " ".join(references)), _stands(ground, context, references) if quoted else (), gap="",
        task=task, dialect=dialect, references=references, max_new_tokens=RULER[kind],
        metric=STRING_MATCH_ALL if quoted else QA_METRIC[dialect],
    )


def longbench_file(path: Path) -> OfFile:
    """Task for a file `FOLDER/data/DATASET.jsonl` (or `DATASET_e.jsonl`) of LongBench, without evidence.

    A row has one question, with the fields `input`, `context`, `answers` and `all_classes`. The files
    `FOLDER/config/dataset2prompt.json` and `dataset2maxlen.json` of LongBench's repository are also read. The part of
    the prompt after the context is the question, and counts as part of the text that is cut. As in LongBench, few-shot
    and code prompts have no chat template.

    Args:
        path: path of the file. The data set is a key of `LONGBENCH`.

    Raises:
        SpecError: if the data set is unknown, or if the file or a row has a different format.
    """
    dataset, config = path.stem.removesuffix("_e"), path.absolute().parent.parent / "config"
    check_choices("dataset", (dataset,), LONGBENCH)
    prompt, new_tokens = (read_setting(config / f"dataset2{it}.json", dataset) for it in ("prompt", "maxlen"))
    if str(prompt).count("{context}") != 1:
        raise SpecError("prompt", prompt, "must contain {context} exactly once")
    file = open_rows(path, {"input": str, "context": str, "answers": list, "all_classes": object})

    def samples(ground: Ground, length: int, index: int, seed: int) -> tuple[Sample, ...]:
        framed = replace(ground, frame=bare(ground.tokenizer)) if dataset in _NO_CHAT else ground
        sample = _of_longbench(framed, file.row(index), dataset, str(prompt), int(new_tokens))
        return file.fitted((sample,), index, length, len(sample.question_ids))

    return OfFile(samples, len(file.rows))


def _of_longbench(ground: Ground, row: Row, dataset: str, prompt: str, new_tokens: int) -> Sample:
    before, _, behind = (part.replace("{input}", row["input"]) for part in prompt.partition("{context}"))
    references = texts(row["answers"])
    return ground.sample(
        (*ground.frame.opening, *ground.encode(before + row["context"])), behind, "", references[0], (), gap="",
        task=dataset, dialect="longbench-v1", metric=LONGBENCH[dataset], references=references,
        max_new_tokens=new_tokens, choices=tuple(row["all_classes"] or ()),
    )


def loogle_file(path: Path) -> OfFile:
    """Task for a file `FOLDER/LooGLE-testdata/DATASET.jsonl` of LooGLE, without evidence.

    A row has `input` (the text) and `qa_pairs`, a list of `Q` and `A` or the Python text of such a list. The files
    `FOLDER/config/task2prompt.json` and `task2maxlen.json` of LooGLE's repository are also read. Each question directly
    follows the text. LooGLE reports the recall of ROUGE-L. kvspec reports the F measure, as in LongBench.

    Args:
        path: path of the file. The data set is a key of `LOOGLE`.

    Raises:
        SpecError: if the data set is unknown, or if the file or a row has a different format.
    """
    check_choices("dataset", (path.stem,), LOOGLE)
    config = path.absolute().parent.parent / "config"
    prompt, new_tokens = (read_setting(config / f"task2{it}.json", path.stem) for it in ("prompt", "maxlen"))
    before, hole, behind = str(prompt).partition("{input}")
    if not hole or "{Q}" not in behind:
        raise SpecError("prompt", prompt, "must contain {input}, followed by {Q}")
    file = open_rows(path, {"input": str, "qa_pairs": object})
    pairs = [_pairs(f"{path}, row {number}", row["qa_pairs"]) for number, row in enumerate(file.rows)]

    def samples(ground: Ground, length: int, index: int, seed: int) -> tuple[Sample, ...]:
        context = (*ground.frame.opening, *ground.encode(before + file.row(index)["input"]))
        result = tuple(
            ground.sample(
                context, behind.replace("{Q}", pair["Q"]), "", str(pair["A"]), (), gap="", task=path.stem,
                dialect="loogle", metric="rouge_l", references=(str(pair["A"]),), max_new_tokens=int(new_tokens),
            )
            for pair in pairs[index]
        )
        return file.fitted(result, index, length, max(len(sample.question_ids) for sample in result))

    return OfFile(samples, len(file.rows))


def _pairs(where: str, given: object) -> Sequence[Row]:
    """Return the questions and answers of a row of LooGLE. LooGLE's repository has the text of a Python list."""
    try:
        result = ast.literal_eval(given) if isinstance(given, str) else given
    except (ValueError, SyntaxError) as error:
        raise SpecError("path", where, f"qa_pairs must be a list: {error}") from error
    if not isinstance(result, list) or not result:
        raise SpecError("path", where, "qa_pairs must be a list of at least one question")
    return [check_fields(where, pair, {"Q": str, "A": object}) for pair in result]


def infinitebench_file(path: Path) -> OfFile:
    """Task for a file `DATASET.jsonl` of InfiniteBench, with one question per row and without evidence.

    A row has `context`, `input`, `answer` and `options`. The options of `code_debug` are labelled A to D.

    Args:
        path: path of the file. The data set is a key of `INFINITEBENCH`.

    Raises:
        SpecError: if the data set is unknown, or if the file or a row has a different format.
    """
    check_choices("dataset", (path.stem,), INFINITEBENCH)
    file = open_rows(path, {"context": str, "input": str, "answer": object, "options": list})
    for number, row in enumerate(file.rows):
        if path.stem == "code_debug" and (len(row["options"]) != 4 or texts(row["answer"])[0] not in row["options"]):
            raise SpecError("path", f"{path}, row {number}", "must have four options, including the answer")

    def samples(ground: Ground, length: int, index: int, seed: int) -> tuple[Sample, ...]:
        sample = _of_infinitebench(ground, file.row(index), path.stem)
        return file.fitted((sample,), index, length, len(sample.question_ids))

    return OfFile(samples, len(file.rows))


def _of_infinitebench(ground: Ground, row: Row, dataset: str) -> Sample:
    prompt, question, metric, new_tokens = INFINITEBENCH[dataset]
    answers = texts(row["answer"])
    options = "\n".join(f"{letter}. {one}" for letter, one in zip("ABCD", row["options"], strict=False))
    if metric == OPTION:
        answers = ("ABCD"[row["options"].index(answers[0])],)
    before, _, behind = prompt.partition("{context}")
    asked = question.replace("{options}", options).replace("{input}", row["input"])
    return ground.sample(
        (*ground.frame.opening, *ground.encode(before + row["context"] + behind)), asked, "", answers[0], (), gap="",
        task=dataset, dialect="infinitebench", metric=metric, references=answers, max_new_tokens=new_tokens,
    )


def _stands(ground: Ground, text: str, references: Sequence[str]) -> tuple[Span, ...]:
    """Return the token spans of all whole-word occurrences of references, ascending."""
    words = [rf"(?<!\w){re.escape(one)}(?!\w)" for one in references if one]
    return ground.spans(text, {match.span() for word in words for match in re.finditer(word, text)})
