"""What the pages of the repository show: Python, commands, links."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from conformance.paths import ROOT

__all__ = ["PAGES", "Fence", "anchors", "commands", "commands_in", "fences", "links", "spoken"]

PAGES = [
    path.relative_to(ROOT).as_posix()
    for pattern in ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "spec/**/*.md", "models_integration/**/*.md")
    for path in sorted(ROOT.glob(pattern))
]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`]+)`")
_LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)#?([^)\s]*)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Fence:
    """A block of a page: its language ("" for commands), its text, and the line of the page on which that begins."""

    language: str
    text: str
    line: int


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def fences(page: str) -> list[Fence]:
    """The blocks, in order."""
    text = read(page)
    return [Fence(m[1], m[2], 1 + text.count("\n", 0, m.start(2))) for m in _FENCE.finditer(text)]


def prose(page: str) -> str:
    """The text between the blocks."""
    return _FENCE.sub("", read(page))


def commands(page: str) -> Iterator[list[str]]:
    """The words of each command in a block of no language, without comments; in spec/ such a block is a format."""
    for fence in fences(page):
        if not fence.language and not page.startswith("spec/"):
            yield from commands_in(fence)


def commands_in(fence: Fence) -> Iterator[list[str]]:
    """The same of one block."""
    for line in fence.text.replace("\\\n", " ").splitlines():
        yield from filter(None, (shlex.split(command, comments=True) for command in line.split("&&")))


def spoken(page: str) -> Iterator[list[str]]:
    """The words of each command in running text; its options may lack values."""
    for span in _SPAN.findall(prose(page)):
        if span.startswith(("kvspec ", "nox -s ", "python -m ")):
            yield span.split()


def links(page: str) -> Iterator[tuple[Path, str]]:
    """Each file of the repository that the page links to, and the anchor in it, or ""."""
    for target, anchor in _LINK.findall(_SPAN.sub("", prose(page))):
        yield (ROOT / page).parent / target if target else ROOT / page, anchor


def anchors(page: Path) -> set[str]:
    """What a link may point to, as GitHub makes it of headings."""
    found = _HEADING.findall(_FENCE.sub("", page.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}
