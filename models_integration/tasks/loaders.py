"""Files of published benchmarks as tasks: RULER v1, SCBench, LongBench v1, LooGLE, InfiniteBench.

All rows are checked before any sample is made; row `index` gives context number `index` and its questions. `length` is
the most tokens that a context may have: RULER's longer ones are refused; all others are cut in the middle, as the
benchmarks' tools do it, but token by token and without a new tokenization. Evidence are the places where
references stand, as words of their own, in what is left of the context, where the benchmark quotes it, by the
tokenizer's offsets (a tokenizer of Python alone has none). Metadata says the file's SHA-256, row and tokens cut.

Prompts of SCBench are those of microsoft/MInference `scbench/eval_utils.py` (MIT).
"""

import ast
import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from models_integration.tasks.chat import bare
from models_integration.tasks.context import Ground, Span
from models_integration.tasks.metrics import CONTAINS, OPTION, STRING_MATCH_ALL
from models_integration.tasks.rows import OfFile, Row, check_fields, open_rows, read_setting, texts
from models_integration.tasks.ruler import PINNED
from models_integration.tasks.samples import Sample
from models_integration.tasks.scbench import in_turns
from spec.errors import SpecError
from spec.validate import check_choices

__all__ = [
    "INFINITEBENCH", "LM_EVAL", "LONGBENCH", "LOOGLE", "SCBENCH", "infinitebench_file", "longbench_file", "loogle_file",
    "ruler_file", "scbench_file",
]

LM_EVAL = "ruler-lm-eval"
QA_METRIC = {PINNED: "string_match_part", LM_EVAL: STRING_MATCH_ALL}
"""Of RULER's qa, by dialect: one reference is enough for NVIDIA and kvpress, lm-eval counts the share of them."""
RULER = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}
"""How tasks begin, and their number of new tokens."""
SCBENCH = {
    "kv": (
        "Extract the value corresponding to the specified key in the JSON object below.\n\n{context}", "{input}",
        CONTAINS, 150,
    ),
    "prefix_suffix": ("{context}", "{input}", CONTAINS, 150),
    "vt": ("{context}", "{input}", "names found", 30),
    "qa_eng": (
        "Read the book and answer the question. Be very concise in your answer.\n\n{context}",
        "Question: {input}\nAnswer:", "contains in any case", 40,
    ),
}
"""The tasks that are served: prompt, question, metric, number of new tokens. The others need code that is run, options
in their own words, questions made of other questions, or metrics of further packages."""
LONGBENCH = {
    **dict.fromkeys(("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique"), "qa_f1"),
    **dict.fromkeys(("gov_report", "qmsum", "multi_news"), "rouge_l"),
    "trec": "classification", "triviaqa": "qa_f1 of a line", "samsum": "rouge_l of a line",
    "passage_count": "count", "passage_retrieval_en": "retrieval",
    "lcc": "code_similarity", "repobench-p": "code_similarity",
}
"""The English and code data sets, and LongBench's metric of each."""
LOOGLE = ("shortdep_qa", "longdep_qa")
"""The data sets with questions."""
INFINITEBENCH = {
    "longbook_qa_eng": (SCBENCH["qa_eng"][0], "\n\n" + SCBENCH["qa_eng"][1], "qa_f1", 40),
    "code_debug": (
        "One of the functions in this Python code has an error that makes the code crash.\n\n{context}",
        "\n\nOptions:\n{options}\n\nThe correct option is:", OPTION, 5,
    ),
}
"""The data sets of the NestedKV paper: prompt, question, metric, number of new tokens."""
_NO_CHAT = ("trec", "triviaqa", "samsum", "lcc", "repobench-p")


def ruler_file(path: Path, *, dialect: str = PINNED) -> OfFile:
    """A file `TASK/validation.jsonl` of `scripts/data/prepare.py --model_template_type base`, one question each.

    A row has `input`, `outputs` and, in newer files, `answer_prefix`. The input is split before its last question; a
    chat template stands around input and question, and the answer's prefix behind it.

    Args:
        path: of the file, in a folder `niah_…`, `vt`, `cwe`, `fwe` or `qa_…`.
        dialect: of `QA_METRIC`.

    Raises:
        SpecError: for an unknown task, a file or a row that is not as described; by the task also for a context that is
            longer than asked for.
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


def scbench_file(path: Path, *, turns: bool = False) -> OfFile:
    """A file `scbench_TASK.jsonl`; a row has `context` and `multi_turns`, of `input` and `answer` each.

    Args:
        path: of the file; its task is one of `SCBENCH`.
        turns: mode `multi-turn`, in which gold answers stand between the questions, and the first question counts as a
            part of what is cut; else `scdq`, in which each question stands right behind the context, by itself. Unlike
            SCBench's, a gold answer has a space before it, where its question ends without one; a list of them is
            written as Python writes it, as SCBench has it between turns.

    Raises:
        SpecError: for an unknown task, a file or a row that is not as described.
    """
    task = path.stem.removeprefix("scbench_")
    check_choices("task", (task,), SCBENCH)
    file = open_rows(path, {"context": str, "multi_turns": list})
    for number, row in enumerate(file.rows):
        if not row["multi_turns"]:
            raise SpecError("path", str(path), f"row {number}: multi_turns must have at least one question")
        for turn in row["multi_turns"]:
            check_fields(f"{path}, row {number}", turn, {"input": str, "answer": object})

    def samples(ground: Ground, length: int, index: int, seed: int) -> tuple[Sample, ...]:
        found = _of_scbench(ground, file.row(index), task, turns)
        if not turns:
            return file.fitted(found, index, length)
        return in_turns(ground, file.fitted(found, index, length, len(found[0].question_ids)))

    return OfFile(samples, len(file.rows))


def _of_scbench(ground: Ground, row: Row, task: str, turns: bool) -> tuple[Sample, ...]:
    prompt, question, metric, new_tokens = SCBENCH[task]
    text, answers = prompt.replace("{context}", row["context"]), [texts(turn["answer"]) for turn in row["multi_turns"]]
    context = (*ground.frame.opening, *ground.encode(text))
    return tuple(
        ground.sample(
            context, "\n\n" * (turns and at == 0) + question.replace("{input}", turn["input"]), "", str(turn["answer"]),
            _stands(ground, text, answer) if task != "qa_eng" else (), gap="", task=f"scbench_{task}",
            dialect="scbench", metric=metric, references=answer, max_new_tokens=new_tokens,
        )
        for at, (turn, answer) in enumerate(zip(row["multi_turns"], answers, strict=True))
    )


def longbench_file(path: Path) -> OfFile:
    """A file `FOLDER/data/DATASET.jsonl` (or `DATASET_e.jsonl`), one question each, without evidence.

    A row has `input`, `context`, `answers` and `all_classes`. From LongBench's repository are read
    `FOLDER/config/dataset2prompt.json` and `dataset2maxlen.json`. What the prompt has behind the context is the
    question, which counts as a part of what is cut. As in LongBench no chat template stands around few-shot and code
    prompts.

    Args:
        path: of the file; its data set is one of `LONGBENCH`.

    Raises:
        SpecError: for an unknown data set, a file or a row that is not as described.
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
    """A file `FOLDER/LooGLE-testdata/DATASET.jsonl`, several questions each, without evidence.

    A row has `input`, the text, and `qa_pairs`, a list of `Q` and `A` or the Python text of one. From LooGLE's
    repository are read `FOLDER/config/task2prompt.json` and `task2maxlen.json`. Each question stands behind the text by
    itself. LooGLE counts ROUGE-L's recall; here it is the F measure, with LongBench's package.

    Args:
        path: of the file; its data set is one of `LOOGLE`.

    Raises:
        SpecError: for an unknown data set, a file or a row that is not as described.
    """
    check_choices("dataset", (path.stem,), LOOGLE)
    config = path.absolute().parent.parent / "config"
    prompt, new_tokens = (read_setting(config / f"task2{it}.json", path.stem) for it in ("prompt", "maxlen"))
    before, hole, behind = str(prompt).partition("{input}")
    if not hole or "{Q}" not in behind:
        raise SpecError("prompt", prompt, "must contain {input}, and {Q} after it")
    file = open_rows(path, {"input": str, "qa_pairs": object})
    pairs = [_pairs(f"{path}, row {number}", row["qa_pairs"]) for number, row in enumerate(file.rows)]

    def samples(ground: Ground, length: int, index: int, seed: int) -> tuple[Sample, ...]:
        context = (*ground.frame.opening, *ground.encode(before + file.row(index)["input"]))
        found = tuple(
            ground.sample(
                context, behind.replace("{Q}", pair["Q"]), "", str(pair["A"]), (), gap="", task=path.stem,
                dialect="loogle", metric="rouge_l", references=(str(pair["A"]),), max_new_tokens=int(new_tokens),
            )
            for pair in pairs[index]
        )
        return file.fitted(found, index, length, max(len(sample.question_ids) for sample in found))

    return OfFile(samples, len(file.rows))


def _pairs(where: str, given: object) -> Sequence[Row]:
    """The questions and answers of a row of LooGLE, whose repository has them as the text of a Python list."""
    try:
        found = ast.literal_eval(given) if isinstance(given, str) else given
    except (ValueError, SyntaxError) as error:
        raise SpecError("path", where, f"qa_pairs must be a list: {error}") from error
    if not isinstance(found, list) or not found:
        raise SpecError("path", where, "qa_pairs must be a list of at least one question")
    return [check_fields(where, pair, {"Q": str, "A": object}) for pair in found]


def infinitebench_file(path: Path) -> OfFile:
    """A file `DATASET.jsonl` of InfiniteBench, one question each, without evidence.

    A row has `context`, `input`, `answer` and `options`. The options of `code_debug` get the letters A to D.

    Args:
        path: of the file; its data set is one of `INFINITEBENCH`.

    Raises:
        SpecError: for an unknown data set, a file or a row that is not as described.
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
    """Token spans of all places where a reference stands as a word, ascending."""
    tokenizer, first = cast("Any", ground.tokenizer), len(ground.frame.opening)
    if not getattr(tokenizer, "is_fast", False):
        return ()
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    starts, stops = zip(*offsets, strict=True)
    words = [rf"(?<!\w){re.escape(one)}(?!\w)" for one in references if one]
    found = {match.span() for word in words for match in re.finditer(word, text)}
    return tuple(sorted(
        (first + bisect_right(stops, start), first + bisect_left(starts, stop)) for start, stop in found
    ))
