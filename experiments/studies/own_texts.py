"""Comparison of policies on your own texts and questions: the rules of a run, and a data frame of all answers."""

import json
import math
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from typing import Any
from warnings import warn

import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from experiments.studies.evidence.kept import BLIND, FULL
from experiments.studies.evidence.rules import PARTS, rules_of
from experiments.studies.evidence.run import Measuring, check_budgets, items, methods
from experiments.studies.evidence.samples import ENDS, Samples, is_user_question
from experiments.studies.report import progress_bar, table_of
from experiments.studies.results import Row
from experiments.studies.subject import AUTO, subject_of
from experiments.tasks.needle import DEFAULT_PLACEMENT
from experiments.tasks.questions import question_task
from experiments.tasks.registry import QUESTION_TASK
from models_integration.policies.sizes import bytes_per_token, is_size, tokens_of_size
from reference.calibration import load_calibration
from spec.errors import SpecError
from spec.printing import counted
from spec.validate import check_whole

__all__ = ["answer_table", "compare", "question_results", "question_study", "user_question_rows"]

DEFAULT_POLICIES = ("nestedkv", "snapkv", "streamingllm")
DEFAULT_BUDGETS = (0.3, 0.5)
GRADE = "contains"
_ROWS = "questions.jsonl"
"""Temporary file with questions that are not in a file of the user."""
_IN_PYTHON = {"policy": "policies", "budget": "budgets", "placements": "placement"}
"""Arguments of `compare`, by the names in errors about a rules file."""
_OPTION = re.compile(r"--(\w+)(?: FILE \(\w+= in Python\))?")


def question_study(
    questions: Path, text: Path | None, grade: str, *, title: str, policies: Sequence[str], budgets: Sequence[str],
    placements: Sequence[str], models: Sequence[str], bare: bool, controls: bool = True, calibration: str = "",
) -> dict[str, Any]:
    """Return the entries of the table [study] of a rules file that compares policies on your own texts.

    Raises:
        SpecError: if a file cannot be read, or if a row or the grade is invalid.
    """
    task = question_task(str(questions), str(text or ""), grade)
    given = {"file": str(questions), **({"text": str(text)} if text else {}), "grade": grade}
    constants = ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in given.items())
    return {
        "title": title, "models": list(models), "contexts": len(task.questions), "questions": task.most, "seeds": [0],
        "lengths": [], "placements": list(placements), "tasks": [f"{QUESTION_TASK}({constants})"],
        "policies": [name for name in policies if name != FULL], "budgets": list(budgets),
        "controls": [name for name in (FULL, BLIND) if controls or name in policies], "bare": bare,
        **({"calibration": calibration} if calibration else {}),
    }


def compare(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase,
    questions: str | Path | Iterable[Mapping[str, Any]] | pd.DataFrame, text: str | Path | None = None, *,
    policies: Sequence[str] = DEFAULT_POLICIES, budgets: Sequence[float | int | str] = DEFAULT_BUDGETS,
    grade: str = GRADE, placement: str = DEFAULT_PLACEMENT, bare: bool = False, backend: str = AUTO,
    calibration: str | Path | None = None, batch_size: int = 12,
) -> pd.DataFrame:
    """Compare policies on your own texts and questions, and return the answers as a data frame.

    The model reads each text once. Each policy then selects the tokens to keep for each budget. The model answers every
    question from the remaining tokens, and evicts nothing while reading the question. The full cache and an answer
    without the text ("blind") are also measured.

        import kvspec
        from models_integration.pocket import load_pocket

        model, tokenizer = load_pocket()
        text = "The secret code for Project Aurora is 7492. " + "The river runs past the old mill. " * 40
        questions = [{"question": "What is the secret code for Project Aurora?", "answer": "7492"}]
        answers = kvspec.compare(model, tokenizer, questions, text, policies=["snapkv", "kvzip"], budgets=[0.3])
        answers.pivot_table("score", "policy", "budget")

    Args:
        model: causal language model of transformers.
        tokenizer: tokenizer of the model.
        questions: path of a CSV or JSONL file, or rows. A row has `question` and `answer`, and can have `evidence`
            (a passage of the text) and `text`. An answer can be a list of texts that are all right.
        text: text, or `pathlib.Path` of a text file. Default: the column `text` of the questions.
        policies: names of policies, as in `policy_from_name`, with constants as in "snapkv(W=16)".
        budgets: fractions of the text (0.3, "30%"), numbers of tokens (512), or memory of the kept tokens ("64MiB"),
            which becomes a number of tokens.
        grade: "contains", "exact", "f1" or "regex". With "contains" the normalised words of the answer must be in the
            model's answer. With "exact" the words must be equal. With "f1" the score is F1 of the words. With "regex"
            the answer is a regular expression, which must be found in the model's answer.
        placement: place of the question: "after" eviction, "in_prompt", or "paper".
        bare: if True, the chat template of the tokenizer is not used.
        backend: backend that selects the tokens to keep.
        calibration: calibration file, for the policies that need one.
        batch_size: number of compacted caches that share a forward pass.

    Returns:
        One row for each policy, budget and question. Columns: `policy`, `budget`, `text` (number of the text, from 0),
        `question`, `expected`, `answer`, `score` (from 0 to 1), `recovery` (gain in log-likelihood of the expected
        answer over an answer without the text, as a share of the full cache's gain), `evidence_kept` (share of the
        evidence that is kept), `prompt_tokens`, and `tokens_kept` (mean over layers and heads). A number that was not
        measured is NaN.

    Raises:
        SpecError: if an argument, a row or a file is invalid, or if a text is too long for the model.
    """
    _check_arguments(model, text)
    check_whole("batch_size", batch_size, 1)
    names, shares = _listed("policies", policies, str), _listed("budgets", budgets, (str, Real))
    entry = "column" if isinstance(questions, str | Path | pd.DataFrame) else "key"
    with tempfile.TemporaryDirectory(prefix="kvspec-") as folder, _argument_names(folder, entry):
        shares = [str(tokens_of_size(one, bytes_per_token(model))) if is_size(one) else one for one in shares]
        rules = rules_of(**question_study(
            _file_of(questions, Path(folder)), _text_file(text, Path(folder)), grade, title="Comparison",
            policies=names, budgets=shares, placements=[placement], models=["model"],
            bare=bare, calibration="" if calibration is None else str(Path(calibration).resolve()),
        ))
        used = None if calibration is None else load_calibration(Path(calibration))
        subject = subject_of("model", model, tokenizer, backend, used)
        named = methods(rules, subject)
        every = list(items(rules, subject, PARTS))
        lengths = dict.fromkeys(item.context_length for item in every)
        for warning in dict.fromkeys(check_budgets(rules, named, lengths)):
            warn(warning, stacklevel=2)
    measuring = Measuring(subject, rules, named, batch_size)
    rows = []
    with progress_bar(Console(stderr=True), len(every)) as progress:
        for item in every:
            rows.append(measuring.row(item, measuring(item, item.cells(rules))))
            progress(item.title.replace(f"{folder}{os.sep}", ""))
    return answer_table(rows)


def _check_arguments(model: object, text: object) -> None:
    """Check the model and the text, which are easily swapped with a tokenizer or a path.

    Raises:
        SpecError: if the model is no model or in training mode, or if the text is the path of a file.
    """
    if not isinstance(model, nn.Module):
        reason = "must be the model: type kvspec.compare(model, tokenizer, questions, text)"
        raise SpecError("model", type(model).__name__, reason)
    if model.training:
        raise SpecError("model", type(model).__name__, "is in training mode: call model.eval() first")
    if isinstance(text, str) and not text.strip():
        raise SpecError("text", text, "is empty: give the text, or the pathlib.Path of a file")
    if isinstance(text, str) and os.path.isfile(text):  # Path.is_file raises an error for a long text
        raise SpecError("text", text, f"is the path of a file: type pathlib.Path({text!r})")


def _listed(argument: str, value: Iterable[Any], kinds: type | tuple[type, ...]) -> list[str]:
    """Return the entries of an argument as text.

    Raises:
        SpecError: if the argument is a single entry instead of a list, or if an entry has a wrong type.
    """
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise SpecError(argument, value, f"must be a list: type {argument}=[{value!r}]")
    entries = list(value)
    if wrong := [one for one in entries if not isinstance(one, kinds)]:
        example = "['snapkv', 'kvzip']" if argument == "policies" else "[0.3, 512]"
        raise SpecError(argument, type(wrong[0]).__name__, f"must be a list such as {argument}={example}")
    return [str(one) for one in entries]


@contextmanager
def _argument_names(folder: str, entry: str) -> Iterator[None]:
    """Context manager in which errors name the arguments of `compare`, and neither options nor temporary files.

    `entry` is the name of a cell of a row: column or key.
    """
    try:
        yield
    except SpecError as error:
        value, bound = error.value, _OPTION.sub(r"\1", error.bound).replace("column", entry)
        if folder in str(value):
            value = str(value).replace(f"{folder}{os.sep}", "").removeprefix(f"{_ROWS}, ")
            value = re.sub(r"(number \d+) of .*", r"\1", value)
        raise SpecError(_IN_PYTHON.get(error.argument, error.argument), value, bound) from error


def _file_of(questions: Any, folder: Path) -> Path:
    """Return the path of the questions. Rows are written to a file, so that both ways have one reader."""
    if isinstance(questions, str | Path):
        return Path(questions)
    rows = questions.to_dict("records") if isinstance(questions, pd.DataFrame) else list(questions)
    if wrong := [row for row in rows if not isinstance(row, Mapping)]:
        raise SpecError("questions", wrong[0], "must be rows with question and answer, or the path of a file")
    if not rows:
        raise SpecError("questions", [], "must have at least one row with question and answer")
    file = folder / _ROWS
    plain = [{name: _plain(cell) for name, cell in row.items()} for row in rows]
    file.write_text("\n".join(json.dumps(row, default=str) for row in plain), encoding="utf-8")
    return file


def _plain(cell: object) -> object:
    """Return a cell as JSON can store it: None for a missing cell of pandas, and a list for several answers."""
    if isinstance(cell, np.ndarray | tuple | set | frozenset):
        return list(cell)
    return None if pd.api.types.is_scalar(cell) and pd.isna(cell) else cell


def _text_file(text: str | Path | None, folder: Path) -> Path | None:
    if text is None or isinstance(text, Path):
        return text
    file = folder / "text.txt"
    file.write_bytes(text.encode())
    return file


def answer_table(rows: Iterable[Row]) -> pd.DataFrame:
    """Return the answers of rows about your own questions: one row for each policy, budget and question.

    The columns are those of `compare`.
    """
    return pd.DataFrame([_line(row, cell) for row in rows for cell in row["cells"]])


def user_question_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the rows about your own questions."""
    return list(filter(is_user_question, rows))


def question_results(rows: Sequence[Row]) -> Iterator[Table | str]:
    """Yield a table of recovery and kept evidence, and a sentence about the full cache, for your own questions."""
    samples = Samples(rows)
    if not rows:
        return
    lines = [[*cell, *map(_share, (_recovered(samples, cell), samples.survival(cell).value))]
             for cell in samples.cells if cell[0] != BLIND]
    headings = ["policy", "budget", "recovery", "evidence kept"]
    filled = [at for at, _ in enumerate(headings) if any(line[at] for line in lines)]
    if len(filled) > 2:
        title = "Recovery of the expected answer's likelihood (1: full cache, 0: no text)"
        yield table_of(title, [headings[at] for at in filled], [[line[at] for at in filled] for line in lines])
    ends = [samples.having(cell).of(cell, "right") for cell in ENDS if cell in samples.cells]
    if len(ends) == len(ENDS):
        full, blind = (float(each.mean()) for each in ends)
        number = counted(len(rows), "question")
        yield f"Mean score of the full cache: {full:.2f}; without the text: {blind:.2f}; {number}."
        if full == 0:
            yield ("warning: the full cache has no right answer, so the scores cannot compare the policies. Look at the"
                   " answers (--answers FILE.csv), then change the questions, the --grade or the --model.")


def _share(value: float) -> str:
    return "" if np.isnan(value) else f"{value:.2f}"


def _recovered(samples: Samples, cell: tuple[str, str]) -> float:
    """Return the recovery over all questions. Unlike in a study, questions on one text are enough."""
    some = samples.having(cell, *ENDS)
    each, full, blind = (some.of(one, "likelihood") for one in (cell, *ENDS)) if some.rows else (np.zeros(0),) * 3
    worth = float((full - blind).sum())
    return float((each - blind).sum()) / worth if worth > 0 else math.nan


def _line(row: Row, cell: Row) -> Row:
    about, measured = row["metadata"], {(one["policy"], one["budget"]): one.get("likelihood") for one in row["cells"]}
    full, blind = (measured.get(end) for end in ENDS)
    likelihood, recovery, evidence = cell.get("likelihood"), np.nan, np.nan
    if likelihood is not None and full is not None and blind is not None and full > blind:
        recovery = (likelihood - blind) / (full - blind)
    if row["evidence_tokens"]:
        evidence = float(np.mean(cell["evidence_kept"])) / row["evidence_tokens"]
    return {
        "policy": cell["policy"], "budget": cell["budget"], "text": about["text"], "question": about["question"],
        "expected": about["expected"], "answer": cell["answer"].strip(), "score": float(cell["right"]),
        "recovery": recovery, "evidence_kept": evidence, "prompt_tokens": row["prompt_tokens"],
        "tokens_kept": float(np.mean(cell["kept"])),
    }
