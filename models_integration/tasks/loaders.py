"""Files of published benchmarks as tasks: RULER v1, SCBench, LongBench v1, each where its own tools put it.

All rows are checked before any sample is made; row `index` gives context number `index` and its questions. `length` is
the most tokens that a context may have: RULER's longer ones are refused; those of SCBench and LongBench are cut in the
middle, as their tools do it, but token by token and without a new tokenization. Evidence are the places where
references stand, as words of their own, in what is left of the context, where the benchmark quotes it, by the
tokenizer's offsets (a tokenizer of Python alone has none). Metadata says the file's SHA-256, row and tokens cut.

Prompts of SCBench are those of microsoft/MInference `scbench/eval_utils.py` (MIT).
"""

import hashlib
import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, cast

from models_integration.tasks.chat import bare
from models_integration.tasks.context import Ground, Maker, Span
from models_integration.tasks.metrics import CONTAINS, STRING_MATCH_ALL
from models_integration.tasks.ruler import PINNED
from models_integration.tasks.samples import Sample
from models_integration.tasks.scbench import in_turns
from spec.errors import SpecError
from spec.validate import check_choices

__all__ = ["LM_EVAL", "LONGBENCH", "SCBENCH", "longbench_file", "ruler_file", "scbench_file"]

Row: TypeAlias = Mapping[str, Any]

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
_NO_CHAT = ("trec", "triviaqa", "samsum", "lcc", "repobench-p")


@dataclass(frozen=True)
class _File:
    path: Path
    digest: str
    rows: Sequence[Row]

    def row(self, index: int) -> Row:
        if not 0 <= index < len(self.rows):
            raise SpecError("index", index, f"must lie in [0, {len(self.rows)}), the rows of {self.path}")
        return self.rows[index]

    def fitted(self, samples: Sequence[Sample], index: int, limit: int, question: int = 0) -> tuple[Sample, ...]:
        """The samples of one row, their context cut in the middle so that it has `limit` tokens with a question of so
        many behind it."""
        tokens, half = samples[0].length, limit // 2
        cut = 0 if tokens + question <= limit else tokens + question - 2 * half
        if cut and half <= question:
            raise SpecError("length", limit, f"must be above {2 * question + 1}, twice the question in row {index}")
        return tuple(
            replace(
                _without(sample, half, half + cut) if cut else sample,
                metadata={**sample.metadata, "file": self.digest, "row": index, "cut": cut},
            )
            for sample in samples
        )


def _without(sample: Sample, start: int, stop: int) -> Sample:
    """Without these tokens of its context, and the pieces of evidence that they touch."""
    spans = [
        span if span[1] <= start else (span[0] - stop + start, span[1] - stop + start) for span in sample.evidence
        if span[1] <= start or span[0] >= stop
    ]
    kept = *sample.context_ids[:start], *sample.context_ids[stop:]
    return replace(sample, context_ids=kept, needle=spans[0] if spans else (0, 0), further=tuple(spans[1:]))


def ruler_file(path: Path, *, dialect: str = PINNED) -> Maker:
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
    file, mark = _opened(path, {"input": str, "outputs": list}), "\nWhat " if kind == "niah" else "\nQuestion: "
    for number, row in enumerate(file.rows):
        if mark not in row["input"]:
            raise SpecError("path", str(path), f"row {number}: input must hold the question, {mark.strip()!r}")

    def samples(ground: Ground, length: int, index: int, seed: int) -> tuple[Sample, ...]:
        sample = _of_ruler(ground, file.row(index), task, mark, dialect)
        if sample.length > length:
            raise SpecError("length", length, f"must be at least {sample.length}, the tokens of row {index} of {path}")
        return file.fitted((sample,), index, length)

    return samples


def _of_ruler(ground: Ground, row: Row, task: str, mark: str, dialect: str) -> Sample:
    context, _, question = row["input"].rpartition(mark)
    references, kind = _texts(row["outputs"]), task.partition("_")[0]
    numbered = " ".join(f"{at}. {word}" for at, word in enumerate(references, 1))
    answers = {"niah": ", ".join(references), "cwe": numbered, "qa": references[0]}
    quoted = kind != "qa"
    return ground.sample(
        (*ground.frame.opening, *ground.encode(context)), mark + question, row.get("answer_prefix", ""),
        answers.get(kind, " ".join(references)), _stands(ground, context, references) if quoted else (), gap="",
        task=task, dialect=dialect, references=references, max_new_tokens=RULER[kind],
        metric=STRING_MATCH_ALL if quoted else QA_METRIC[dialect],
    )


def scbench_file(path: Path, *, turns: bool = False) -> Maker:
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
    file = _opened(path, {"context": str, "multi_turns": list})
    for number, row in enumerate(file.rows):
        if not row["multi_turns"]:
            raise SpecError("path", str(path), f"row {number}: multi_turns must hold at least one question")
        for turn in row["multi_turns"]:
            _check_fields(f"{path}, row {number}", turn, {"input": str, "answer": object})

    def samples(ground: Ground, length: int, index: int, seed: int) -> tuple[Sample, ...]:
        found = _of_scbench(ground, file.row(index), task, turns)
        if not turns:
            return file.fitted(found, index, length)
        return in_turns(ground, file.fitted(found, index, length, len(found[0].question_ids)))

    return samples


def _of_scbench(ground: Ground, row: Row, task: str, turns: bool) -> tuple[Sample, ...]:
    prompt, question, metric, new_tokens = SCBENCH[task]
    text, answers = prompt.replace("{context}", row["context"]), [_texts(turn["answer"]) for turn in row["multi_turns"]]
    context = (*ground.frame.opening, *ground.encode(text))
    return tuple(
        ground.sample(
            context, "\n\n" * (turns and at == 0) + question.replace("{input}", turn["input"]), "", str(turn["answer"]),
            _stands(ground, text, answer) if task != "qa_eng" else (), gap="", task=f"scbench_{task}",
            dialect="scbench", metric=metric, references=answer, max_new_tokens=new_tokens,
        )
        for at, (turn, answer) in enumerate(zip(row["multi_turns"], answers, strict=True))
    )


def longbench_file(path: Path) -> Maker:
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
    prompt, new_tokens = (_setting(config / f"dataset2{it}.json", dataset) for it in ("prompt", "maxlen"))
    if str(prompt).count("{context}") != 1:
        raise SpecError("prompt", prompt, "must hold {context} once")
    file = _opened(path, {"input": str, "context": str, "answers": list, "all_classes": object})

    def samples(ground: Ground, length: int, index: int, seed: int) -> tuple[Sample, ...]:
        framed = replace(ground, frame=bare(ground.tokenizer)) if dataset in _NO_CHAT else ground
        sample = _of_longbench(framed, file.row(index), dataset, str(prompt), int(new_tokens))
        return file.fitted((sample,), index, length, len(sample.question_ids))

    return samples


def _of_longbench(ground: Ground, row: Row, dataset: str, prompt: str, new_tokens: int) -> Sample:
    before, _, behind = (part.replace("{input}", row["input"]) for part in prompt.partition("{context}"))
    references = _texts(row["answers"])
    return ground.sample(
        (*ground.frame.opening, *ground.encode(before + row["context"])), behind, "", references[0], (), gap="",
        task=dataset, dialect="longbench-v1", metric=LONGBENCH[dataset], references=references,
        max_new_tokens=new_tokens, choices=tuple(row["all_classes"] or ()),
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SpecError("path", str(path), f"must be a readable file: {error}") from error


def _json(where: str, text: bytes, fields: Mapping[str, type]) -> Row:
    """An object with all these fields."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise SpecError("path", where, f"must be a JSON object: {error}") from error
    return _check_fields(where, found, fields)


def _check_fields(where: str, found: object, fields: Mapping[str, type]) -> Row:
    wrong = [
        name for name, kind in fields.items()
        if not isinstance(found, dict) or name not in found or not isinstance(found[name], kind)
    ]
    if wrong:
        wanted = ", ".join(f"{name} ({kind.__name__})" for name, kind in fields.items())
        raise SpecError("path", where, f"must be an object with {wanted}; lacks {', '.join(wrong)}")
    return cast("Row", found)


def _opened(path: Path, fields: Mapping[str, type]) -> _File:
    """The objects of a jsonl file, one a line."""
    data = _read(path)
    lines = enumerate(data.split(b"\n"), 1)
    rows = [_json(f"{path}, line {number}", line, fields) for number, line in lines if line.strip()]
    if not rows:
        raise SpecError("path", str(path), "must have at least one row, and has none")
    return _File(path, hashlib.sha256(data).hexdigest(), rows)


def _setting(path: Path, dataset: str) -> str | int:
    return cast("str | int", _json(str(path), _read(path), {dataset: object})[dataset])


def _texts(answer: object) -> tuple[str, ...]:
    """An answer, or a list of them, as text."""
    found = tuple(str(one) for one in (answer if isinstance(answer, list) else [answer]))
    if not found:
        raise SpecError("answer", str(answer), "must hold at least one reference")
    return found


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
