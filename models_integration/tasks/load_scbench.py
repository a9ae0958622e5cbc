"""SCBench's own files: several questions on one context."""

from collections.abc import Iterator
from pathlib import Path

from models_integration.tasks.context import Ground
from models_integration.tasks.jsonl import Row, read_rows, stands, texts
from models_integration.tasks.metrics import CONTAINS
from models_integration.tasks.samples import Sample
from models_integration.tasks.turns import in_turns
from spec.errors import SpecError
from spec.validate import check_choices

__all__ = ["SCBENCH", "load_scbench"]

SCBENCH = {
    **dict.fromkeys(("kv", "kv_hard", "kv_compressible", "prefix_suffix", "hashhop"), (CONTAINS, 150)),
    "vt": ("names found", 30), "mf": ("first integer", 5), "passkey": ("first integer", 15), "qa_eng": (CONTAINS, 40),
}
"""The tasks that are served: SCBench's metric and number of new tokens. The others need code that is run, options in
its own words, or metrics of further packages."""


def load_scbench(
    ground: Ground, folder: Path, task: str, *, instruction: str, turns: bool = False
) -> Iterator[tuple[Sample, ...]]:
    """The contexts of `FOLDER/scbench_TASK.jsonl`, each with its questions, in the file's order.

    A row has `context` and `multi_turns`, a list of `input` and `answer` (text, number or list). Evidence are the
    places where an answer stands in the context (none for `mf` and `qa_eng`, whose answers are not quoted).

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
    rows = read_rows(path, ("context", "multi_turns"))
    for number, row in enumerate(rows):
        asked = row["multi_turns"]
        if not isinstance(asked, list) or not asked or not all({"input", "answer"} <= set(turn) for turn in asked):
            raise SpecError("path", str(path), f"row {number}: multi_turns must be a list of input and answer")

    def context(row: Row, number: int) -> tuple[Sample, ...]:
        samples = _samples(ground, row, number, task, instruction)
        return in_turns(ground, samples) if turns else samples

    return (context(row, number) for number, row in enumerate(rows))


def _samples(ground: Ground, row: Row, number: int, task: str, instruction: str) -> tuple[Sample, ...]:
    (metric, new_tokens), text = SCBENCH[task], f"{instruction}\n\n{row['context']}"
    context, quoted = (*ground.frame.opening, *ground.encode(text)), task not in ("mf", "qa_eng")
    answers = [texts(turn["answer"]) for turn in row["multi_turns"]]
    return tuple(
        ground.sample(
            context, f"\n\n{turn['input']}", "", " ".join(answer), stands(ground, text, answer) if quoted else (),
            gap="\n", task=f"scbench_{task}", dialect="scbench", metric=metric, references=answer,
            max_new_tokens=new_tokens, metadata={"row": number, "question": at},
        )
        for at, (turn, answer) in enumerate(zip(row["multi_turns"], answers, strict=True))
    )
