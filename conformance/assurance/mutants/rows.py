"""The mutants that are written down: rows of `rows/*.toml`, one for each reading that the specification rejects."""

import hashlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from conformance.assurance.mutants.edits import Edit
from spec.errors import SpecError

__all__ = ["ROWS", "WrittenMutant", "read_rows"]

ROWS = Path(__file__).resolve().parent / "rows"
EDITS = ("find", "start", "body")


@dataclass(frozen=True)
class WrittenMutant:
    """The reference with one item wrong.

    Attributes:
        name: The item and the row's name, in capitals.
        item: The item whose tests must fail.
        why: The rejected reading, one sentence.
        edit: What is wrong.
        beyond: The size up to which it does as the reference does; "" if it has none.
    """

    name: str
    item: str
    why: str
    edit: Edit
    beyond: str = ""

    def digest(self, lock: Mapping[str, str]) -> str:
        """Hash of the edited function and its item's accepted text: a verdict holds for one."""
        subject = f"{self.edit.of} {self.edit.function()} {lock.get(self.item)}"
        return hashlib.sha256(subject.encode()).hexdigest()[:12]


def read_rows(path: Path) -> list[WrittenMutant]:
    """Read the mutants of one file.

    Raises:
        SpecError: if a row has unknown fields, or none of `find`, `start` and `body`, or several.
    """
    known = {"name", "item", "why", "beyond", *(field.name for field in fields(Edit))}
    found = []
    for row in tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]:
        if unknown := sorted(set(row) - known):
            raise SpecError(f"{path.name}: {row['name']}", unknown, f"must be some of {', '.join(sorted(known))}")
        if sum(name in row for name in EDITS) != 1:
            raise SpecError(f"{path.name}: {row['name']}", sorted(row), f"must have one of {', '.join(EDITS)}")
        edit = Edit(**{field.name: row[field.name] for field in fields(Edit) if field.name in row})
        name = f"{row['item']}-{row['name']}".replace("-", "_").upper()
        found.append(WrittenMutant(name, row["item"], row["why"], edit, row.get("beyond", "")))
    return found
