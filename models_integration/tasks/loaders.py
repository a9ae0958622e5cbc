"""Files of published benchmarks as samples: RULER v1, SCBench, LongBench v1.

Each loader reads a local folder, checks every row before it gives anything, and gives the file's contexts in its order,
each with its questions. Lengths are the file's; nothing is cut. Evidence are the places where references stand in the
context, where the benchmark quotes it, by the tokenizer's offsets (a tokenizer of Python alone has none).
"""

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, cast

from models_integration.tasks.chat import bare
from models_integration.tasks.context import Ground, Span
from models_integration.tasks.metrics import CONTAINS, STRING_MATCH_ALL
from models_integration.tasks.ruler import PINNED
from models_integration.tasks.samples import Sample
from models_integration.tasks.turns import in_turns
from spec.errors import SpecError
from spec.validate import check_choices

__all__ = ["LONGBENCH", "SCBENCH", "load_longbench", "load_ruler", "load_scbench"]

Row: TypeAlias = Mapping[str, Any]
Contexts: TypeAlias = Iterator[tuple[Sample, ...]]

RULER = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}
"""How tasks begin, and their number of new tokens."""
SCBENCH = {
    **dict.fromkeys(("kv", "kv_hard", "kv_compressible", "prefix_suffix", "hashhop"), (CONTAINS, 150)),
    "vt": ("names found", 30), "mf": ("first integer", 5), "passkey": ("first integer", 15), "qa_eng": (CONTAINS, 40),
}
"""The tasks that are served: SCBench's metric and number of new tokens. The others need code that is run, options in
its own words, or metrics of further packages."""
LONGBENCH = {
    **dict.fromkeys(("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique"), "qa_f1"),
    **dict.fromkeys(("gov_report", "qmsum", "multi_news"), "rouge_l"),
    "trec": "classification", "triviaqa": "qa_f1 of a line", "samsum": "rouge_l of a line",
    "passage_count": "count", "passage_retrieval_en": "retrieval",
    "lcc": "code_similarity", "repobench-p": "code_similarity",
}
"""The English and code data sets, and LongBench's metric of each."""
_NO_CHAT = ("trec", "triviaqa", "samsum", "lcc", "repobench-p")


def load_ruler(ground: Ground, folder: Path, task: str, *, dialect: str = PINNED) -> Contexts:
    """The contexts of `FOLDER/TASK/validation.jsonl`, one question each.

    That is where `scripts/data/prepare.py --model_template_type base` writes them; a row has `input`, `outputs` and,
    in newer files, `answer_prefix`. The input is split before its last question; a chat template stands around input
    and question, and the answer's prefix behind it.

    Args:
        ground: tokenizer and frame.
        folder: RULER's `save_dir` for one length.
        task: the name of a folder there: `niah_…`, `vt`, `cwe`, `fwe` or `qa_…`.
        dialect: by whose generator the file was made; stands in every row.

    Raises:
        SpecError: for an unknown task, a file or a row that is not as described.
    """
    kind = task.partition("_")[0]
    check_choices("task", (kind,), RULER)
    path, mark = folder / task / "validation.jsonl", "\nWhat " if kind == "niah" else "\nQuestion: "
    rows = _rows(path, ("input", "outputs"))
    for number, row in enumerate(rows):
        if mark not in row["input"]:
            raise SpecError("path", str(path), f"row {number}: input must hold the question, {mark.strip()!r}")

    return ((_of_ruler(ground, row, task, mark, dialect),) for row in rows)


def _of_ruler(ground: Ground, row: Row, task: str, mark: str, dialect: str) -> Sample:
    context, _, question = row["input"].rpartition(mark)
    references, kind = _texts(row["outputs"]), task.partition("_")[0]
    quoted = kind != "qa"
    return ground.sample(
        (*ground.frame.opening, *ground.encode(context)), mark + question, row.get("answer_prefix", ""),
        ", ".join(references) if quoted else references[0], _stands(ground, context, references) if quoted else (),
        gap="", task=task, dialect=dialect, references=references, max_new_tokens=RULER[kind],
        metric=STRING_MATCH_ALL if quoted else "string_match_part",
    )


def load_scbench(ground: Ground, folder: Path, task: str, *, instruction: str, turns: bool = False) -> Contexts:
    """The contexts of `FOLDER/scbench_TASK.jsonl`; a row has `context` and `multi_turns`, of `input` and `answer` each.

    Args:
        ground: tokenizer and frame.
        folder: where the files lie.
        task: one of `SCBENCH`.
        instruction: text before the context; SCBench's stands in its code (`scbench/eval_utils.py`), not in its files.
        turns: mode `multi-turn`, gold answers between the questions; else `scdq`, each question by itself.

    Raises:
        SpecError: for an unknown task, a file or a row that is not as described.
    """
    check_choices("task", (task,), SCBENCH)
    path = folder / f"scbench_{task}.jsonl"
    rows = _rows(path, ("context", "multi_turns"))
    for number, row in enumerate(rows):
        asked = row["multi_turns"]
        if not isinstance(asked, list) or not asked or not all({"input", "answer"} <= set(turn) for turn in asked):
            raise SpecError("path", str(path), f"row {number}: multi_turns must be a list of input and answer")

    found = (_of_scbench(ground, row, task, instruction) for row in rows)
    return (in_turns(ground, samples) if turns else samples for samples in found)


def _of_scbench(ground: Ground, row: Row, task: str, instruction: str) -> tuple[Sample, ...]:
    (metric, new_tokens), quoted = SCBENCH[task], task not in ("mf", "qa_eng")
    text, answers = f"{instruction}\n\n{row['context']}", [_texts(turn["answer"]) for turn in row["multi_turns"]]
    context = (*ground.frame.opening, *ground.encode(text))
    return tuple(
        ground.sample(
            context, f"\n\n{turn['input']}", "", " ".join(answer), _stands(ground, text, answer) if quoted else (),
            gap="\n", task=f"scbench_{task}", dialect="scbench", metric=metric, references=answer,
            max_new_tokens=new_tokens,
        )
        for turn, answer in zip(row["multi_turns"], answers, strict=True)
    )


def load_longbench(ground: Ground, folder: Path, dataset: str) -> Contexts:
    """The contexts of a data set, one question each, without evidence.

    Read are `FOLDER/data/DATASET.jsonl` (a row has `input`, `context`, `answers` and `all_classes`), and from
    LongBench's repository `FOLDER/config/dataset2prompt.json` and `dataset2maxlen.json`. What the prompt has behind the
    context is the question. As in LongBench no chat template stands around few-shot and code prompts.

    Args:
        ground: tokenizer and frame.
        folder: as described.
        dataset: one of `LONGBENCH`.

    Raises:
        SpecError: for an unknown data set, a file or a row that is not as described.
    """
    check_choices("dataset", (dataset,), LONGBENCH)
    prompt, new_tokens = (_setting(folder / "config" / f"dataset2{it}.json", dataset) for it in ("prompt", "maxlen"))
    if str(prompt).count("{context}") != 1:
        raise SpecError("prompt", prompt, "must hold {context} once")
    framed = replace(ground, frame=bare(ground.tokenizer)) if dataset in _NO_CHAT else ground

    rows = _rows(folder / "data" / f"{dataset}.jsonl", ("input", "context", "answers", "all_classes"))
    return ((_of_longbench(framed, row, dataset, str(prompt), int(new_tokens)),) for row in rows)


def _of_longbench(ground: Ground, row: Row, dataset: str, prompt: str, new_tokens: int) -> Sample:
    before, _, behind = (part.replace("{input}", row["input"]) for part in prompt.partition("{context}"))
    references = _texts(row["answers"])
    return ground.sample(
        (*ground.frame.opening, *ground.encode(before + row["context"])), behind, "", references[0], (), gap="",
        task=dataset, dialect="longbench-v1", metric=LONGBENCH[dataset], references=references,
        max_new_tokens=new_tokens, choices=tuple(row["all_classes"] or ()),
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError("path", str(path), f"must be a readable file: {error}") from error


def _json(where: str, text: str, fields: Sequence[str]) -> Row:
    """An object with all these fields."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise SpecError("path", where, f"must be a JSON object: {error}") from error
    missing = [name for name in fields if not isinstance(found, dict) or name not in found]
    if missing:
        raise SpecError("path", where, f"must be an object with {', '.join(fields)}; lacks {', '.join(missing)}")
    return cast("Row", found)


def _rows(path: Path, fields: Sequence[str]) -> list[Row]:
    """The objects of a jsonl file, one a line."""
    lines = enumerate(_read(path).split("\n"), 1)
    rows = [_json(f"{path}, line {number}", line, fields) for number, line in lines if line.strip()]
    if not rows:
        raise SpecError("path", str(path), "must have at least one row, and has none")
    return rows


def _setting(path: Path, dataset: str) -> str | int:
    return cast("str | int", _json(str(path), _read(path), (dataset,))[dataset])


def _texts(answer: object) -> tuple[str, ...]:
    """An answer, or a list of them, as text."""
    found = tuple(str(one) for one in (answer if isinstance(answer, list) else [answer]))
    if not found:
        raise SpecError("answer", str(answer), "must hold at least one reference")
    return found


def _stands(ground: Ground, text: str, references: Sequence[str]) -> tuple[Span, ...]:
    """Token spans of all places where a reference stands, ascending."""
    tokenizer, first = cast("Any", ground.tokenizer), len(ground.frame.opening)
    if not getattr(tokenizer, "is_fast", False):
        return ()
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    starts, stops = zip(*offsets, strict=True)
    found = {match.span() for one in references for match in re.finditer(re.escape(one), text) if one}
    return tuple(sorted(
        (first + bisect_right(stops, start), first + bisect_left(starts, stop)) for start, stop in found
    ))
