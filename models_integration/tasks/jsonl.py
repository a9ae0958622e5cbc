"""What the loaders of published benchmarks share: rows of a file, and where its references stand in a context."""

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from models_integration.tasks.context import Ground, Span
from spec.errors import SpecError

__all__ = ["Row", "read_json", "read_rows", "stands", "texts"]

Row = Mapping[str, Any]


def read_json(path: Path) -> Any:
    """A JSON file.

    Raises:
        SpecError: for a file that cannot be read, or is no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SpecError("path", str(path), f"must be a readable JSON file: {error}") from error


def read_rows(path: Path, fields: Sequence[str]) -> list[Row]:
    """The objects of a jsonl file, one a line, each with all of `fields`.

    Raises:
        SpecError: for a file that cannot be read or has no row, and a line that is no such object, by its number.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError("path", str(path), f"must be a readable jsonl file: {error}") from error
    rows = [_row(f"{path}, line {number}", line, fields) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise SpecError("path", str(path), "must have at least one row, and has none")
    return rows


def _row(where: str, line: str, fields: Sequence[str]) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise SpecError("path", where, f"must be a JSON object: {error}") from error
    missing = [name for name in fields if not isinstance(row, dict) or name not in row]
    if missing:
        raise SpecError("path", where, f"must be an object with {', '.join(fields)}; lacks {', '.join(missing)}")
    found: Row = row
    return found


def texts(answer: object) -> tuple[str, ...]:
    """An answer, or a list of them, as text.

    Raises:
        SpecError: for none.
    """
    found = tuple(str(one) for one in (answer if isinstance(answer, list) else [answer]))
    if not found:
        raise SpecError("answer", str(answer), "must hold at least one reference")
    return found


def stands(ground: Ground, text: str, references: Sequence[str]) -> tuple[Span, ...]:
    """Token spans of all places in a context where a reference stands, ascending, found by the tokenizer's offsets.

    A tokenizer without them (of Python alone) gives none.
    """
    tokenizer, first = cast("Any", ground.tokenizer), len(ground.frame.opening)
    if not getattr(tokenizer, "is_fast", False):
        return ()
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    starts, stops = zip(*offsets, strict=True)
    found = {match.span() for one in references for match in re.finditer(re.escape(one), text) if one}
    return tuple(sorted(
        (first + bisect_right(stops, start), first + bisect_left(starts, stop)) for start, stop in found
    ))
