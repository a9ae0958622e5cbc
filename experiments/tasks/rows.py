"""Rows of a benchmark file: one JSON object per line, checked before samples are made."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, cast

from experiments.tasks.context import Ground, Maker
from experiments.tasks.needle import Sample
from spec.errors import SpecError
from spec.files import read_file

__all__ = ["File", "OfFile", "Row", "check_fields", "open_rows", "read_setting", "texts"]

Row: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class File:
    """Rows of a file, and the SHA-256 of the file."""

    path: Path
    digest: str
    rows: Sequence[Row]

    def row(self, index: int) -> Row:
        """Return the row of context number `index`."""
        if not 0 <= index < len(self.rows):
            raise SpecError("index", index, f"must lie in [0, {len(self.rows)}), the rows of {self.path}")
        return self.rows[index]

    def fitted(self, samples: Sequence[Sample], index: int, limit: int, question: int = 0) -> tuple[Sample, ...]:
        """Return the samples of a row with the context cut in the middle, so that the context plus `question` tokens
        has at most `limit` tokens."""
        tokens, half = samples[0].length, limit // 2
        cut = 0 if tokens + question <= limit else tokens + question - 2 * half
        if cut and half <= question:
            raise SpecError(
                "length", limit, f"must be above {2 * question + 1}, twice the question length of row {index}"
            )
        return tuple(
            replace(
                _without(sample, half, half + cut) if cut else sample,
                metadata={**sample.metadata, "file": self.digest, "row": index, "cut": cut},
            )
            for sample in samples
        )


@dataclass(frozen=True)
class OfFile:
    """Task of a file: function that makes the samples of a row, and number of rows."""

    make: Maker
    rows: int

    def __call__(self, ground: Ground, length: int, index: int, seed: int) -> Sequence[Sample]:
        """Return the samples of row `index`."""
        return self.make(ground, length, index, seed)


def _without(sample: Sample, start: int, stop: int) -> Sample:
    """Return the sample without the context tokens [start, stop). Samples that are cut have no evidence."""
    assert sample.evidence == ()
    return replace(sample, context_ids=(*sample.context_ids[:start], *sample.context_ids[stop:]))


def _json(where: str, text: bytes, fields: Mapping[str, type]) -> Row:
    """Parse a JSON object, and check that it has all these fields."""
    try:
        result = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SpecError("path", where, f"must be a JSON object: {error}") from error
    return check_fields(where, result, fields)


def check_fields(where: str, actual: object, fields: Mapping[str, type]) -> Row:
    """Return the object after a check that it has all these fields."""
    wrong = [
        name for name, kind in fields.items()
        if not isinstance(actual, dict) or name not in actual or not isinstance(actual[name], kind)
    ]
    if wrong:
        wanted = ", ".join(f"{name} ({kind.__name__})" for name, kind in fields.items())
        raise SpecError("path", where, f"must be an object with {wanted}; lacks {', '.join(wrong)}")
    return cast("Row", actual)


def open_rows(path: Path, fields: Mapping[str, type]) -> File:
    """Read the objects of a jsonl file, one per line."""
    data = read_file("path", path)
    lines = enumerate(data.split(b"\n"), 1)
    rows = [_json(f"{path}, line {number}", line, fields) for number, line in lines if line.strip()]
    if not rows:
        raise SpecError("path", str(path), "must have at least one row")
    return File(path, hashlib.sha256(data).hexdigest(), rows)


def read_setting(path: Path, dataset: str) -> str | int:
    """Return the value of a data set from a JSON file."""
    return cast("str | int", _json(str(path), read_file("path", path), {dataset: object})[dataset])


def texts(answer: object) -> tuple[str, ...]:
    """Return an answer, or each answer of a list, as text."""
    result = tuple(str(one) for one in (answer if isinstance(answer, list) else [answer]))
    if not result:
        raise SpecError("answer", str(answer), "must have at least one reference")
    return result
