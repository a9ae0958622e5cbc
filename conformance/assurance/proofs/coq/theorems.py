"""The theorems of the Coq files by item: `CC_SPLIT_sum` is about CC-SPLIT."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Theorem", "stated", "theorems"]

_STATED = re.compile(r"^\s*Theorem ([A-Z]{2}_\w+)", re.MULTILINE)


@dataclass(frozen=True)
class Theorem:
    """A theorem: its item ("" where its name begins with none), its name, its file and line."""

    item: str
    name: str
    file: str
    line: int


def stated(folder: Path) -> Iterator[tuple[Path, int, str]]:
    """File, line and name of each theorem that is named like an item."""
    for path in sorted(folder.glob("*.v")):
        text = path.read_text(encoding="utf-8")
        for found in _STATED.finditer(text):
            yield path, text.count("\n", 0, found.start(1)) + 1, found[1]


def theorems(folder: Path, items: Iterable[str]) -> Iterator[Theorem]:
    """Each theorem with the longest item that its name begins with."""
    longest = sorted(items, key=len, reverse=True)
    for path, line, name in stated(folder):
        item = next((item for item in longest if name.startswith(item.replace("-", "_") + "_")), "")
        yield Theorem(item, name, path.name, line)
