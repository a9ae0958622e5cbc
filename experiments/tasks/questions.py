"""Your own questions about your own texts, from a CSV or JSONL file with the columns question, answer and evidence.

The texts are in a column `text` of the same file, or in a separate text file. A text is one context: all tokens of the
text, never cut and never padded. Each row of the file is one question. Questions with equal texts have one context.
"""

import csv
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from io import BytesIO, StringIO
from math import isfinite
from pathlib import Path
from typing import Any

from experiments.tasks.context import Ground, Span
from experiments.tasks.metrics import GRADES, REGEX
from experiments.tasks.needle import QUESTION_FRAME, Sample
from spec.errors import SpecError
from spec.files import decode_text, read_file
from spec.printing import short
from spec.validate import check_choices

__all__ = ["USER", "QuestionTask", "question_task", "read_questions"]

FORMS = (".csv", ".jsonl")
USER = "own"
"""Value of `Sample.dialect` for your own questions."""
_SHOWN = 40
"""Largest number of characters of a user's text in an error message."""
_SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a character, which JSON can express and no tokenizer reads."""


@dataclass(frozen=True)
class Question:
    """A question: its row in the file (from 1), its right answers, and passages of the text with the answer."""

    row: int
    question: str
    answers: tuple[str, ...]
    evidence: tuple[str, ...]


@dataclass(frozen=True)
class QuestionTask:
    """Questions by text, in the order of the file.

    Attributes:
        grade: name of the grade, a key of GRADES.
        questions: questions about each text.
    """

    grade: str
    questions: Mapping[str, Sequence[Question]]

    @property
    def most(self) -> int:
        """Largest number of questions about one text."""
        return max(map(len, self.questions.values()))

    def longest(self, ground: Ground) -> int:
        """Return the number of tokens of the longest context."""
        return max(len(_context(ground, text)) for text in self.questions)

    def __call__(self, ground: Ground, length: int, index: int, seed: int) -> tuple[Sample, ...]:
        """Return the questions about text number `index`."""
        text = list(self.questions)[index]
        context = _context(ground, text)
        return tuple(self._sample(ground, context, text, index, one) for one in self.questions[text])

    def _sample(
        self, ground: Ground, context: tuple[int, ...], text: str, index: int, one: Question,
    ) -> Sample:
        spans = ground.spans(text, [result for passage in one.evidence for result in _occurrences(text, passage)])
        if one.evidence and not spans:
            kind = type(ground.tokenizer).__name__
            reason = f"needs token offsets, which {kind} lacks: use a fast tokenizer"
            raise SpecError("evidence", one.evidence[0], reason)
        about = {"text": index, "row": one.row, "question": one.question, "expected": " | ".join(one.answers)}
        asked = "\n\n" + QUESTION_FRAME.format(question=one.question)
        sample = ground.sample(
            context, asked, "", one.answers[0], spans, gap="", task=USER, dialect=USER, metric=GRADES[self.grade],
            references=one.answers, metadata=about,
        )
        # The likelihood of a pattern has no meaning.
        return replace(sample, answer_ids=()) if self.grade == REGEX else sample


def _context(ground: Ground, text: str) -> tuple[int, ...]:
    return (*ground.frame.opening, *ground.encode(text))


def _occurrences(text: str, passage: str) -> list[Span]:
    return [match.span() for match in re.finditer(re.escape(passage), text)]


def question_task(file: str, text: str = "", grade: str = "contains") -> QuestionTask:
    """Return the task for the paths of a file of questions and of a text file. "" means no text file.

    Files that have not changed are not read again.

    Raises:
        SpecError: if a file cannot be read, or if a row or the grade is invalid.
    """
    check_choices("grade", (grade,), GRADES)
    paths = Path(file), Path(text) if text else None
    return _task(*paths, grade, tuple(map(_version, paths)))


@lru_cache(maxsize=8)
def _task(file: Path, text: Path | None, grade: str, versions: tuple[object, ...]) -> QuestionTask:
    return QuestionTask(grade, read_questions(file, text, grade))


def _version(path: Path | None) -> tuple[int, ...] | None:
    """Return numbers that change with the content of a file. None if there is no file, which the reader reports."""
    try:
        now = None if path is None else path.stat()
    except (OSError, ValueError):
        return None
    return now and (now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns)


def read_questions(file: Path, text: Path | None, grade: str) -> dict[str, list[Question]]:
    """Read a file of questions, and return the questions of each text.

    Raises:
        SpecError: if a file cannot be read, if the file has no rows, if a column is missing, or if a row is invalid.
    """
    rows, document = _rows(file), None if text is None else _text("text", text)
    if document is not None and not document.strip():
        raise SpecError("text", str(text), "is empty: give a file with the text")
    if not rows:
        raise SpecError("questions", str(file), "has no question: write a row with question and answer for each one")
    result: dict[str, list[Question]] = {}
    first: dict[tuple[object, ...], int] = {}
    for number, row in enumerate(rows, 1):
        _check_columns(file, number, row, document is not None)
        where = f"{file}, row {number}"
        text_name = _single(where, "text", row) if document is None else document
        asked = _question(where, number, row, text_name, grade)
        before = first.setdefault((text_name, asked.question, asked.answers), number)
        if before != number:
            reason = f"is the same as row {before}, and would count twice: remove one of the two rows"
            raise SpecError("questions", where, reason)
        result.setdefault(text_name, []).append(asked)
    return result


def _check_columns(file: Path, number: int, row: Mapping[str, Any], document: bool) -> None:
    """Check the names of the columns, and that the text is in exactly one place."""
    columns, where = ", ".join(map(repr, row)), f"{file}, row {number}"
    if document and "text" in row:
        raise SpecError("text", where, "has a text in the column 'text': leave out --text, or rename the column")
    if not document and "text" not in row:
        raise SpecError("questions", where, f"has no column 'text', but {columns}: add --text FILE (text= in Python)")
    for name in ("question", "answer"):
        if name not in row:
            raise SpecError("questions", where, f"has no column {name!r}, but {columns}: rename a column to {name!r}")


def _question(where: str, number: int, row: Mapping[str, Any], text: str, grade: str) -> Question:
    question = _single(where, "question", row).strip()
    answers, evidence = (_texts(where, name, row) for name in ("answer", "evidence"))
    for name, cells in (("text", (text,)), ("question", (question,)), ("answer", answers)):
        if not any(cell.strip() for cell in cells):
            raise SpecError("questions", where, f"has an empty {name}: fill in the {name}, or remove the row")
    for passage in evidence:
        if passage not in text:
            shown = passage if len(passage) <= _SHOWN else f"{passage[:_SHOWN]}..."
            reason = f"{shown!r} is not in the text: copy the passage letter by letter, or leave the cell empty"
            raise SpecError("evidence", where, reason)
    for pattern in answers if grade == REGEX else ():
        try:
            re.compile(pattern)
        except (re.error, ValueError, OverflowError, RecursionError) as error:
            raise SpecError("answer", where, f"{pattern!r} is not a regular expression: {error}") from error
    return Question(number, question, answers, evidence)


def _single(where: str, name: str, row: Mapping[str, Any]) -> str:
    """Return the text of a cell that cannot be a list. An empty cell is an empty text."""
    cells = _texts(where, name, row)
    if len(cells) > 1:
        raise SpecError("questions", where, f"has {len(cells)} entries in {name!r}: write a row for each entry")
    return "".join(cells)


def _texts(where: str, name: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a cell, or the entries of a list, as texts. An empty entry is left out."""
    cell = row.get(name)
    entries = [one for one in (cell if isinstance(cell, list) else [cell]) if one is not None]
    for one in entries:
        if not (isinstance(one, str | int) or (isinstance(one, float) and isfinite(one))):
            reason = f"has {one!r:.{_SHOWN}} in {name!r}: write a text, a number or a list of texts"
            raise SpecError("questions", where, reason)
        if _SURROGATE.search(str(one)):
            raise SpecError("questions", where, f"has half of a character in {name!r}: write the character as UTF-8")
    return tuple(str(one) for one in entries if str(one).strip())


def _rows(file: Path) -> list[dict[str, Any]]:
    if file.suffix.lower() not in FORMS:
        raise SpecError("questions", str(file), f"must end in {' or '.join(FORMS)}")
    text = _text("questions", file)
    if not text.strip():
        raise SpecError("questions", str(file), "is empty: write a header question,answer and a row for each question")
    return _csv(file, text) if file.suffix.lower() == ".csv" else _jsonl(file, text)


def _text(argument: str, file: Path) -> str:
    """Return the text of a file in UTF-8, with or without the mark that spreadsheets put at the start."""
    return decode_text(argument, file, read_file(argument, file), "utf-8-sig")


def _csv(file: Path, text: str) -> list[dict[str, Any]]:
    import pandas as pd  # half a second, which commands without a CSV file need not wait

    try:
        names = next(filter(None, csv.reader(StringIO(text), skipinitialspace=True)), [])
        _check_header(file, [*map(str.strip, names)])
        frame = pd.read_csv(BytesIO(text.encode()), dtype=str, keep_default_na=False, skipinitialspace=True)
    except SpecError:
        raise
    except (ValueError, csv.Error) as error:
        reason = f"is not a CSV file ({error}): put cells that contain commas in double quotes"
        raise SpecError("questions", str(file), reason) from error
    if not isinstance(frame.index, pd.RangeIndex):
        raise SpecError("questions", str(file), "has rows with more cells than the header: put cells that contain"
                                                " commas in double quotes")
    twice = [name for name, count in Counter(map(str.strip, names)).items() if count > 1 and name]
    if twice:
        reason = f"has two columns {twice[0]!r}: leave out one, or write a JSONL file with a list of answers"
        raise SpecError("questions", str(file), reason)
    return [{str(name).strip(): cell for name, cell in row.items()} for row in frame.to_dict("records")]


def _check_header(file: Path, names: Sequence[str]) -> None:
    """Check that the first line of a CSV file is a header with columns of questions, separated by commas."""
    if len(names) == 1 and re.search("[;\t|]", names[0]):
        reason = f"has no column 'question', but {short(names[0])}: separate columns by commas"
        raise SpecError("questions", str(file), reason)
    if not {"question", "answer"} & {name.lower() for name in names}:
        reason = "must have the columns question and answer in a header: write question,answer as the first line"
        raise SpecError("questions", str(file), f"{reason}, which is {short(','.join(names))}")


def _jsonl(file: Path, text: str) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, object_pairs_hook=_object)
        except (ValueError, RecursionError) as error:
            raise SpecError("questions", f"{file}, line {number}", f"must be a JSON object: {error}") from error
        if not isinstance(row, dict):
            raise SpecError("questions", f"{file}, line {number}", "must be a JSON object with question and answer")
        rows.append(row)
    return rows


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if twice:
        raise ValueError(f"the key {twice[0]!r} is given twice")
    return dict(pairs)
