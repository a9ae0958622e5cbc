"""Items of the specification: the headings `### CC-NAME` and the text below each heading."""

import re
from collections.abc import Iterator
from pathlib import Path

_HEADING = re.compile(r"^### ([A-Z][A-Z0-9]*(?:-[A-Z0-9]+)+)[ \t]*$", re.MULTILINE)
_NEXT_HEADING = re.compile(r"^#{1,3} ", re.MULTILINE)


def items_of(markdown: str) -> Iterator[tuple[str, str]]:
    """Yield id and complete text of each item."""
    for match in _HEADING.finditer(markdown):
        rest = markdown[match.end() :]
        following = _NEXT_HEADING.search(rest)
        yield match[1], rest[: following.start()] if following else rest


def known_items() -> frozenset[str]:
    """Return the ids of all items in the specification's pages. The set is empty if the pages are not installed."""
    import spec

    pages = Path(spec.__file__).parent.glob("*.md")
    return frozenset(name for page in pages for name, _ in items_of(page.read_text(encoding="utf-8")))
