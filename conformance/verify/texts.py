"""What the specification's pages say of an item: its stage families, and what it demands."""

import re
from functools import cache

from conformance.items import items_of
from conformance.paths import SPEC

__all__ = ["COMPOSED", "families", "families_of", "must"]

COMPOSED = "compositions"
"""Where items stand that no family has: doors and compositions, the same code for every engine, on its stages."""

_ROW = re.compile(r"^\| (\w+) \| `\w+` \| ((?:[A-Z]+-[A-Z0-9-]+(?:, )?)+) \|$", re.MULTILINE)
_MUST = re.compile(r"\*\*MUST\*\*(.*?)(?=\n\*\*|\Z)", re.DOTALL)
_SENTENCES = re.compile(r"(?<=[.;:])\s+(?=[A-Z`])")
_LONGEST = 240


@cache
def families() -> dict[str, list[str]]:
    """The items of each stage family, from the table of spec/implementing.md."""
    found: dict[str, list[str]] = {}
    for family, names in _ROW.findall((SPEC / "implementing.md").read_text(encoding="utf-8")):
        items = found.setdefault(family, [])
        items += [name for name in names.split(", ") if name not in items]
    return found


def families_of(item: str) -> list[str]:
    """The families that an item belongs to."""
    return [family for family, items in families().items() if item in items] or [COMPOSED]


@cache
def _texts() -> dict[str, str]:
    pages = [page.read_text(encoding="utf-8") for page in sorted(SPEC.glob("*.md"))]
    return {name: text for page in pages for name, text in items_of(page)}


def must(item: str) -> str:
    """The first sentences of what an item demands, on one line."""
    found = _MUST.search(_texts().get(item, ""))
    if not found:
        return ""
    sentences = _SENTENCES.split(" ".join(found[1].split()))
    text = " ".join(sentences[:2])
    return text if len(text) <= _LONGEST else sentences[0][:_LONGEST]
