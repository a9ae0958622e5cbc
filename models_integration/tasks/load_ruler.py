"""RULER v1's own files."""

from collections.abc import Iterator
from pathlib import Path

from models_integration.tasks.context import Ground
from models_integration.tasks.jsonl import Row, read_rows, stands, texts
from models_integration.tasks.metrics import STRING_MATCH_ALL
from models_integration.tasks.ruler import PINNED
from models_integration.tasks.samples import Sample
from spec.errors import SpecError

__all__ = ["load_ruler"]

_NEW_TOKENS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}


def load_ruler(
    ground: Ground, folder: Path, task: str, *, dialect: str = PINNED
) -> Iterator[tuple[Sample, ...]]:
    """The contexts of `FOLDER/TASK/validation.jsonl`, one question each, in the file's order.

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
    if kind not in _NEW_TOKENS:
        raise SpecError("task", task, f"must begin with one of {', '.join(_NEW_TOKENS)}")
    path, mark = folder / task / "validation.jsonl", "\nWhat " if kind == "niah" else "\nQuestion: "
    rows = read_rows(path, ("input", "outputs"))
    for number, row in enumerate(rows):
        if mark not in row["input"]:
            raise SpecError("path", str(path), f"row {number}: input must hold the question, {mark.strip()!r}")
    return ((_sample(ground, row, number, task, mark, dialect),) for number, row in enumerate(rows))


def _sample(ground: Ground, row: Row, number: int, task: str, mark: str, dialect: str) -> Sample:
    context, _, question = row["input"].rpartition(mark)
    references, kind = texts(row["outputs"]), task.partition("_")[0]
    evidence = () if kind == "qa" else stands(ground, context, references)
    said = references[0] if kind == "qa" else ", ".join(references)
    return ground.sample(
        (*ground.frame.opening, *ground.encode(context)), mark + question, row.get("answer_prefix", ""), said, evidence,
        gap="", task=task, dialect=dialect, references=references, max_new_tokens=_NEW_TOKENS[kind],
        metric="string_match_part" if kind == "qa" else STRING_MATCH_ALL, metadata={"row": number},
    )
