"""Results on disk: one JSON object a line, appended whole or not at all, so that a run can be taken up again."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spec.errors import SpecError

__all__ = ["Row", "append_row", "find_row", "load_rows"]

Row = dict[str, Any]


def load_rows(path: Path) -> list[Row]:
    """The rows of a results file, oldest first; none if there is no file.

    Raises:
        SpecError: when a line is no JSON object.
    """
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise SpecError("results", f"{path}:{number}", f"is no JSON: {error}") from error
        if not isinstance(row, dict):
            raise SpecError("results", f"{path}:{number}", "must be a JSON object")
        rows.append(row)
    return rows


def append_row(path: Path, row: Row) -> None:
    """Add one row. The new file replaces the old in one step, so a reader sees it with the row or without."""
    text = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in [*load_rows(path), row])
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def find_row(rows: Sequence[Row], identity: Mapping[str, Any]) -> Row | None:
    """The row that answers exactly this question, if it is there."""
    for row in rows:
        if all(row.get(key) == value for key, value in identity.items()):
            return row
    return None
