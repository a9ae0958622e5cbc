"""Tables in Markdown, and pages in which a command writes only the text between marks."""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

BLOCK = re.compile(r"(<!-- table ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
"""Opening mark with a name, the text of this name, and the closing mark."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table with a line for each row. Each line ends with a line break."""
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, ["---"] * len(head), *rows))


def fill(text: str, make: Callable[[str], str]) -> str:
    """Return a page with new text between its marks. `make` returns the text of a name."""
    return BLOCK.sub(lambda mark: f"{mark[1]}{make(mark[2])}{mark[3]}", text)


def write(page: Path, make: Callable[[str], str]) -> None:
    """Write the new text between the marks of a page."""
    text = page.read_text(encoding="utf-8")
    assert BLOCK.search(text), f"{page} has no marks"  # before a measurement of hours is lost
    page.write_text(fill(text, make), encoding="utf-8")
